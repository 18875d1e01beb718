"""`headwater doctor`: facts about the installation and the machine for a bug report."""

from headwater_lab.cli.arguments import say
from headwater_lab.cli.options import LOOK, command


@command(LOOK, "doctor")
def show_installation() -> None:
    """Show versions, devices, dtypes, kernels, threads and what is missing, as one block for a bug report."""
    from headwater_lab.api.diagnosis import examine

    for title, facts in examine().items():
        say("\n".join((title, *(f"  {name}: {fact}" for name, fact in facts.items()))))
