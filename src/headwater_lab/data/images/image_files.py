"""Images of a Hugging Face dataset, or of folders: one for each class, also within train/ and val/, as ImageNet-1k."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import torch
import yaml
from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from pydantic import Field

from headwater.models.load import read_text, reading
from headwater.util.errors import HeadwaterError, first_line, nearest, shown
from headwater.util.hub import check_reachable
from headwater_lab.data.base import register_kind
from headwater_lab.data.images.image_data import ImageData, Images, ImageSettings, ImageSize, UnreadableImage
from headwater_lab.data.images.image_reading import image_suffixes, read_image
from headwater_lab.data.reading import local_path

if TYPE_CHECKING:
    from PIL.Image import Image

# Names of the held-out split, the first that exists.
SPLITS = ("validation", "val", "valid", "test")
# Where a dataset in a folder lists its files: in the head of its card, or in a separate file.
CARD, LIST = "README.md", ".huggingface.yaml"
# ImageNet's mean and standard deviation, which are common for all images.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@register_kind
class ImageFilesSettings(ImageSettings):
    """`data:` of a recipe, with `kind: images`."""

    kind: Literal["images"] = "images"
    source: str
    """A folder with a folder for each class, or with train/ and val/ of such folders; or a Hugging Face dataset: its
    name, or a folder of parquet files."""
    config: str | None = None
    """The configuration of a dataset on the hub."""
    split: str = "train"
    """The split to train on; within a folder, a subfolder."""
    held_out: str | Annotated[float, Field(gt=0, lt=1)] | None = None
    """The split to evaluate on; or a share of the training images, chosen by hash. Default: the first of validation,
    val, valid and test that exists, else 0.1."""
    image_column: str = "image"
    """A dataset's column of images."""
    label_column: str = "label"
    """A dataset's column of classes: ClassLabel, numbers from 0, or names."""
    image_size: ImageSize = 224
    """Height and width in pixels, one number or [height, width]. Images are resized to it."""
    crop_ratio: Annotated[float, Field(gt=0, le=1)] | None = 0.875
    """Evaluation takes the center crop, this part of the shorter side; null takes the whole image, squeezed. So does
    training without `augmentation.crop`."""

    def build(self) -> ImageData:
        """Open the images. Raises `HeadwaterError` for anything that is missing or inconsistent."""
        self.check_extras()
        splits = _open_splits(self)
        held_out = self.held_out
        if held_out is None:
            held_out = next((name for name in SPLITS if name in splits and name != self.split), 0.1)
        chosen = [_open_dataset(splits, self.split, repr(self.source))]
        if isinstance(held_out, str):
            chosen.append(_open_dataset(splits, held_out, f"data.held_out: {self.source!r}"))
        classes = _find_classes(chosen[0])
        sides = [number_classes(split, classes, self.channels) for split in chosen]
        if not isinstance(held_out, str):
            sides = sides[0].divide_classes(held_out)
        for name, side in zip(("train", "held out"), sides, strict=True):
            if not len(side):
                raise HeadwaterError(f"{self.source!r}: no images are left for {name}; use more or other splits.")
        notices = list(chain.from_iterable(split.notices for split in chosen))
        if unused := sorted(set(range(len(classes))) - set(sides[0].labels)):
            names = ", ".join(map(classes.__getitem__, unused[:5]))
            notices.append(f"{len(unused)} of {len(classes)} classes have no image to train on: {names}.")
        digest = hashlib.sha256("".join(side.digest for side in sides).encode()).hexdigest()
        middle, spread = (list(values) if self.channels == 3 else [sum(values) / 3] for values in (MEAN, STD))
        return ImageData(
            self,
            sides[0],
            sides[1],
            classes,
            {"source": self.source, "sha256": digest},
            mean=middle,
            std=spread,
            crop_ratio=self.crop_ratio,
            notices=notices,
        )


class ImageSplit(NamedTuple):
    """A part of a source.

    where: for messages. read: the file, or the bytes of an image, by number. labels: numbers of classes or their names.
    classes: their names in order, if the source has them. sizes: in bytes, where images have only numbers as names.
    """

    where: str
    read: Callable[[int], Path | bytes]
    names: Sequence[str]
    labels: Sequence[Any]
    classes: list[str] | None
    notices: Sequence[str] = ()
    sizes: Sequence[int] | None = None


