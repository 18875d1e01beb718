"""Training on images: the same loop, with what they need besides."""

import json
import re
import sys
from importlib.util import find_spec

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional as F
from trials import PowerCut, cut_at, same_end

from headwater.config.vision import HeadwaterVisionConfig
from headwater.util.errors import HeadwaterError
from headwater_lab.cli import main
from headwater_lab.recipe.recipe import parse, read_data
from headwater_lab.recipe.start_section import Start
from headwater_lab.serving.prediction import load_for_prediction, predict_images
from headwater_lab.training import model_estimates
from headwater_lab.training.checkpoints import list_checkpoints, load_model, newest_checkpoint
from headwater_lab.training.loop import smooth_labels, train
from headwater_lab.training.model_changes import check_classes, describe_refit, list_refits
from headwater_lab.training.optimizers import Average
from headwater_lab.training.records import Event, Experiment, read_record
from vision.images import with_a_processor

# Without torchvision images are not changed.
AUGMENTED = dict(crop=[0.5, 1.0], flip=0.5, rand_augment=[9.0, 0.5], erase=0.3, mixup=0.8, cutmix=1.0)
AUGMENTED = AUGMENTED if find_spec("torchvision") else {}


@pytest.fixture(scope="module")
def make():
    """Recipes of small runs on digits; the arguments are sections to change."""

    def make(**changes):
        values = {
            "name": "small",
            "data": {"kind": "digits", "workers": 2, "held_out": 0.05, "augmentation": AUGMENTED},
            "model": {
                "patch_size": 4,
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "drop_path": 0.2,
                "mechanisms": {"value_residual": {}},
            },
            "training": {
                "steps": 12,
                "batch_size": 8,
                "warmup_steps": 2,
                "threads": 1,
                "ema_decay": 0.9,
                "label_smoothing": 0.1,
            },
            "reporting": {"log_every": 3, "save_every": 4, "evaluate_every": 6, "tensorboard": False},
        }
        for section, fields in changes.items():
            values[section] = values[section] | fields
        return parse(values, "test")

    return make


