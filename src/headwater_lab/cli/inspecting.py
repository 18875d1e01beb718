"""`headwater inspect`: look inside trained models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from headwater.util.errors import HeadwaterError
from headwater_lab.cli.arguments import check_writable, say, tell
from headwater_lab.cli.options import USE, FolderPath, Values, command

if TYPE_CHECKING:
    from headwater_lab.inspection import Inspection


@command(USE, "inspect runs/a runs/b --out runs/inside")
def inspect_models(
    checkpoints: Sequence[Path],
    *,
    text: Path | None = None,
    rows: Annotated[int, Values(max=2**16)] | None = None,
    context: int | None = None,
    scalars: bool = False,
    out: FolderPath | None = None,
) -> None:
    """Look inside trained models, side by side: scalars, attention, induction, skip heads.

    checkpoints: Checkpoints' folders, or runs' (their newest); several are shown side by side.
    text: Text to read; default: the model's training data; image models read held-out images.
    rows: Rows to read from the text, default 16; or how many held-out images, default 64.
    context: Tokens per row; default: the data's, or at most 256 for a text.
    scalars: Read no text and no images; show only the learned scalars.
    out: Write inspect.json and pictures into this folder.
    """
    from headwater_lab.inspection import build_tables, check_same_kind, draw_pictures, inspect_model, to_json
    from headwater_lab.training.trained_models import open_trained
    from headwater_lab.util.output_folder import occupy_folder
    from headwater_lab.util.outputs import check_replaceable, write_json

    if scalars and any(option is not None for option in (text, rows, context)):
        raise HeadwaterError("--scalars reads no rows; leave out --text, --rows and --context.")
    if out is not None:
        check_writable(out, folder=True)
        check_replaceable(out / "inspect.json")
    inspections: list[Inspection] = []
    for path in checkpoints:
        trained = open_trained(path)
        name = path.resolve().name
        name = name if name not in [model.name for model in inspections] else f"{name} ({len(inspections) + 1})"
        inspections.append(inspect_model(trained, name, text, rows=rows, context=context, scalars_only=scalars))
    check_same_kind(inspections)
    say(*build_tables(inspections))
    if out is not None:
        with occupy_folder(out):
            pictures = draw_pictures(inspections, out)
            write_json(out / "inspect.json", to_json(inspections))
        tell(f"written: {', '.join(map(str, (out / 'inspect.json', *pictures)))}")
