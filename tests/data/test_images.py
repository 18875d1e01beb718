"""Images: read by name, changed by seed, epoch and index alone, and refused in one sentence."""

import hashlib
import io
import json
import multiprocessing
import os
import pickle
import signal
import struct
import threading
from collections import deque
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from headwater.util.errors import HeadwaterError
from headwater.util.seeding import generator
from headwater_lab.data.base import Share
from headwater_lab.data.images.augment import drawing_from
from headwater_lab.data.images.digits import DigitsSettings
from headwater_lab.data.images.glyphs import FAMILIES, HELD_OUT, GlyphImages, GlyphSettings, files_of
from headwater_lab.data.images.image_files import ImageFilesSettings
from headwater_lab.data.images.image_reading import UnreadableImage, read_image
from headwater_lab.recipe.recipe import parse
from headwater_lab.recipe.recipe_files import read_recipe
from headwater_lab.training.loop import read_batches
from headwater_lab.util.machine import cores

v2 = pytest.importorskip("torchvision.transforms.v2") if find_spec("torchvision") else None
# Without torchvision images are not changed.
needs_torchvision = pytest.mark.skipif(v2 is None, reason="torchvision is not installed: make test-vision")
EVERYTHING = dict(crop=(0.3, 1.0), flip=0.5, rand_augment=(9.0, 0.5), erase=0.5, mixup=0.8, cutmix=1.0) if v2 else {}


def picture(seed=0, size=(20, 24), mode="RGB"):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


@pytest.fixture(scope="session")
def digits():
    return DigitsSettings(workers=1).build()


@pytest.fixture
def folder(tmp_path):
    """Three classes of four images, of several kinds."""
    for number, name in enumerate(("ant", "bee", "cat")):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(4):
            suffix, mode = (("png", "L"), ("jpg", "RGB"), ("png", "RGBA"), ("webp", "RGB"))[i]
            picture(4 * number + i, mode=mode).save(tmp_path / "images" / name / f"{i}.{suffix}")
    return tmp_path / "images"


def build(source, **fields):
    return ImageFilesSettings(source=str(source), image_size=8, **fields).build()


def nothing_is_left(threads):
    """No process, and no thread but these: a queue's thread ends a moment after its queue."""
    assert multiprocessing.active_children() == []
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
        assert not thread.is_alive(), thread


def several(data, count, batch=6, start=0, seed=1, share=None):
    return list(islice(data.batches(seed, batch, start, *([] if share is None else [share])), count))


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in ("pixel_values", "labels"))


TRANSFORMS = {
    "RandomResizedCrop": lambda: v2.RandomResizedCrop(8),
    "RandomHorizontalFlip": lambda: v2.RandomHorizontalFlip(),
    "RandAugment": lambda: v2.RandAugment(2, 30),
    "AutoAugment": lambda: v2.AutoAugment(),
    "TrivialAugmentWide": lambda: v2.TrivialAugmentWide(),
    "AugMix": lambda: v2.AugMix(),
    "ColorJitter": lambda: v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
    "RandomErasing": lambda: v2.RandomErasing(1.0),
    "ElasticTransform": lambda: v2.ElasticTransform(sigma=1.0),
    "GaussianBlur": lambda: v2.GaussianBlur(3),
    "GaussianNoise": lambda: v2.GaussianNoise(),
    "RandomPerspective": lambda: v2.RandomPerspective(p=1.0),
    "RandomPhotometricDistort": lambda: v2.RandomPhotometricDistort(),
    "RandomZoomOut": lambda: v2.RandomZoomOut(p=1.0),
    "RandomAffine": lambda: v2.RandomAffine(30, (0.1, 0.1)),
    "RandomRotation": lambda: v2.RandomRotation(30),
    "RandomCrop": lambda: v2.RandomCrop(5),
    "ScaleJitter": lambda: v2.ScaleJitter((40, 40)),
    "RandomChoice": lambda: v2.RandomChoice([v2.RandomVerticalFlip(), v2.RandomHorizontalFlip()]),
    "RandomOrder": lambda: v2.RandomOrder([v2.RandomVerticalFlip(), v2.RandomHorizontalFlip()]),
    "RandomApply": lambda: v2.RandomApply([v2.RandomInvert(1.0)]),
}