def _open_splits(settings: ImageFilesSettings) -> dict[str, Callable[[], ImageSplit]]:
    """List the splits of the source, not yet read. Raises `HeadwaterError` if it is neither a folder nor a dataset."""
    folder = local_path(settings.source)
    if not folder.is_dir() and (folder.exists() or folder.is_absolute()):
        raise HeadwaterError(f"data.source: {shown(settings.source)} is neither a folder of images nor a dataset.")
    if any(chain(folder.glob("*.arrow"), folder.glob("*/*.arrow"))):
        raise HeadwaterError(f"{settings.source!r} holds arrow files; write the dataset to parquet (`to_parquet`).")
    if folder.is_dir() and not any(chain(folder.glob("*.parquet"), folder.glob("*/*.parquet"))):
        return _folder_splits(settings, folder)
    return _dataset_splits(settings, folder)


def _open_dataset(splits: dict[str, Callable[[], ImageSplit]], name: str, where: str) -> ImageSplit:
    """Open a split by its name. Raises `HeadwaterError` if there is none, and as the split does."""
    if name not in splits:
        raise HeadwaterError(f"{where} has no split {name!r}; {nearest(name, splits)}")
    return splits[name]()


def _folder_splits(settings: ImageFilesSettings, folder: Path) -> dict[str, Callable[[], ImageSplit]]:
    """List the splits of a folder, not yet read. Raises `HeadwaterError` if its folders are neither splits nor classes,
    and for settings of datasets."""
    for name in ("config", "image_column", "label_column"):
        if getattr(settings, name) != type(settings).model_fields[name].default:
            raise HeadwaterError(f"data.{name} is for datasets, and {settings.source!r} has files; leave it out.")
    inside = {path.name: path for path in _find_folders(folder)}
    if settings.split not in inside:
        held_out = next((name for name in SPLITS if name in inside), None)
        if held_out is None and settings.split != type(settings).model_fields["split"].default:
            raise HeadwaterError(f"{settings.source!r} has no folder {settings.split!r}; leave out data.split.")
        if held_out is None:
            return {settings.split: lambda: _folder_split(folder)}
        if not inside.keys() <= {"train", *SPLITS}:
            raise HeadwaterError(
                f"{settings.source!r} has the folders {', '.join(inside)}: {held_out!r} is the name of a split, and "
                f"there is no {settings.split!r}; move the folders of classes into {settings.split!r}, or rename "
                f"{held_out!r} if it is a class."
            )
    return {name: lambda path=path: _folder_split(path) for name, path in inside.items()}  # type: ignore[misc]


def _folder_split(folder: Path) -> ImageSplit:
    """Read a folder of folders, one for each class. Raises `HeadwaterError` if it has none, or one has no images."""
    classes = [path.name for path in _find_folders(folder)]
    if not classes:
        raise HeadwaterError(f"{str(folder)!r} has no classes; put the images of each class into a folder of its name.")

    endings = image_suffixes()
    files: list[Path] = []
    labels: list[int] = []
    left_out = [path for path in sorted(folder.iterdir()) if _is_file(path)]
    for label, name in enumerate(classes):
        paths = sorted(filter(_is_file, (folder / name).rglob("*")))
        images = [path for path in paths if path.suffix.lower() in endings]
        left_out += [path for path in paths if path.suffix.lower() not in endings]
        if not images:
            raise HeadwaterError(f"The class {name!r} in {str(folder)!r} has no images; add some or remove its folder.")
        files += images
        labels += [label] * len(images)
    names = [path.relative_to(folder).as_posix() for path in files]
    notices = []
    if left_out:
        notices.append(
            f"Files in {str(folder)!r} that are left out, because they are outside the folders of classes or are not "
            f"named like images: {len(left_out)}, {left_out[0].relative_to(folder).as_posix()!r} first."
        )
    return ImageSplit(str(folder), files.__getitem__, names, labels, classes, notices)


def _is_file(path: Path) -> bool:
    return not path.name.startswith(".") and path.is_file()


def _find_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _dataset_splits(settings: ImageFilesSettings, folder: Path) -> dict[str, Callable[[], ImageSplit]]:
    """List the splits of a Hugging Face dataset. Raises `HeadwaterError` if `folder` has files of another kind."""
    from datasets import load_dataset, load_dataset_builder
    from datasets.packaged_modules.parquet.parquet import Parquet

    source = settings.source
    local = folder.is_dir()
    try:
        if local:
            check_card(folder)
            builder = load_dataset_builder(str(folder), settings.config)
            if not isinstance(builder, Parquet):
                raise HeadwaterError(f"Most files in {str(folder)!r} are not parquet; move the parquet ones elsewhere.")
            builder.download_and_prepare()
            splits = builder.as_dataset()
        else:
            check_reachable("dataset", source)
            splits = load_dataset(source, settings.config)
    except HeadwaterError:
        raise
    except Exception as error:  # downloads and dataset layouts fail in many ways
        raise HeadwaterError(f"The dataset {source!r} could not be loaded: {first_line(error)}") from error
    roots = [folder] if local else download_folders(source)
    return {name: lambda name=name: _dataset_split(settings, name, splits[name], roots) for name in splits}  # type: ignore[misc]


