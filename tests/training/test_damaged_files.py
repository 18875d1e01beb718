"""Checkpoints whose files hold anything at all: what comes of it is a model with finite outputs, or one sentence."""

import copy
import json
import os
import random
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from conftest import SIZES
from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater.conversion import add_mechanisms
from headwater.conversion.export import export
from headwater.models.load import read_config, read_tensors
from headwater.util.errors import HeadwaterError
from headwater_lab.data.tokenizer import byte_tokenizer
from headwater_lab.inspection import inspect_model
from headwater_lab.recipe.start_section import Change
from headwater_lab.serving.generation import continue_prompts, load_for_generation
from headwater_lab.training.model_changes import change_model
from headwater_lab.training.records import Event
from headwater_lab.training.saving import write_model
from headwater_lab.training.trained_models import open_source, open_trained

VALUES = [
    *(None, True, False, 0, -1, 1, 2, 7, 2**31, 2**70, 10**8, -0.5, 1e-320, 1e308, float("nan"), float("inf")),
    *("", "x", "../../x", "/etc/hostname", "nan", "🦉", "a" * 5000, "\0", [], [[]], ["x"], [1, 2, 3], {}, {"x": {}}),
]
SMALL = SIZES | dict(vocab_size=257, num_hidden_layers=2)