@needs_torchvision
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_draw_from_their_own_generator_what_the_global_one_would_give(name):
    transform = TRANSFORMS[name]()
    image = torch.rand(3, 16, 16) if isinstance(transform, v2.GaussianNoise) else v2.functional.to_image(picture())
    for seed in range(4):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            expected = transform(image)
        before = torch.get_rng_state()
        with drawing_from(torch.Generator().manual_seed(seed)):
            found = transform(image)
        assert torch.equal(found, expected)
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("mixes", [{"mixup": 0.8, "cutmix": 1.0}, {"mixup": 0.4}, {"cutmix": 1.0}, {}], ids=str)
def test_rows_depend_on_seed_and_number_alone(mixes):
    if mixes and not v2:
        pytest.skip("torchvision is not installed: make test-vision")
    changes = EVERYTHING | {"mixup": 0.0, "cutmix": 0.0} | mixes
    data, many = (DigitsSettings(augmentation=changes, workers=workers).build() for workers in (0, 3))
    before = torch.get_rng_state()
    whole = several(data, 4)
    assert torch.equal(torch.get_rng_state(), before)
    for other in (several(many, 4), several(data, 4)):
        assert all(map(equal, whole, other))
    assert all(map(equal, whole[2:], several(data, 2, start=12)))
    for world in (2, 3):
        parts = [several(data, 4, share=Share(rank, world)) for rank in range(world)]
        for number, batch in enumerate(whole):
            own = [part[number] for part in parts]
            assert equal(batch, {name: torch.cat([one[name] for one in own]) for name in batch})
    for size in (1, 4, 8):  # of a batch
        rows = list(islice(data.batches(1, size, 0), 24 // size))
        together = [{name: torch.cat([one[name] for one in each]) for name in each[0]} for each in (whole, rows)]
        assert equal(*together)
    assert not equal(whole[0], several(data, 1, seed=2)[0])
    if mixes:
        assert whole[0]["labels"].shape == (6, 10)
        assert torch.allclose(whole[0]["labels"].sum(1), torch.ones(6))


@pytest.mark.parametrize("mix", ["MixUp", "CutMix", None])
def test_batches_and_their_fingerprints_are_those_made_image_by_image(mix):
    if mix and not v2:
        pytest.skip("torchvision is not installed: make test-vision")
    changes = EVERYTHING | {"mixup": 0.0, "cutmix": 0.0} | ({mix.lower(): 1.0} if mix else {})
    data = DigitsSettings(augmentation=changes, workers=3).build()
    recipe = SimpleNamespace(seed=4, training=SimpleNamespace(batch_size=28, compile=None))
    before = set(threading.enumerate())
    with closing(read_batches(recipe, data, 28, Share(), False, False)) as made:
        for first, found in zip((28, 56, 84), made, strict=False):
            rows = list(islice(data.order_images(4, first - 1), 29))
            pixels = torch.stack([data.augment_image(4, *row) for row in rows])
            labels = torch.tensor([data.train.labels[index] for _, index in rows])
            if mix:
                pairs = []
                for row in range(28):
                    pair = [row, row + 1]
                    with drawing_from(generator("mix", 4, first + row)):
                        pairs.append(getattr(v2, mix)(alpha=1.0, num_classes=10)(pixels[pair], labels[pair]))
                pixels, labels = (torch.stack([pair[1] for pair in each]) for each in zip(*pairs, strict=True))
            else:
                pixels, labels = pixels[1:], labels[1:]
            assert equal(found.tensors, {"pixel_values": pixels, "labels": labels})
            contents = [(first + i).to_bytes(8, "little") + each.numpy().tobytes() for i, each in enumerate(pixels)]
            hashes = [hashlib.blake2b(content, digest_size=5).digest() for content in contents]
            assert found.fingerprint == sum(int.from_bytes(each, "little") for each in hashes)
    nothing_is_left(before)


def test_processes_that_read_outlive_an_interrupt_and_their_end_is_told():
    """Ctrl-C reaches them too, and the step that is under way still wants its batches."""
    before, handler = set(threading.enumerate()), signal.getsignal(signal.SIGCHLD)
    with closing(DigitsSettings(workers=2).build().batches(1, 6, 0)) as made:
        readers = multiprocessing.active_children()
        assert len(readers) == min(2, cores())
        for reader in readers:
            os.kill(reader.pid, signal.SIGINT)
        for _ in range(5):
            next(made)
        assert multiprocessing.active_children() == readers
        for reader in readers:
            reader.kill()
        with pytest.raises(HeadwaterError, match=r"process that read images has ended, .*--ipc=host.*workers=0\.$"):
            deque(made, 0)
    assert signal.getsignal(signal.SIGCHLD) is handler  # the end of one raised nothing anywhere else
    nothing_is_left(before)


def test_where_processes_are_spawned_they_get_the_data_pickled(digits, folder):
    glyphs = GlyphSettings(image_size=16, characters="AB1", workers=0).build()
    for data in (digits, build(folder), glyphs):
        again = pickle.loads(pickle.dumps(partial(data.read_batch, 1, range(2))))
        assert equal(again((0, [(0, 1), (0, 2)])), data.read_batch(1, range(2), (0, [(0, 1), (0, 2)])))


@needs_torchvision
def test_batches_can_begin_at_any_row(digits):
    flipped = DigitsSettings(augmentation={"flip": 0.5}, workers=1).build()
    for data, start in ((digits, 5), (flipped, 5), (flipped, len(flipped.train) - 2)):
        (from_there,) = several(data, 1, start=start)
        together = several(data, 2, start=start - 3)
        rows = torch.cat([batch["pixel_values"] for batch in together])[3:9]
        assert torch.equal(from_there["pixel_values"], rows)


@needs_torchvision
def test_an_epoch_has_every_image_and_the_next_has_others_of_them():
    data = DigitsSettings(augmentation={"flip": 0.5}, workers=1).build()
    count = len(data.train)
    order = list(islice(data.order_images(3, 0), 2 * count))
    for epoch in range(2):
        own = order[epoch * count : (epoch + 1) * count]
        assert sorted(own) == [(epoch, index) for index in range(count)]
    seen = [data.augment_image(3, epoch, 7) for epoch in range(12)]
    assert seen[0].shape == (3, 8, 8)
    assert len({tuple(pixels.flatten().tolist()) for pixels in seen}) == 2  # as it is, and flipped


@needs_torchvision
def test_mixed_images_are_of_two_neighbors():
    plain = DigitsSettings(workers=1).build()
    (clear,) = several(plain, 1)
    (mixed,) = several(DigitsSettings(augmentation={"mixup": 1.0}, workers=1).build(), 1)
    partner = clear["pixel_values"].roll(1, 0)
    for row in range(1, 6):  # the first has none before it
        own, other = clear["labels"][row], clear["labels"].roll(1)[row]
        share = mixed["labels"][row, own] if own != other else None
        if share is not None:
            expected = share * clear["pixel_values"][row] + (1 - share) * partner[row]
            assert torch.allclose(mixed["pixel_values"][row], expected, atol=1e-5)


def test_held_out_images_are_prepared_as_the_saved_processor_does(digits):
    batch = digits.held_out_images(range(5))
    opened = [digits.held_out.open(i, generator(0)) for i in range(5)]
    assert torch.equal(batch["pixel_values"], digits.processor(images=opened, return_tensors="pt")["pixel_values"])
    # Unchanged training images look the same.
    draw = generator(0)
    seen = digits.change(digits.train.open(0, draw), draw)
    prepared = digits.processor(images=[digits.train.open(0, draw)], return_tensors="pt")["pixel_values"][0]
    assert torch.allclose(seen, prepared, atol=1e-6)
    levels = torch.from_numpy(np.array(digits.train.open(0, draw))).permute(2, 0, 1)
    assert torch.equal(seen, (levels / 255 - 0.5) / 0.5)
    assert not {*digits.train.numbers} & {*digits.held_out.numbers}


@pytest.mark.parametrize("size", [8, [8, 12]], ids=str)
@pytest.mark.parametrize("crop_ratio", [0.875, 0.3, 1.0, None])
def test_without_a_random_crop_training_sees_what_evaluation_sees(crop_ratio, size, folder):
    for number, sides in enumerate(((8, 50), (33, 9), (41, 41))):
        picture(number, sides).resize(sides[::-1]).save(folder / "ant" / f"big{number}.png")
    settings = ImageFilesSettings(source=str(folder), image_size=size, crop_ratio=crop_ratio, held_out="train")
    data = settings.build()
    numbers = range(len(data.train))
    trained = torch.stack([data.augment_image(0, 0, number) for number in numbers])
    # Where torchvision resizes for transformers, pixels may be rounded to the next of 256 levels.
    assert (trained - data.held_out_images(numbers)["pixel_values"]).abs().max() <= 1.01 / 255 / min(data.std)


def test_measures_are_exact_and_the_same_in_any_number_of_processes(digits, monkeypatch):
    monkeypatch.setattr("headwater_lab.data.images.image_data.PIXELS", 3 * 64 * 50)
    draws = {}

    def logits(batch):
        key = float(batch["pixel_values"].sum())
        return draws.setdefault(key, torch.randn(len(batch["labels"]), 10))

    alone = digits.evaluate(logits).metrics
    opened = [digits.held_out.open(i, generator(0)) for i in range(len(digits.held_out))]
    every = digits.held_out_images(range(len(digits.held_out)))
    assert torch.equal(every["pixel_values"], digits.processor(images=opened, return_tensors="pt")["pixel_values"])
    parts = every["pixel_values"].split(50)
    scores = torch.cat([draws[float(part.sum())] for part in parts])
    target = every["labels"]
    top = scores.topk(5).indices
    assert alone["accuracy"] == pytest.approx(float((top[:, 0] == target).double().mean()))
    assert alone["accuracy/top-5"] == pytest.approx(float((top == target[:, None]).any(1).double().mean()))
    assert alone["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(scores, target)), abs=1e-6)
    sums = []
    for rank in range(2):
        digits.evaluate(logits, Share(rank, 2, lambda tensor: sums.append(tensor) or tensor))
    totals = iter([sums[0] + sums[2], sums[1] + sums[3]])
    assert digits.evaluate(logits, Share(0, 2, lambda tensor: next(totals))).metrics == alone


def test_glyphs_hold_whole_families_out():
    settings = GlyphSettings(image_size=16, characters="AB1", workers=1)
    data = settings.build()
    held_out = [file for family in HELD_OUT for file in files_of(family)]
    assert data.held_out.files == held_out
    assert not set(data.train.files) & set(held_out)
    assert len(data.train) == 3 * len(data.train.files)
    assert len(data.held_out) == 2 * 3 * len(data.held_out.files)
    assert data.description["sha256"] == settings.build().description["sha256"]
    assert equal(data.held_out_images([0, 5]), data.held_out_images([0, 5]))
    first, again = data.held_out_images([0, len(data.held_out) // 2])["pixel_values"]
    assert not torch.equal(first, again)  # two views of one glyph
    files = [file for family in FAMILIES for file in files_of(family)]
    assert len(set(files)) == len(files) > 60
    assert all("site-packages" in str(file) or "dist-packages" in str(file) for file in files)


def test_a_glyph_lies_within_its_image():
    images = GlyphImages(files_of("Lato")[:1], "WI", 32, 1, 1)
    for numbers in [*np.random.default_rng(0).random((40, 4)).tolist(), [1, 1, 1, 1], [1, 0, 0, 0]]:
        ink = images.draw_ink(0, *numbers)
        assert ink.max() == 1
        height, width = (np.ptp(np.nonzero(ink)[axis]) + 1 for axis in (0, 1))
        wanted = 32 * (0.5 + 0.4 * numbers[0])
        # Control points of curves lie a little outside of them.
        assert 0.85 * wanted < max(height, width) < wanted + 2


CONVERTED = {
    "L": ([7, 7, 7], 7),
    "RGB": ([255, 0, 0], 76),
    "RGBA": ([255, 0, 0], 76),
    "LA": ([7, 7, 7], 7),
    "P": ([255, 0, 0], 76),
    "CMYK": ([255, 0, 0], 76),
    "1": ([255, 255, 255], 255),
    "I;16": ([18, 18, 18], 18),
}


@pytest.mark.parametrize("mode", CONVERTED)
def test_every_mode_has_a_rule(mode, tmp_path):
    colors = {"L": 7, "LA": (7, 0), "RGBA": (255, 0, 0, 0), "1": 1, "CMYK": (0, 255, 255, 0)}
    if mode == "I;16":
        image = Image.fromarray(np.full((4, 5), 0x1234, dtype=np.uint16))
    else:
        image = Image.new("RGB" if mode == "P" else mode, (5, 4), colors.get(mode, (255, 0, 0)))
        image = image.convert("P") if mode == "P" else image
    file = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    image.save(file)
    color, grey = CONVERTED[mode]
    assert np.asarray(read_image(file, "it", 3)).tolist() == [[color] * 5] * 4
    assert np.asarray(read_image(file, "it", 1)).tolist() == [[grey] * 5] * 4


def test_the_orientation_of_a_camera_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.new("RGB", (6, 4)).save(tmp_path / "turned.jpg", exif=exif)
    assert read_image(tmp_path / "turned.jpg", "it", 3).size == (4, 6)


def test_folders_and_splits(folder, tmp_path):
    data = build(folder, held_out=0.25)
    assert data.classes == ["ant", "bee", "cat"]
    assert (len(data.train), len(data.held_out)) == (9, 3)
    assert sorted(data.held_out.labels) == [0, 1, 2]
    again = build(folder, held_out=0.25, workers=1)
    assert [data.held_out.name(i) for i in range(3)] == [again.held_out.name(i) for i in range(3)]
    assert data.description["sha256"] == again.description["sha256"]
    # ImageNet's layout; a class that is missing in val/ does not move the others.
    root = tmp_path / "imagenet"
    root.mkdir()
    (root / "train").symlink_to(folder)
    (root / "val" / "cat").mkdir(parents=True)
    picture(99).save(root / "val" / "cat" / "one.JPEG")
    data = build(root)
    assert (len(data.train), len(data.held_out), data.held_out.labels) == (12, 1, [2])
    assert data.held_out_images([0])["pixel_values"].shape == (1, 3, 8, 8)


def dataset(labels, feature=None, count=None):
    from datasets import ClassLabel, Dataset, Features, Value
    from datasets import Image as ImageColumn

    kinds = {"names": ClassLabel(names=feature) if isinstance(feature, list) else Value(feature or "string")}
    features = Features({"picture": ImageColumn(), "kind": kinds["names"]})
    return Dataset.from_dict({"picture": [picture(i) for i in range(len(labels))], "kind": labels}, features)


@pytest.mark.parametrize(
    ("labels", "feature", "classes"),
    [
        ([1, 0, 1, 0], ["ant", "bee"], ["ant", "bee"]),
        ([0, 2, 2, 0], "int64", ["0", "1", "2"]),
        (["b", "a", "a", "b"], "string", ["a", "b"]),
        ([True, False, False, True], "bool", ["False", "True"]),
    ],
)
@pytest.mark.sampled(3)
def test_datasets_by_column(labels, feature, classes, tmp_path):
    dataset(labels, feature).to_parquet(tmp_path / "set" / "train.parquet")
    columns = dict(image_column="picture", label_column="kind")
    data = build(tmp_path / "set", held_out=0.5, **columns)
    assert data.classes == classes
    names = [classes[label] for label in data.train.labels + data.held_out.labels]
    assert sorted(names) == sorted(classes[label] if isinstance(label, int) else label for label in labels)


def test_broken_files_are_named_and_skipped_only_if_asked(folder):
    whole = (folder / "bee" / "1.jpg").read_bytes()
    (folder / "bee" / "1.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "cat" / "3.webp").write_text("no image")
    picture(size=(300, 200)).save(folder / "ant" / "4.jpg")  # cut behind its header
    whole = (folder / "ant" / "4.jpg").read_bytes()
    (folder / "ant" / "4.jpg").write_bytes(whole[: len(whole) // 2])
    data = build(folder, held_out=0.25)
    names = [data.train.name(i) for i in range(len(data.train))]
    for name, why in (("bee/1.jpg", "truncated"), ("ant/4.jpg", "truncated"), ("cat/3.webp", "not an image")):
        side = data.train if name in names else data.held_out
        with pytest.raises(UnreadableImage, match=f"(?i){name}.*{why}"):
            side.open(next(i for i in range(len(side)) if side.name(i) == name))
    before = set(threading.enumerate())
    with pytest.raises(UnreadableImage, match=r"bee/1.jpg|ant/4.jpg|cat/3.webp"):
        several(data, 3)
    data.held_out, data.train = data.train, data.held_out
    # Of several the first, as if they were read one after another.
    bad = next(name for name in names if name in ("ant/4.jpg", "bee/1.jpg", "cat/3.webp"))
    with pytest.raises(UnreadableImage, match=f"The image '{bad}' in "):
        data.evaluate(lambda batch: torch.zeros(len(batch["labels"]), 3))
    nothing_is_left(before)


def test_rows_without_an_image_are_broken_images(tmp_path):
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageColumn

    pictures = [picture(), None, picture(1), picture(2), {"bytes": b"", "path": None}]
    columns = Features({"image": ImageColumn(), "label": Value("int64")})
    Dataset.from_dict({"image": pictures, "label": [0, 0, 1, 1, 0]}, columns).to_parquet(
        tmp_path / "set" / "train.parquet"
    )
    for row in (1, 4):
        with pytest.raises(UnreadableImage, match=rf"Row {row} .* no image"):
            build(tmp_path / "set", held_out="train").held_out_images([row])


def test_what_is_not_taken_for_an_image_is_counted(folder):
    picture(1).save(folder / "ant" / "more.jfif", "jpeg")
    picture(2).save(folder / "ant" / "more.TIFF")
    assert build(folder).notices == []
    for name in ("labels.csv", "ant/features.h5", "bee/notes", ".hidden"):
        (folder / name).touch()
    data = build(folder)
    assert len(data.train) + len(data.held_out) == 14
    (notice,) = data.notices
    assert "left out" in notice
    assert "3, 'labels.csv' first" in notice


def test_classes_without_images_are_told(tmp_path):
    source, fields = labelled(1, 2, 3)(None, tmp_path)
    data = build(source, held_out=0.5, **fields)
    assert data.classes == ["0", "1", "2", "3"]
    assert data.notices == ["1 of 4 classes have no image to train on: 0."]


def test_a_line_of_pixels_is_refused_before_it_is_resized(folder):
    """To a shorter side of 8 it would have 8 x 320,000 pixels."""
    Image.new("L", (1, 40_000)).save(folder / "bee" / "line.png")
    data = build(folder, held_out="train")
    with pytest.raises(UnreadableImage, match=r"bee/line.png.* 1 x 40000 pixels.*100 times"):
        data.held_out_images(range(len(data.held_out)))


def test_other_rows_of_a_dataset_are_other_data(tmp_path):
    """Their names are only numbers."""
    found = []
    for number in range(2):
        made = dataset([0, 1], "int64").map(lambda row, n=number: {"picture": picture(n, size=(9 + n, 9))})
        made.to_parquet(tmp_path / f"set {number}" / "train.parquet")
        columns = dict(image_column="picture", label_column="kind")
        found.append(build(tmp_path / f"set {number}", held_out="train", **columns).description["sha256"])
    assert found[0] != found[1]


def empty(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty", {}


def empty_class(folder, tmp_path):
    (folder / "dog").mkdir()
    return folder, {}


def out_of_range(folder, tmp_path):
    found = dataset([0, 1, -1, 1], "int64").cast_column("kind", __import__("datasets").ClassLabel(names=["a", "b"]))
    found.to_parquet(tmp_path / "set" / "train.parquet")
    return tmp_path / "set", dict(image_column="picture", label_column="kind")


def missing_column(folder, tmp_path):
    dataset([0, 1], "int64").to_parquet(tmp_path / "set" / "train.parquet")
    return tmp_path / "set", dict(image_column="picture", label_column="kinds")


def labelled(*labels, feature="int64"):
    """A dataset with these labels, each twice."""

    def make(folder, tmp_path):
        dataset([*labels] * 2, feature).to_parquet(tmp_path / "set" / "train.parquet")
        return tmp_path / "set", dict(image_column="picture", label_column="kind")

    return make


def numbers_for_images(folder, tmp_path):
    dataset([0, 1], "int64").to_parquet(tmp_path / "set" / "train.parquet")
    return tmp_path / "set", dict(image_column="kind", label_column="kind")


def class_like_a_split(folder, tmp_path):
    (folder / "cat").rename(folder / "test")
    return folder, {}


def lonely(folder, tmp_path):
    for file in list((folder / "ant").iterdir())[1:]:
        file.unlink()
    return folder, {}


def other_class(folder, tmp_path):
    (tmp_path / "all" / "val" / "dog").mkdir(parents=True)
    picture().save(tmp_path / "all" / "val" / "dog" / "a.png")
    (tmp_path / "all" / "train").symlink_to(folder)
    return tmp_path / "all", {}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (empty, "no classes"),
        (empty_class, "'dog'.*no images"),
        (out_of_range, "out of range"),
        (missing_column, "no column 'kinds'.*'kind'"),
        (labelled(0, 1, 10, None), "label None of row 3.*neither a name nor a number"),
        (labelled("a", None, feature="string"), "label None of row 1"),
        (labelled(0, 1, -1), "label -1 of row 2"),
        (labelled(0.5, 0.0, feature="float64"), "label 0.5 of row 0"),
        (labelled(0, 1, 6), "3 of the numbers from 0 to 6.*without gaps"),
        (numbers_for_images, "data.image_column.*no images.*int64"),
        (class_like_a_split, "ant, bee, test.*no 'train'.*rename 'test'"),
        (lonely, "only image of its class"),
        (other_class, "dog.*out of range"),
        (lambda folder, path: (path / "nowhere", {}), "neither a folder"),
        (lambda folder, path: (folder / "ant" / "0.png", {}), "neither a folder"),
        (lambda folder, path: (folder, {"held_out": "tests"}), "no split 'tests'"),
    ],
)
def test_what_does_not_fit_is_one_sentence(make, words, folder, tmp_path):
    source, fields = make(folder, tmp_path)
    with pytest.raises(HeadwaterError, match=words) as error:
        build(source, **fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"kind": "digits", "image_size": 3}, "model": {"patch_size": 4}}, "smaller than a patch"),
        ({"data": {"kind": "digits"}, "model": {"patch_size": 3}}, "not divisible"),
        ({"data": {"kind": "digits"}, "model": {"patch_size": 2, "num_labels": 9}}, "num_labels"),
        ({"data": {"kind": "digits"}, "model": {"patch_size": 2, "image_size": 16}}, "image_size"),
        ({"data": {"kind": "digits"}, "model": {"vocab_size": 9}}, "no field 'vocab_size'"),
        ({"data": {"kind": "induction"}, "model": {"patch_size": 2}}, "no field 'patch_size'"),
        ({"data": {"kind": "digits"}, "model": {"base": "gpt2-124m"}}, "a text model"),
        ({"data": {"kind": "digits"}, "training": {"z_loss": 0.1}}, "z_loss"),
        ({"data": {"kind": "induction"}, "training": {"label_smoothing": 0.1}}, "label_smoothing"),
        ({"data": {"kind": "digits"}, "training": {"ema_decay": 0.9, "precision": "bf16-true"}}, "bf16-mixed"),
        ({"data": {"kind": "digits", "channels": 2}}, "1 .gray. or 3"),
        ({"data": {"kind": "digits", "augmentation": {"crop": [0.9, 0.1]}}}, "crop"),
        ({"data": {"kind": "digits", "augmentation": {"flip": 2.0}}}, "flip"),
        ({"data": {"kind": "glyphs", "characters": "AA"}}, "each once"),
    ],
    ids=json.dumps,
)
def test_recipes_that_do_not_fit_are_one_sentence(changes, words):

    def made():
        recipe = read_recipe({"model": {}} | changes)
        return recipe.config_for(recipe.data.build())

    with pytest.raises(HeadwaterError, match=words) as error:
        made()
    assert "\n" not in str(error.value)


def test_null_is_no_augmentation():
    settings = parse({"name": "d", "data": {"kind": "digits", "augmentation": None}}, "test").data
    assert not settings.augmentation.draws
    assert parse(
        {"name": "d", "data": {"kind": "digits", "augmentation": {"flip": 0.5}}}, "test"
    ).data.augmentation.draws


def test_no_image_starts_another_program(folder, monkeypatch):
    """Pillow finds the format in the content, and hands EPS to Ghostscript."""
    from PIL import EpsImagePlugin

    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: started.append(1))
    (folder / "bee" / "1.jpg").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\nshowpage\n%%EOF\n"
    )
    with pytest.raises(UnreadableImage, match="not an image in a supported format"):
        read_image(folder / "bee" / "1.jpg", "it", 3)
    assert not started


def dds():
    content = io.BytesIO()
    picture().save(content, "DDS")
    return content.getvalue()[:80] + bytes(4) + content.getvalue()[84:]


@pytest.mark.parametrize(
    "content",
    [
        dds(),  # NotImplementedError
        b"BLP2" + struct.pack("<i", 9) + bytes([7, 0, 0, 0]) + struct.pack("<II", 8, 8) + bytes(200),
    ],
)
def test_whatever_a_reader_raises_is_a_broken_image(folder, content):
    (folder / "bee" / "1.png").write_bytes(content)
    with pytest.raises(UnreadableImage, match="it cannot be read: "):
        read_image(folder / "bee" / "1.png", "it", 3)


def test_a_pipe_is_no_image(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for path in (tmp_path / "pipe.png", Path("/dev/zero"), tmp_path):
        with pytest.raises(UnreadableImage, match="cannot be read: "):
            read_image(path, "it", 3)


@pytest.mark.parametrize("form", ["{secret}", "../secret.png", "link.png", "file://{secret}", "zip://x.png::{secret}"])
def test_rows_name_no_file_outside_the_dataset(tmp_path, form):
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    picture().save(tmp_path / "secret.png")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    picture().save(folder / "own.png")
    paths = [form.format(secret=tmp_path / "secret.png"), *["own.png"] * 3]
    rows = {"image": [{"bytes": None, "path": path} for path in paths], "label": [0, 0, 1, 1]}
    parquet.write_table(arrow.table(rows), folder / "train.parquet")
    data = build(folder, held_out="train")
    with pytest.raises(UnreadableImage, match=r"names .* which is not a file of the dataset"):
        data.held_out_images([0])
    data.held_out_images([1, 2, 3])


def test_a_dataset_lists_no_file_outside_its_folder(tmp_path):
    from datasets import Dataset

    rows = Dataset.from_dict({"image": [picture()] * 4, "label": [0, 0, 1, 1]})
    for name in ("secret", "tables"):
        (tmp_path / name).mkdir()
        rows.to_parquet(tmp_path / name / "train.parquet")
    for path in (str(tmp_path / "secret/*.parquet"), "../secret/train.parquet", "https://example.invalid/x.parquet"):
        (tmp_path / "tables" / "README.md").write_text(f"---\nconfigs:\n- data_files: {path}\n---\n")
        with pytest.raises(HeadwaterError, match=r"README.md' names .* outside its folder"):
            build(tmp_path / "tables")
    rows.save_to_disk(tmp_path / "saved")
    with pytest.raises(HeadwaterError, match="holds arrow files; write the dataset to parquet"):
        build(tmp_path / "saved")


def test_a_column_of_classes_opens_no_files(tmp_path):
    from datasets import Dataset, Features
    from datasets import Image as ImageColumn

    columns = Features({"image": ImageColumn(), "label": ImageColumn()})
    (tmp_path / "set").mkdir()
    Dataset.from_dict({"image": [picture()], "label": [picture()]}, columns).to_parquet(tmp_path / "set/train.parquet")
    with pytest.raises(HeadwaterError, match=r"data.label_column: 'label' .* holds Image, not classes"):
        build(tmp_path / "set")