def check_card(folder: Path) -> None:
    """Raise `HeadwaterError` if a dataset lists files outside its folder."""
    for name in (CARD, LIST):
        file = folder / name
        if not file.exists():
            continue
        text = read_text(file)
        if name == CARD:
            text = text.split("\n---", 1)[0].removeprefix("---") if text.startswith("---") else ""
        with reading(repr(str(file)), "correct or remove it"):
            content = yaml.safe_load(text)
        for path in _list_strings(content.get("configs") if isinstance(content, dict) else None):
            pure = PurePosixPath(path.replace("\\", "/"))
            if pure.is_absolute() or ".." in pure.parts or "::" in path or "://" in path:
                raise HeadwaterError(f"{str(file)!r} names {shown(path)}, which is outside its folder; correct it.")


def download_folders(name: str) -> list[Path]:
    """List the folders to which a dataset on the hub is downloaded and unpacked."""
    from datasets import config

    hub = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="dataset")
    return [hub, Path(config.HF_DATASETS_CACHE), Path(config.DOWNLOADED_DATASETS_PATH)]


def _list_strings(content: Any) -> Iterator[str]:
    """List all texts in a value."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for inner in content.values() if isinstance(content, dict) else content:
            yield from _list_strings(inner)


def _dataset_split(settings: ImageFilesSettings, name: str, rows: Any, roots: Sequence[Path]) -> ImageSplit:
    """Read a split of a dataset, whose rows may name files in `roots`. Raises `HeadwaterError` for a wrong column."""
    from datasets import ClassLabel
    from datasets import Image as ImageColumn
    from datasets.features.features import require_decoding
    from pyarrow import ArrowException

    where = f"{settings.source}:{name}"
    for field in ("image_column", "label_column"):
        column = getattr(settings, field)
        if column not in rows.column_names:
            raise HeadwaterError(
                f"data.{field}: {where!r} has no column {column!r}; {nearest(column, rows.column_names)}"
            )
    kind = rows.features[settings.label_column]
    if require_decoding(kind):  # decoding would open files and addresses named in the rows
        raise HeadwaterError(
            f"data.label_column: {settings.label_column!r} of {where!r} holds {type(kind).__name__}, not classes; name "
            "another column."
        )
    labels = rows[settings.label_column]
    try:
        images = rows.select_columns(settings.image_column).cast_column(
            settings.image_column, ImageColumn(decode=False)
        )
    except (ArrowException, TypeError, ValueError) as error:
        raise HeadwaterError(
            f"data.image_column: {settings.image_column!r} of {where!r} has no images, but "
            f"{rows.features[settings.image_column]}; name a column of images."
        ) from error
    read_image = partial(_read_row, images, settings.image_column, where, roots)
    names = [f"row {number}" for number in range(len(rows))]
    classes = list(kind.names) if isinstance(kind, ClassLabel) else None
    return ImageSplit(where, read_image, names, list(labels), classes, sizes=_read_sizes(images, settings.image_column))


def _read_sizes(rows: Any, column: str) -> list[int]:
    """Read the size of each encoded image of a dataset; 0 for a missing image and for a separate file."""
    import pyarrow.compute as arrow

    sizes: list[int] = []
    for table in rows.with_format("arrow").iter(1000):  # copies the rows of a shuffled dataset
        lengths = arrow.binary_length(arrow.struct_field(table[column], "bytes"))
        sizes += [size or 0 for size in lengths.to_pylist()]
    return sizes


def _read_row(rows: Any, column: str, where: str, roots: Sequence[Path], number: int) -> Path | bytes:
    """Read a row's image, or its file. Raises `UnreadableImage` if there is none, or it is not below one of `roots`."""
    value = rows[number][column]
    if not value or not (value.get("bytes") or value.get("path")):
        raise UnreadableImage(f"Row {number} of {where!r} has no image.")
    if value.get("bytes"):
        return value["bytes"]
    name = value["path"]
    files = [root / name for root in roots]
    real = [(Path(os.path.realpath(file)), os.path.realpath(root)) for file, root in zip(files, roots, strict=True)]
    inside = next((file for file, (path, root) in zip(files, real, strict=True) if path.is_relative_to(root)), None)
    if inside is None or "://" in name or "::" in name:
        raise UnreadableImage(
            f"Row {number} of {where!r} names {shown(name)}, which is not a file of the dataset; put the images into "
            "its folder, or their bytes into its rows."
        )
    return inside