@pytest.fixture(scope="module")
def finished(make, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(make(), folder)
    return folder


@pytest.mark.sampled(1)
@pytest.mark.parametrize("step", [1, 6, 11])
def test_a_cut_run_resumes_to_the_same_end(make, finished, tmp_path, step):
    with pytest.raises(PowerCut):
        train(make(), tmp_path / "cut", on_event=cut_at(step))
    train(make(data={"workers": 0}), tmp_path / "cut", resume=True)
    same_end(finished, tmp_path / "cut")


@pytest.mark.parametrize(("name", "classes"), [("digits", 10), ("glyphs", 36), ("imagenet-b16", 1000)])
def test_shipped_recipes_are_planned_without_their_data(name, classes):
    found = model_estimates.plan_models([f"vision/{name}"])
    assert {one.config.num_labels for one in found.values()} == {classes}


def test_the_record_counts_images(finished, capsys):
    record = read_record(finished)
    assert (record.unit, record.tokens, record.metric) == ("images", 96, "accuracy")
    assert set(record.held_out[-1].metrics) == {"accuracy", "accuracy/top-5", "loss"}
    assert record.cache_bytes_per_token == 0
    assert record.flops > 0
    assert record.data["train_images"] + record.data["held_out_images"] == 1797
    run("runs", str(finished))
    printed = capsys.readouterr().out
    assert "images/s" in printed
    assert "token" not in printed


@pytest.mark.slow
def test_the_report_of_images_says_nothing_of_tokens(make, tmp_path, capsys):
    for arm in ("one", "other"):
        experiment = Experiment(name="two", title="Two", arm=arm, baseline="one")
        made = make(training={"steps": 2, "label_smoothing": 0.1 if arm == "one" else 0.2}, reporting={"log_every": 1})
        train(made, tmp_path / "two" / arm, experiment=experiment)
    assert run("report", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert "images/s" in printed
    assert "cache" not in printed
    page = (tmp_path / "report.html").read_text()
    seen = re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.DOTALL)
    assert "training images" in seen
    told = [line for line in seen.splitlines() if "token" in line and "data-" not in line]
    assert not told


def run(*arguments):
    """Run a command in this process; its exit code."""
    before, sys.argv = sys.argv, ["headwater", *arguments]
    try:
        main()
    except SystemExit as ended:
        return ended.code or 0
    finally:
        sys.argv = before
    return 0


def test_the_average_is_evaluated_and_saved(make, tmp_path):
    """Against the average of the weights that a run without one goes through."""
    made = make(training={"steps": 5}, reporting={"save_every": 1, "keep_checkpoints": 9, "evaluate_every": 1})
    train(made, tmp_path / "averaged")
    train(
        make(training={"steps": 5, "ema_decay": None}, reporting={"save_every": 1, "keep_checkpoints": 9}),
        tmp_path / "plain",
    )
    plain = [load_file(path / "model.safetensors") for path in list_checkpoints(tmp_path / "plain")]
    averaged = list_checkpoints(tmp_path / "averaged")
    mean = None
    for step, (weights, path) in enumerate(zip(plain, averaged, strict=True), 1):
        decay = min(0.9, (1 + step) / (10 + step))
        if mean is None:
            first = load_file(path / "model.safetensors")
            mean = {name: first[name] for name in weights}
            continue
        mean = {name: decay * mean[name] + (1 - decay) * weights[name] for name in weights}
        found, rest = load_file(path / "model.safetensors"), load_file(path / "training.safetensors")
        for name in weights:
            assert torch.allclose(found[name], mean[name], atol=1e-6), name
            assert torch.equal(rest[f"trained.{name}"], weights[name]), name
    record = read_record(tmp_path / "averaged")
    data = made.data.build()
    model = load_model(averaged[-1])
    with torch.no_grad():
        evaluation = data.evaluate(lambda batch: model(pixel_values=batch["pixel_values"]).logits)
    assert evaluation.metrics == pytest.approx(record.held_out[-1].metrics)


def test_a_step_that_is_skipped_leaves_the_average(make):
    model = torch.nn.Linear(2, 2)
    average = Average(model, 0.5)
    before = {name: tensor.clone() for name, tensor in average.tensors.items()}
    with torch.no_grad():
        model.weight += 1
    average.update(20, torch.tensor(False))
    assert all(torch.equal(average.tensors[name], before[name]) for name in before)
    average.update(20, torch.tensor(True))
    assert torch.allclose(average.tensors["weight"], before["weight"] + 0.5)


@pytest.mark.parametrize("probabilities", [False, True])
def test_smoothing_is_pytorchs(probabilities):
    logits, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    options = F.one_hot(labels, 3 + 1).float() if probabilities else labels
    expected = F.cross_entropy(logits, labels, label_smoothing=0.2)
    assert torch.allclose(F.cross_entropy(logits, smooth_labels(options, 0.2, 4)), expected)


def test_a_broken_held_out_image_loses_no_step(make, tmp_path):
    """The run is saved where it was to be evaluated, and evaluated there when it resumes."""
    for number, name in enumerate(("train/a", "train/b", "val/a", "val/b")):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (9, 9), (40 * number, 60 * i, 200)).save(tmp_path / "images" / name / f"{i}.png")
    data = {"kind": "images", "source": str(tmp_path / "images"), "image_size": 8, "workers": 1}
    reporting = {"evaluate_every": 2, "save_every": 2, "log_every": 1, "tensorboard": False}
    recipe = parse(make(training={"steps": 5}).model_dump(mode="json") | {"data": data, "reporting": reporting}, "test")
    train(recipe, tmp_path / "whole")
    broken = tmp_path / "images/val/b/1.png"
    content = broken.read_bytes()
    broken.write_bytes(content[:40])
    for resume in (False, True):
        with pytest.raises(HeadwaterError, match=r"b/1.png.*; step 2 is saved.*--resume") as error:
            train(recipe, tmp_path / "run", resume=resume)
        assert "\n" not in str(error.value)
        assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-000002"]
    broken.write_bytes(content)
    train(recipe, tmp_path / "run", resume=True)
    same_end(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_a_broken_image_stops_the_run_with_what_was_done_saved(make, tmp_path):
    folder = tmp_path / "images"
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for i in range(8):
            Image.new("RGB", (9, 9), (i, 20 * i, 200)).save(folder / name / f"{i}.png")
    data = {"kind": "images", "source": str(folder), "image_size": 8, "workers": 1, "crop_ratio": None}
    values = make().model_dump(mode="json") | {"data": data}
    recipe = parse(values, "test")
    order = recipe.data.build()
    # One that the second epoch begins with, so that some steps are done.
    row = next(iter(order.order_images(0, 40)))[1]
    broken = folder / order.train.name(row)
    content = broken.read_bytes()
    broken.write_bytes(content[:40])
    with pytest.raises(HeadwaterError, match=rf"{broken.name}.*--resume") as error:
        train(recipe, tmp_path / "run")
    assert "\n" not in str(error.value)
    broken.write_bytes(content)
    found = list_checkpoints(tmp_path / "run")
    train(recipe, tmp_path / "run", resume=bool(found))
    train(recipe, tmp_path / "whole")
    same_end(tmp_path / "whole", tmp_path / "run")


@with_a_processor
def test_predictions(finished, make, tmp_path, capsys):
    data = make().data.build()
    files = []
    for i in range(3):
        files.append(tmp_path / f"{i}.png")
        data.held_out.open(i, torch.Generator()).save(files[-1])
    model, processor = load_for_prediction(finished)
    with torch.no_grad():
        expected = model(pixel_values=data.held_out_images(range(3))["pixel_values"]).logits.double().softmax(-1)
    for row, classes in zip(expected, predict_images(model, processor, files), strict=True):
        assert list(classes.values()) == sorted(classes.values(), reverse=True)
        assert sum(classes.values()) == pytest.approx(1)
        assert all(classes[str(i)] == pytest.approx(float(row[i]), abs=1e-6) for i in range(10))
    assert run("predict", str(finished), *map(str, files), "--jsonl", "--top", "2") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["image"] for line in lines] == [str(file) for file in files]
    assert all(len(line["classes"]) == 2 for line in lines)
    bad = tmp_path / "text.png"
    bad.write_text("no image")
    assert run("predict", str(finished), str(files[0]), str(bad), "--jsonl") == 2
    captured = capsys.readouterr()
    assert captured.out == ""  # a batch of images or none of it
    assert "text.png' is not an image" in captured.err
    for arguments, words in (
        ([str(finished), str(bad)], "text.png' is not an image"),
        ([str(finished), str(tmp_path)], "is a folder"),
        ([str(finished), str(tmp_path / "none.png")], "no file"),
    ):
        assert run("predict", *arguments) == 2
        stderr = capsys.readouterr().err
        assert words in stderr
        assert stderr.count("\n") == 1


