"""Image models in transformers' tools: Auto classes, pipelines, Trainer, PEFT, torch.export, checkpoints with code."""

import json

import numpy as np
import pytest
import torch
from images import image_model, images, vision_config, with_a_processor
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    Trainer,
    TrainingArguments,
    ViTImageProcessor,
    default_data_collator,
    pipeline,
)

from apart import apart
from conftest import assert_near
from headwater import (
    HeadwaterError,
    HeadwaterForImageClassification,
    HeadwaterImageModel,
    HeadwaterVisionConfig,
    kernels,
)
from headwater.conversion.export import export
from headwater.growth import grow, importance, shrink
from headwater_lab.data.images import image_processor
from headwater_lab.serving.prediction import load_for_prediction, predict_images
from headwater_lab.training.saving import write_model

MANY = {"kv_shift": {}, "value_residual": {}, "neutreno": {}, "dense_former": {}}
EVERYTHING = {"pattention": {}, **MANY, "skip_layer": {}}
TOKENFORMER = dict(norm_weight=False, norm_bias=False, final_norm_weight=True, final_norm_bias=True)
PAIRS = {"pattention": {"attention_pairs": 8, "ffn_pairs": 16}}


def float_model(mechanisms: dict | None = None, **changes) -> HeadwaterForImageClassification:
    return image_model(mechanisms, **changes).float()


@torch.no_grad()
def test_saved_and_loaded(tmp_path):
    model = float_model(
        EVERYTHING, position="rope", stop_at_rows=True, register_tokens=1, id2label=dict(enumerate("abcde"))
    )
    model.save_pretrained(tmp_path)
    for auto, kind in (
        (AutoModelForImageClassification, HeadwaterForImageClassification),
        (AutoModel, HeadwaterImageModel),
    ):
        loaded = auto.from_pretrained(tmp_path)
        assert type(loaded) is kind
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert loaded.config.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()
    assert loaded.config.id2label == dict(enumerate("abcde"))
    pixels = images(2).float()
    assert_near(loaded(pixels).logits, model(pixels).logits, 1e-6)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert not {"vocab_size", "use_cache", "max_position_embeddings", "tie_word_embeddings"} & stored.keys()


def test_parts_that_models_share_start_alike():
    plain, other = (HeadwaterForImageClassification(vision_config(mechanisms)) for mechanisms in ({}, {"kv_shift": {}}))
    there = dict(other.named_parameters())
    assert all(torch.equal(parameter, there[name]) for name, parameter in plain.named_parameters())
    patches = HeadwaterImageModel(HeadwaterVisionConfig(num_hidden_layers=1)).embed_patches.weight
    assert patches.std().item() == pytest.approx(768**-0.5, rel=0.01)


def test_a_pipeline_reads_an_image(tmp_path):
    float_model(id2label=dict(enumerate("abcde"))).save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 9, "width": 16}).save_pretrained(tmp_path)
    classify = pipeline("image-classification", model=str(tmp_path))
    found = classify(Image.new("RGB", (40, 30), (200, 10, 10)), top_k=5)
    assert {one["label"] for one in found} == set("abcde")
    assert sum(one["score"] for one in found) == pytest.approx(1, abs=1e-5)


@with_a_processor
def test_a_pipeline_of_gray_models_takes_gray_pixels(tmp_path):
    model = float_model(num_channels=1, id2label=dict(enumerate("abcde")))
    write_model(tmp_path / "model", model, image_processor((9, 16), 1, [0.45], [0.22], 18))
    Image.effect_noise((40, 30), 90).save(tmp_path / "gray.png")
    (wanted,) = predict_images(*load_for_prediction(tmp_path / "model"), [tmp_path / "gray.png"])
    classify = pipeline("image-classification", model=str(tmp_path / "model"))
    found = classify(np.asarray(Image.open(tmp_path / "gray.png").convert("L"))[None], top_k=5)
    assert {one["label"]: one["score"] for one in found} == pytest.approx(wanted, abs=1e-6)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"pixel_values": images(1, seed=index)[0].float(), "labels": index % 5}


@pytest.mark.slow
def test_trainer_takes_a_step(tmp_path):
    model = float_model(MANY)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    arguments = TrainingArguments(
        tmp_path, max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to=[], use_cpu=True
    )
    rows = default_data_collator([Rows()[index] for index in range(8)])
    with torch.no_grad():
        wanted = model(**rows).loss.item()
    trained = Trainer(model, arguments, train_dataset=Rows()).train()
    assert trained.training_loss == pytest.approx(wanted, rel=1e-4)  # a mean over images, divided once
    changed = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
    assert "model.embed_patches.weight" in changed
    assert "classifier.bias" in changed


