"""`headwater doctor`: what a bug report needs to say about the installation and the machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from headwater.util.terminal import literal


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show versions, devices, dtypes, kernels, threads and what is missing, as one block for a bug report."""
    from headwater_lab.cli.doctor import examine

    report = examine()
    if as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
        return
    for title, facts in report.items():
        print(title)
        for name, fact in facts.items():
            print(literal(f"  {name}: {fact}"))