def ours(folder: Path) -> None:
    """A checkpoint that no run has written, with all that may lie in one."""
    torch.manual_seed(0)
    options = {"kv_shift": {}, "pattention": {"query_pairs": 8, "key_pairs": 8, "value_pairs": 8, "output_pairs": 8}}
    model = HeadwaterForCausalLM(HeadwaterConfig(**SMALL, mechanisms=options))
    state = {
        f"optimizer.{name}.{key}": torch.zeros_like(parameter) if key != "step" else torch.ones(1)
        for name, parameter in model.named_parameters()
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    history = [Event(kind="trained", tokens=3, details={"rows": 5, "seed": 0, "data": {"settings": {}}})]
    write_model(folder, model, byte_tokenizer(), history, state)


def theirs(folder: Path) -> None:
    """A Llama in shards."""
    torch.manual_seed(0)
    names = {name: size for name, size in SMALL.items() if name != "max_position_embeddings"}
    model = LlamaForCausalLM(LlamaConfig(**names, bos_token_id=1, eos_token_id=2))
    model.save_pretrained(folder, max_shard_size="20KB")
    byte_tokenizer().save_pretrained(folder)


def pickled(folder: Path) -> None:
    """A GPT-2 as older versions of transformers saved it."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    model.config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def use_ours(folder: Path, out: Path) -> None:
    """What is done with a headwater checkpoint."""
    trained = open_trained(folder, with_state=True)
    change = Change.model_validate({"grow": {"attention_pairs": 12}})
    grown = change_model(trained, change)
    write_model(out / "grown", grown.model, grown.tokenizer, grown.history, grown.state)
    inspect_model(trained, "one", (), scalars_only=True)
    export(trained.model, out / "exported", tokenizer=trained.tokenizer)
    generated(folder)
    generated(out / "grown")


def generated(folder: Path) -> None:
    model, tokenizer = load_for_generation(folder)
    made = continue_prompts(model, tokenizer, ["a prompt"], max_new_tokens=2, temperature=0)
    assert len(made.texts) == 1
    assert bool(model(torch.arange(12)[None]).logits.isfinite().all())


def use_theirs(folder: Path, out: Path) -> None:
    """What is done with anybody's checkpoint."""
    trained = open_source(str(folder))
    model = add_mechanisms(trained.model, {"kv_shift": {}})
    write_model(out / "retrofitted", model, trained.tokenizer, trained.history)
    if trained.tokenizer is None:
        assert bool(model(torch.arange(12)[None]).logits.isfinite().all())
    else:
        generated(out / "retrofitted")
        generated(folder)


def replaced(content, rng):
    """JSON with one value changed, added or gone, anywhere."""
    content = copy.deepcopy(content)
    places = []

    def walk(part):
        for key, value in list(part.items() if isinstance(part, dict) else enumerate(part)):
            places.append((part, key))
            if isinstance(value, dict | list) and len(value) < 50:
                walk(value)

    if not isinstance(content, dict | list) or not content:
        return rng.choice(VALUES)
    walk(content)
    part, key = rng.choice(places)
    if rng.random() < 0.15:
        del part[key]
    else:
        part[key] = copy.deepcopy(rng.choice(VALUES))
    return content


def spoil_tensors(file: Path, rng: random.Random) -> None:
    tensors = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    name = rng.choice(sorted(tensors))
    kind = rng.randrange(8)
    if kind == 0:
        tensors[name].view(-1)[rng.randrange(tensors[name].numel())] = rng.choice([float("nan"), float("inf")])
    elif kind == 1:
        tensors[name] = tensors[name].to(rng.choice([torch.int64, torch.bool, torch.float16, torch.float8_e4m3fn]))
    elif kind == 2:
        tensors[name] = tensors[name].new_zeros(rng.choice([(), (0,), (1,), (3, 5), (2, 2, 2)]))
    elif kind == 3:
        del tensors[name]
    elif kind == 4:
        tensors[rng.choice(["x", "lm_head.bias", "optimizer.x", "model.layers.99.x", ""])] = torch.ones(3)
    elif kind == 5:
        tensors = {}
    elif file.suffix == ".safetensors":
        tensors = {f"x.{name}": tensor for name, tensor in tensors.items()}
    else:
        tensors = rng.choice([[tensors], 3, None, {1: tensors[name]}, {"model": 3}, {name: [1.0]}, Path("x")])
    if file.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    else:
        torch.save(tensors, file)


def spoil(folder: Path, rng: random.Random) -> str:
    """Change something in a folder; says what."""
    if rng.random() < 0.8 and (folder / "SHA256SUMS").is_file():
        (folder / "SHA256SUMS").unlink()
    file = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    kind = rng.choice(["flip", "flip", "cut", "empty", "delete", "folder", "loop", "json", "json", "tensors", "stray"])
    content = bytearray(file.read_bytes())
    tensors = file.suffix in (".safetensors", ".bin")
    if kind in ("json", "tensors"):
        chosen = rng.random()
        with suppress(Exception):  # spoiled before
            if file.suffix == ".json" and chosen < 0.85:
                file.write_text(json.dumps(replaced(json.loads(content), rng)))
            elif tensors and chosen < 0.85:
                spoil_tensors(file, rng)
        if chosen >= 0.85 or not (tensors or file.suffix == ".json"):
            file.write_text(json.dumps(rng.choice(VALUES)))
    elif kind == "flip" and content:
        for _ in range(rng.choice([1, 1, 3, 30])):  # the beginning is where the structure is
            place = rng.randrange(min(len(content), rng.choice([10, 200, 10**9])))
            content[place] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
    elif kind == "cut":
        file.write_bytes(content[: rng.randrange(len(content) + 1)])
    elif kind == "stray":
        name = rng.choice(["zzz.safetensors", "training.safetensors", "adapter_config.json", "chat_template.jinja"])
        name = rng.choice([name, "added_tokens.json", "special_tokens_map.json", "model.safetensors.index.json"])
        file = folder / name
        made = rng.choice([b"", b"[]", b"{}", b'{"weight_map": {"x": "../x"}}', b"{{ x }}", b'{"peft_type": "LORA"}'])
        file.write_bytes(made)
    else:
        file.unlink(missing_ok=True)
        if kind == "empty":
            file.touch()
        elif kind == "folder":
            file.mkdir()
        elif kind == "loop":
            file.symlink_to(file.name)
    return f"{kind} {file.name}"


CASES = {"ours": (ours, use_ours), "theirs": (theirs, use_theirs), "pickled": (pickled, use_theirs)}


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wholes")
    for name, (make, use) in CASES.items():
        make(folder / name)
        use(folder / name, folder / f"{name}-used")
    return folder


def attack(whole: Path, use, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    folder, out = tmp_path / f"{seed}", tmp_path / f"{seed}-out"
    shutil.copytree(whole, folder)
    done = [spoil(folder, rng) for _ in range(rng.choice([1, 1, 1, 2]))]
    before = sorted(os.listdir(folder))
    message = ""
    try:
        use(folder, out)
    except HeadwaterError as error:
        message = str(error)
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {done}") from error
    assert "\n" not in message, (seed, done)
    assert len(message) < 1500, (seed, done)
    assert sorted(os.listdir(folder)) == before, (seed, done)
    shutil.rmtree(folder)
    shutil.rmtree(out, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(2)
def test_whatever_files_hold_it_is_a_model_or_a_sentence(wholes, tmp_path, name):
    for seed in range(10):
        attack(wholes / name, CASES[name][1], tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("start", range(1000, 4000, 500))
def test_whatever_files_hold_more(wholes, tmp_path, name, start):
    for seed in range(start, start + 500):
        attack(wholes / name, CASES[name][1], tmp_path, seed)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "ours"
    ours(folder)
    return folder


@pytest.fixture
def copied(whole, tmp_path):
    """A copy without checksums, so that all that reads its files is reached."""
    shutil.copytree(whole, tmp_path / "ours")
    (tmp_path / "ours" / "SHA256SUMS").unlink()
    return tmp_path / "ours"


@pytest.fixture
def alarm():
    """Ends what waits for ever."""

    def ring(*_):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "name",
    [
        *("SHA256SUMS", "config.json", "generation_config.json", "history.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "training.safetensors", "chat_template.jinja"),
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "device", "loop"])
def test_what_is_no_file_is_not_waited_for(copied, alarm, name, kind):
    file = copied / name
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero" if kind == "device" else name)
    with pytest.raises(HeadwaterError, match=rf"{name}"):
        open_trained(copied, with_state=True)


@pytest.mark.parametrize(
    "name", ["base_model_tp_plan", "text_config", "sub_configs", "to_dict", "kinds", "_attn_implementation"]
)
@pytest.mark.parametrize("value", [5, "nope", {}])
def test_a_config_replaces_no_part_of_its_class(copied, name, value):
    """Transformers would use it, wherever the model is next built."""
    content = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(content | {name: value}))
    with pytest.raises(HeadwaterError, match=f"config.json' sets '{name}', which is not a field"):
        read_config(copied)


def test_a_config_names_no_kernel_on_the_hub(tmp_path):
    theirs(tmp_path / "llama")
    file = tmp_path / "llama" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"_attn_implementation": "someone/attention"}))
    with pytest.raises(HeadwaterError, match="a kernel on the hub, 'someone/attention'"):
        open_source(str(tmp_path / "llama"))


def test_a_tokenizer_is_in_its_folder(copied):
    file = copied / "tokenizer_config.json"
    content = json.loads(file.read_text()) | {"fast_tokenizer_files": ["../other/tokenizer.4.0.json"]}
    file.write_text(json.dumps(content))
    with pytest.raises(HeadwaterError, match="names files outside its folder"):
        open_trained(copied)


def test_a_number_does_not_stand_for_terabytes(tmp_path):
    torch.save({"weight": torch.zeros(1).expand(10**12)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(HeadwaterError, match=r"'weight' in .* is not a weight tensor"):
        read_tensors(tmp_path / "pytorch_model.bin")