def test_models_of_text_are_refused(finished_text, tmp_path, capsys):
    picture = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(picture)
    assert run("predict", str(finished_text), str(picture)) == 2
    assert "text model" in capsys.readouterr().err


@pytest.fixture(scope="module")
def finished_text(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("text") / "run"
    train(recipe(training={"steps": 1}), folder)
    return folder


def test_text_and_images_do_not_mix(make, finished, finished_text, recipe, tmp_path):
    for made, start in ((make, finished_text), (recipe, finished)):
        values = made().model_dump(mode="json") | {"start": {"checkpoint": str(start)}}
        with pytest.raises(HeadwaterError, match=r"is an? (text|image) model"):
            train(parse(values, "test"), tmp_path / made.__name__)


@pytest.mark.slow
def test_a_run_starts_from_a_trained_one(make, finished, tmp_path):
    values = make().model_dump(mode="json") | {"start": {"checkpoint": str(finished)}, "seed": 5}
    record = train(parse(values, "test"), tmp_path / "more")
    assert record.origin.tokens == 96


@pytest.fixture
def letters(tmp_path):
    """Images of 12 pixels in two classes."""
    pixels = torch.Generator().manual_seed(0)
    for number in range(8):
        (tmp_path / "letters" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        image = torch.randint(256, (12, 12, 3), dtype=torch.uint8, generator=pixels)
        Image.fromarray(image.numpy()).save(tmp_path / "letters" / "ab"[number % 2] / f"{number}.png")
    return {"kind": "images", "source": str(tmp_path / "letters"), "image_size": 12, "crop_ratio": None, "workers": 0}


@with_a_processor
def test_a_trained_model_gets_a_classifier_and_positions_for_other_images(make, finished, letters, tmp_path, capsys):
    values = make(training={"steps": 1}).model_dump(mode="json")
    values |= {"data": letters, "start": {"checkpoint": str(finished)}}
    with pytest.raises(HeadwaterError, match=r"10 classes and the data 2.*class 0 is '0'.*'a'.*new_classifier=true"):
        train(parse(values, "test"), tmp_path / "refused")
    values["start"]["new_classifier"] = True
    record = train(parse(values, "test"), tmp_path / "run")
    (notice,) = (one.message for one in record.notices if "fitted" in one.message)
    assert "image_size [12, 12] instead of [8, 8], classes 2 instead of 10, learned positions interpolated" in notice
    model, old = (load_model(newest_checkpoint(path)) for path in (tmp_path / "run", finished))
    assert model.config.id2label == {0: "a", 1: "b"}
    assert (model.config.image_shape, model.classifier.weight.shape) == ((12, 12), (2, 16))
    # What the run began with: positions interpolated as the model itself does, all else as it was.
    begun = load_model(tmp_path / "run" / "start")
    pixels = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        inner = [begun.model(pixels).last_hidden_state, old.model(pixels, interpolate_pos_encoding=True)[0]]
    assert torch.allclose(*inner, atol=1e-6)
    picture = next((tmp_path / "letters" / "a").iterdir())
    assert run("predict", str(tmp_path / "run"), str(picture), "--jsonl") == 0
    assert json.loads(capsys.readouterr().out)["classes"].keys() == {"a", "b"}


@pytest.mark.slow
def test_a_cut_run_of_a_fitted_model_resumes_to_the_same_end(make, finished, letters, tmp_path):
    values = make().model_dump(mode="json")
    values |= {"data": letters, "start": {"checkpoint": str(finished), "new_classifier": True}}
    recipe = parse(values, "test")
    train(recipe, tmp_path / "whole")
    with pytest.raises(PowerCut):
        train(recipe, tmp_path / "cut", on_event=cut_at(6))
    train(recipe, tmp_path / "cut", resume=True)
    same_end(tmp_path / "whole", tmp_path / "cut")


@with_a_processor
def test_what_is_not_fitted_is_said(make, finished, finished_text, letters, recipe, tmp_path):
    """Computed positions are not interpolated; a new classifier has no optimizer's state, and no text model has one."""
    events = [{"image_size": [size, size], "classes": 2} for size in (8, 12)]
    details = {"from": events[0], "to": events[1], "new_classifier": False, "interpolated": False}
    assert describe_refit(Event(kind="refitted", details=details)).endswith("image_size [12, 12] instead of [8, 8].")
    values = make().model_dump(mode="json") | {"data": letters}
    values["start"] = {"checkpoint": str(finished), "new_classifier": True, "optimizer_state": "keep"}
    with pytest.raises(HeadwaterError, match="no state for a new classifier"):
        train(parse(values, "test"), tmp_path / "kept")
    values = recipe().model_dump(mode="json")
    values["start"] = {"checkpoint": str(finished_text), "new_classifier": True}
    with pytest.raises(HeadwaterError, match="new_classifier is for image models"):
        train(parse(values, "test"), tmp_path / "text")


def test_unnamed_classes_take_the_datas_names(letters):
    config = HeadwaterVisionConfig(image_size=12, patch_size=4, num_labels=3, hidden_size=16, num_attention_heads=2)
    data = read_data(letters).build()
    change = Start(checkpoint="x")
    assert list_refits(config, data, change) == {"id2label": {0: "a", 1: "b", 2: "LABEL_2"}}
    config.id2label = {0: "b", 1: "a", 2: "c"}
    assert list_refits(config, data, change) == {}
    with pytest.raises(HeadwaterError, match="class 0 is 'b' in the checkpoint and 'a' in the data"):
        check_classes(config, data)


def test_more_classes_than_the_datas_keep_their_names(make):
    assert make(model={"num_labels": 12}).config_for(make().data.build()).id2label[9] == "9"
