"""`headwater predict`: what is in images."""

from collections.abc import Sequence
from pathlib import Path

from headwater.util.errors import HeadwaterError
from headwater_lab.cli.arguments import device_of, print_result
from headwater_lab.cli.options import USE, CheckpointPath, DeviceName, PositiveInt, command


@command(USE, "predict runs/digits image.png")
def predict_classes(
    checkpoint: CheckpointPath,
    images: Sequence[Path],
    *,
    top: PositiveInt = 5,
    jsonl: bool = False,
    device: DeviceName = "auto",
) -> None:
    """Print the likeliest classes of images, with their probabilities.

    images: Image files.
    top: How many classes of each image to print.
    jsonl: Print {"image": …, "classes": {NAME: PROBABILITY, …}}, one line per image.
    """
    from headwater_lab.serving.prediction import load_for_prediction, predict_images

    for path in images:
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "no file"
            raise HeadwaterError(f"{str(path)!r} is {kind}; name image files.")
    model, processor = load_for_prediction(checkpoint)
    model.to(device_of(device))
    for path, classes in zip(images, predict_images(model, processor, images), strict=True):
        likeliest = dict(list(classes.items())[:top])
        line = f"{path}: {', '.join(f'{name} {share:.4f}' for name, share in likeliest.items())}"
        print_result({"image": str(path), "classes": likeliest}, [line], jsonl)