def test_lora_takes_a_step():
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(
        r=2, target_modules=["embed_patches", "q_proj", "v_proj"], modules_to_save=["classifier"]
    )
    model = peft.get_peft_model(float_model(MANY), adapters)
    model(pixel_values=images(2).float(), labels=torch.tensor([0, 1])).loss.backward()
    learned = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert all("lora" in name or "classifier" in name for name in learned)
    assert any("embed_patches" in name for name in learned)


@torch.no_grad()
@pytest.mark.parametrize("mechanisms", [{}, EVERYTHING], ids=["vanilla", "all"])
@pytest.mark.slow
def test_exported_as_a_graph(mechanisms):
    model = float_model(mechanisms)
    pixels = images(2).float()
    batch = torch.export.Dim("batch", min=1, max=64)
    graph = torch.export.export(model, (pixels,), dynamic_shapes={"pixel_values": {0: batch}}, strict=False)
    more = images(5, seed=3).float()
    assert_near(graph.module()(more).logits, model(more).logits, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("position", ["learned", "rope"])
def test_compiled_it_is_the_same(position):
    model = image_model(EVERYTHING, position=position)
    pixels = images(2)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for one in (model, compiled):
        one.zero_grad()
        one(pixels, labels=torch.tensor([0, 1])).loss.backward()
    with torch.no_grad():
        assert_near(compiled(pixels).logits, model(pixels).logits)


def test_gradient_checkpointing_and_plain_kernels_change_nothing():
    model, pixels = image_model(EVERYTHING).train(), images(2)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(pixels, labels=torch.tensor([0, 1])).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    wanted = gradients()
    with kernels.disable_kernels():
        found = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for others in (found, gradients()):
        for one, other in zip(wanted, others, strict=True):
            assert_near(other, one)


SCRIPT = """
import json, sys, torch
sys.modules["headwater"] = None  # importing it, or anything in it, now raises
from transformers import AutoModelForImageClassification
from transformers import dynamic_module_utils
dynamic_module_utils.HF_MODULES_CACHE = FOLDER + "/home"
model = AutoModelForImageClassification.from_pretrained(FOLDER + "/exported", trust_remote_code=True)
pixels = torch.arange(432.0).view(1, 3, 9, 16).sin()
with torch.no_grad():
    print(json.dumps(model(pixels).logits[0].tolist()))
"""


@pytest.mark.slow
def test_exported_with_its_code(tmp_path):
    model = float_model(EVERYTHING)
    with pytest.raises(HeadwaterError, match="materialise"):
        export(model, tmp_path / "exported", materialise=True)
    export(model, tmp_path / "exported")
    ((ended, printed, stderr),) = apart([f"FOLDER = {str(tmp_path)!r}{SCRIPT}"], "models")
    assert ended == 0, stderr[-3000:]
    with torch.no_grad():
        wanted = model(torch.arange(432.0).view(1, 3, 9, 16).sin()).logits[0]
    assert json.loads(printed.splitlines()[-1]) == pytest.approx(wanted.tolist(), abs=1e-5)


# Growth


@torch.no_grad()
def test_growth_changes_nothing_and_shrinking_takes_it_back():
    model = image_model(PAIRS | {"kv_shift": {}}, **TOKENFORMER)
    pixels = images(3)
    grown = grow(model, attention_pairs=20, ffn_pairs=31)
    assert type(grown) is HeadwaterForImageClassification
    assert grown.num_parameters() > model.num_parameters()
    assert_near(grown(pixels).logits, model(pixels).logits)
    weights = importance(grown, [{"pixel_values": pixels}])
    small = shrink(grown, weights, attention_pairs=8, ffn_pairs=16)
    assert_near(small(pixels).logits, model(pixels).logits)


@torch.no_grad()
@pytest.mark.parametrize(
    ("base", "sizes"),
    [
        (dict(norm="rms_norm", register_tokens=2), dict(hidden_size=48)),
        (dict(norm="rms_norm", position="rope", pooling="mean"), dict(hidden_size=40)),
        (dict(position="sincos"), dict(intermediate_size=80, num_attention_heads=8)),
    ],
    ids=["registers", "rope", "heads"],
)
def test_widening_keeps_the_function(base, sizes):
    model = image_model({"value_residual": {}}, **base)
    wide = grow(model, **sizes)
    assert wide.num_parameters() > model.num_parameters()
    assert_near(wide(images(2)).logits, model(images(2)).logits)


def test_widening_refuses_other_sines():
    with pytest.raises(HeadwaterError, match="sines and cosines"):
        grow(image_model(norm="rms_norm", position="sincos"), hidden_size=48)
