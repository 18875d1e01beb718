"""`headwater doctor`: what a bug report needs to say about the installation and the machine."""

from __future__ import annotations

from headwater_lab.cli.common import print_json
from headwater_lab.cli.options import LOOK, AsJson, command
from headwater_lab.util.terminal import literal


@command(LOOK, "doctor")
def doctor(*, json: AsJson = False) -> None:
    """Show versions, devices, dtypes, kernels, threads and what is missing, as one block for a bug report."""
    from headwater_lab.api.doctor import examine

    report = examine()
    if json:
        print_json(report)
        return
    for title, facts in report.items():
        print(title)
        for name, fact in facts.items():
            print(literal(f"  {name}: {fact}"))
