"""`headwater predict`: what is in images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from headwater.util.errors import HeadwaterError
from headwater_lab.cli.common import Device, device_of, out, quiet


def predict(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's folder, or a run's (its newest checkpoint).")],
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    top: Annotated[int, typer.Option(min=1, help="How many classes of each image to print.")] = 5,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help='Print {"image": …, "classes": {NAME: PROBABILITY, …}}, one line per image.')
    ] = False,
    device: Device = "auto",
) -> None:
    """Print the likeliest classes of images, with their probabilities."""
    from headwater_lab.serving.prediction import load_for_prediction
    from headwater_lab.serving.prediction import predict as predicted

    quiet()
    for path in images:
        if not path.is_file():
            what = "a folder" if path.is_dir() else "no file"
            raise HeadwaterError(f"{str(path)!r} is {what}; name image files.")
    model, processor = load_for_prediction(checkpoint)
    model.to(device_of(device))
    for path, classes in zip(images, predicted(model, processor, images), strict=True):
        likeliest = dict(list(classes.items())[:top])
        if jsonl:
            print(json.dumps({"image": str(path), "classes": likeliest}, ensure_ascii=False), flush=True)
        else:
            found = ", ".join(f"{name} {share:.4f}" for name, share in likeliest.items())
            out.print(f"{path}: {found}", soft_wrap=True, highlight=False)
