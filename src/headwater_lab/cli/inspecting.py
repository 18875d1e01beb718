"""`headwater inspect`: look inside trained models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwater_lab.cli.common import check_writable, err, out, quiet

if TYPE_CHECKING:
    from headwater_lab.inspection import Inspection


def inspect(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(help="Checkpoints' folders, or runs' (their newest); several are shown side by side."),
    ],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text to read; default: the model's training data. Repeat it to compare texts.",
            show_default=False,
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            help="Image to read, for an image model; default: held-out images of its training data. Repeat it for "
            "several.",
            show_default=False,
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            max=2**16, help="Rows to read from each text; or how many held-out images.", show_default="16, or 64 images"
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens per row; default: the data's, or at most 256 for a text.", show_default=False),
    ] = None,
    scalars: Annotated[
        bool, typer.Option("--scalars", help="Read no text and no images; show only the learned scalars.")
    ] = False,
    out_folder: Annotated[
        Path | None,
        typer.Option(
            "--out", file_okay=False, help="Write inspect.json and pictures into this folder.", show_default=False
        ),
    ] = None,
) -> None:
    """Look inside trained models, side by side: scalars, attention, induction, skip heads, parameter tokens.

    Models of images show attention over the patches.
    """
    from headwater.util.output_folder import occupied
    from headwater.util.outputs import check_replaceable
    from headwater_lab.inspection import check_alike, draw, inspect_model, tables, write_json
    from headwater_lab.training.models import open_trained

    quiet()
    if out_folder is not None:
        check_writable(out_folder, folder=True)
        check_replaceable(out_folder / "inspect.json")
    found: list[Inspection] = []
    for path in checkpoints:
        trained = open_trained(path)
        names = [one.name for one in found]
        name = path.resolve().name
        name = name if name not in names else f"{name} ({len(found) + 1})"
        found.append(
            inspect_model(
                trained, name, text or (), images=image or (), rows=rows, context=context, scalars_only=scalars
            )
        )
    check_alike(found)
    for table in tables(found):
        out.print(table, highlight=False)
    if out_folder is not None:
        with occupied(out_folder):
            written = draw(found, out_folder)
            write_json(found, out_folder / "inspect.json")
        err.print(f"written: {', '.join(map(str, (out_folder / 'inspect.json', *written)))}", soft_wrap=True)