def _find_classes(split: ImageSplit) -> list[str]:
    """Name a split's classes. Raises `HeadwaterError` for labels that are neither names nor numbers from 0."""
    if split.classes is not None:
        return split.classes
    for name, label in zip(split.names, split.labels, strict=True):
        if not isinstance(label, str | int) or (isinstance(label, int) and label < 0):
            raise HeadwaterError(
                f"The label {shown(label)} of {name} in {split.where!r} is neither a name nor a number from 0; correct "
                "it or remove the image."
            )
    labels = set(split.labels)
    if not all(isinstance(label, int) and not isinstance(label, bool) for label in labels):
        return sorted(map(str, labels))
    count = max(labels, default=-1) + 1
    if count > 2 * len(labels):
        raise HeadwaterError(
            f"The labels of {split.where!r} use only {len(labels)} of the numbers from 0 to {count - 1}, so most "
            "classes of the model would have no images; number the labels without gaps, or make them names (strings)."
        )
    return [str(number) for number in range(count)]


def number_classes(split: ImageSplit, classes: list[str], channels: int) -> ImageFiles:
    """Turn the labels of a split into numbers. Raises `HeadwaterError` for a label that is not a class."""
    numbers = {name: number for number, name in enumerate(classes)}
    # If a folder lacks a class, the same class may have different numbers in the two splits.
    class_names = dict(enumerate(split.classes or ()))
    labels = []
    for name, label in zip(split.names, split.labels, strict=True):
        key = class_names.get(label, str(label))
        if key not in numbers:
            raise HeadwaterError(
                f"The label {shown(label)} of {name} in {split.where!r} is out of range: there are {len(classes)} "
                f"classes, {classes[0]!r} to {classes[-1]!r}; correct it or remove the image."
            )
        labels.append(numbers[key])
    return ImageFiles(split, list(range(len(labels))), labels, channels)


class ImageFiles(Images):
    """See `Images`. Files are read when an image is needed."""

    def __init__(self, split: ImageSplit, numbers: list[int], labels: list[int], channels: int) -> None:
        """numbers: of the images in the split; labels: of these."""
        self.split, self.numbers, self.labels, self.channels = split, numbers, labels, channels

    @property
    def digest(self) -> str:
        """Hash names and labels, and the sizes of a dataset's rows; the pixels are not read.

        The sizes of files are left out, so that a run can resume after a broken file is replaced.
        """
        names, sizes = self.split.names, self.split.sizes
        listed = "\n".join(
            f"{names[n]}\t{label}" if sizes is None else f"{names[n]}\t{label}\t{sizes[n]}"
            for n, label in zip(self.numbers, self.labels, strict=True)
        )
        return hashlib.sha256(listed.encode(errors="surrogateescape")).hexdigest()

    def name(self, index: int) -> str:
        return self.split.names[self.numbers[index]]

    def open(self, index: int, draw: torch.Generator | None = None) -> Image:
        name = f"The image {self.name(index)!r} in {self.split.where!r}"
        return read_image(self.split.read(self.numbers[index]), name, self.channels)

    def divide_classes(self, share: float) -> list[ImageFiles]:
        """Split into [to train on, held out]: of each class a share, at least one image, chosen by the names' hash."""
        by_class: dict[int, list[int]] = {}
        for index, label in enumerate(self.labels):
            by_class.setdefault(label, []).append(index)
        held_out: set[int] = set()
        for members in by_class.values():
            if len(members) < 2:
                raise HeadwaterError(
                    f"{self.name(members[0])!r} is the only image of its class in {self.split.where!r}, so none can be "
                    "held out; add some, or name a split in data.held_out."
                )
            members.sort(key=lambda index: hashlib.sha256(self.name(index).encode(errors="surrogateescape")).digest())
            held_out.update(members[: min(max(1, round(share * len(members))), len(members) - 1)])
        sides: list[ImageFiles] = []
        for indices in ([i for i in range(len(self)) if (i in held_out) is out] for out in (False, True)):
            numbers, labels = ([values[i] for i in indices] for values in (self.numbers, self.labels))
            sides.append(ImageFiles(self.split, numbers, labels, self.channels))
        return sides
