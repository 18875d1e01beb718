"""`headwater doctor`: facts about the installation and the machine for a bug report."""

from headwater_lab.cli.arguments import print_result
from headwater_lab.cli.options import LOOK, AsJson, command


@command(LOOK, "doctor")
def show_installation(*, json: AsJson = False) -> None:
    """Show versions, devices, dtypes, kernels, threads and what is missing, as one block for a bug report."""
    from headwater_lab.api.diagnosis import examine

    report = examine()
    blocks = [
        "\n".join((title, *(f"  {name}: {fact}" for name, fact in facts.items()))) for title, facts in report.items()
    ]
    print_result(report, blocks, json, indent=2)
