"""Exports, and models, on a stand-in of the Hugging Face hub; loaded from there where headwater cannot be imported."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import headwater_lab as lab
from conftest import build, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM, HeadwaterForImageClassification, HeadwaterVisionConfig
from headwater.config.presets import preset
from headwater.conversion import to_transformers
from headwater.conversion.export import export
from headwater.cost.counts import cache_bytes_per_token
from headwater.util.hub import find_repository
from hub import EXPIRED, READER, TOKEN, Hub, serve_hub

SETTINGS = {
    "name": "tiny",
    "model": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "mechanisms": {"kv_shift": {"variant": "clamped"}, "value_residual": {}},
    },
    "data": {"kind": "text", "context": 16, "held_out_bytes": 2000},
    "training": {"steps": 3, "batch_size": 2, "warmup_steps": 1},
    "reporting": {"tensorboard": False},
}
LOAD = """
import json, sys
sys.modules["headwater"] = sys.modules["headwater_lab"] = None  # importing them, or anything in them, now raises
import torch
from transformers import AutoModelForCausalLM
answer = {}
for name in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    answer[name] = model(torch.tensor(json.loads(sys.argv[1]))).logits.tolist()
    model.push_to_hub(f"{name}-again")
print(json.dumps(answer))
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serve_hub() as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
        yield server


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    folder = tmp_path / "private"
    folder.mkdir()
    (folder / "input.txt").write_text("".join(f"line {n} of {n * 37 % 101}\n" for n in range(600)))
    recipe = SETTINGS | {"data": SETTINGS["data"] | {"source": str(folder / "input.txt")}}
    lab.train(recipe, tmp_path / "run")
    return tmp_path / "run"


def load_apart(hub: Hub, folder: Path, *names: str, token: str = TOKEN) -> dict[str, torch.Tensor]:
    """Logits of models on the hub, in a process that cannot import headwater and has an empty cache."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    environment |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(folder / "home"), "HF_TOKEN": token}
    command = [sys.executable, "-c", LOAD, json.dumps(tokens(2, 9).tolist()), *names]
    done = subprocess.run(
        command, env=environment | {"HF_HUB_DISABLE_XET": "1"}, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: torch.tensor(logits) for name, logits in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.slow
def test_what_is_uploaded_loads_without_headwater(hub: Hub, trained: Path, run: Any, tmp_path: Path) -> None:
    code, out, err = run(
        "export", trained, "--push", "me/tiny", "--private", "--message", "First", "--out", tmp_path / "exported"
    )
    assert code == 0, err
    assert out.splitlines()[0] == f"uploaded to {hub.address}/me/tiny"
    repository = hub.repositories["me/tiny"]
    assert repository.private
    assert repository.messages == ["First"]
    assert repository.files == {path.name: path.read_bytes() for path in (tmp_path / "exported").iterdir()}
    assert repository.large == {"model.safetensors"}
    assert not any(str(tmp_path).encode() in data for data in repository.files.values())

    # The model's own method, whose files need no export; in another precision.
    model = build({"kv_shift": {}, "neutreno": {}}).float()
    model.push_to_hub("me/model")
    pushed = hub.repositories["me/model"].files
    assert pushed.keys() >= {"modeling_headwater.py", "headwater_mechanisms_neutreno.py", "README.md"}
    assert 'from_pretrained("me/model", trust_remote_code=True)' in pushed["README.md"].decode()
    assert not model.config.auto_map

    logits = load_apart(hub, tmp_path, "me/tiny", "me/model")
    ids = tokens(2, 9)
    torch.testing.assert_close(logits["me/model"], model(ids).logits, rtol=0, atol=0)
    original = AutoModelForCausalLM.from_pretrained(trained)
    torch.testing.assert_close(logits["me/tiny"], original(ids).logits, rtol=0, atol=0)
    again = hub.repositories["me/model-again"].files  # by the exported code, which leaves out one line
    card = pushed["README.md"].decode().replace("me/model", "me/model-again")
    assert again["README.md"].decode() == re.sub("- Cache:.*\n", "", card)
    assert again.keys() == pushed.keys()


def test_saving_with_an_upload_writes_code_and_card(hub: Hub, tmp_path: Path) -> None:
    model = build({"smear": {}}).float()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    model.save_pretrained(tmp_path / "folder", push_to_hub=True, repo_id="me/saved")
    files = hub.repositories["me/saved"].files
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir() if path.stem != "notes"}
    assert "headwater_mechanisms_smear.py" in files
    card = b"---\ntags: [mine]\n---\n# Mine\n\n[More Information Needed]\n"
    hub.repositories["me/saved"].files["README.md"] = card  # as its owner edited it on the hub
    model.push_to_hub("me/saved")
    assert b"# Mine" in hub.repositories["me/saved"].files["README.md"]


def test_the_card_says_how_this_class_loads(hub: Hub) -> None:
    class Mine(HeadwaterForCausalLM):
        pass

    model = build({"smear": {}})
    for name, pushed in {"mine": Mine(model.config), "base": model.model}.items():
        pushed.push_to_hub(f"me/{name}", tags=["ours"])
    mine, base = (hub.repositories[f"me/{name}"].files for name in ("mine", "base"))
    assert "modeling_headwater.py" not in mine  # which would load another class
    assert b"trust_remote_code" not in mine["README.md"]
    card = ModelCard(base["README.md"].decode())
    assert card.data.tags == ["headwater", "smear", "ours"]
    assert card.data.pipeline_tag == "feature-extraction"
    assert 'model = AutoModel.from_pretrained("me/base", trust_remote_code=True)' in card.text


def test_uploads_are_refused_before_they_lose_something(
    hub: Hub, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = lab.push_to_hub(trained, "me/tiny")
    assert address == f"{hub.address}/me/tiny"
    repository = hub.repositories["me/tiny"]
    first = dict(repository.files)
    lab.push_to_hub(trained, "me/tiny")  # the same again
    assert repository.messages == ["Upload model"]

    repository.files |= {"config.json": b"{}", "model.safetensors": b"", "theirs.bin": b"1"}
    changed = dict(repository.files)
    with pytest.raises(
        HeadwaterError, match=r"'me/tiny' already has other content in (config\.json|model\.safetensors), .*add --ov"
    ):
        lab.push_to_hub(trained, "me/tiny")
    with pytest.raises(HeadwaterError, match="exists and is public; leave out --private"):
        lab.push_to_hub(trained, "me/tiny", private=True, overwrite=True)
    assert repository.files == changed
    lab.push_to_hub(trained, "me/tiny", overwrite=True, message="Again")
    assert repository.files == first | {"theirs.bin": b"1"}
    assert repository.messages == ["Upload model", "Again"]
    info = find_repository("me/tiny")
    repository.files["README.md"] = b"theirs, written during the export"
    with monkeypatch.context() as patch:
        patch.setattr("headwater.util.hub.find_repository", lambda *arguments: info)
        with pytest.raises(HeadwaterError, match=r"answered 412 .* A commit has happened"):
            lab.push_to_hub(trained, "me/tiny", overwrite=True)

    before = len(hub.repositories)
    for name in ("tiny", "me/a b", "me/tiny/model"):
        with pytest.raises(HeadwaterError, match="is not a repository's name"):
            lab.push_to_hub(trained, name)
    monkeypatch.setenv("HF_TOKEN", READER)
    with pytest.raises(HeadwaterError, match=r"answered 403 for 'me/new': You don't have the rights.*a token that may"):
        lab.push_to_hub(trained, "me/new", out=tmp_path / "kept")
    assert (tmp_path / "kept" / "modeling_headwater.py").is_file()
    for token in ("hf_wrong", EXPIRED):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(HeadwaterError, match="does not accept this token; log in again"):
            lab.push_to_hub(trained, "me/new", out=tmp_path / "never")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(HeadwaterError, match="There is no token for the Hugging Face hub; log in with `hf auth login`"):
        lab.push_to_hub(trained, "me/new", out=tmp_path / "never")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # which nothing answers
    with pytest.raises(HeadwaterError, match="could not be reached to upload 'me/new'"):
        lab.push_to_hub(trained, "me/new", out=tmp_path / "never")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HeadwaterError, match="HF_HUB_OFFLINE is set"):
        lab.push_to_hub(trained, "me/new", out=tmp_path / "never")
    assert not (tmp_path / "never").exists()
    assert len(hub.repositories) == before


def test_what_cannot_be_exported_is_said_in_words(trained: Path, run: Any, tmp_path: Path) -> None:
    out = tmp_path / "x"
    stderr = run("export", trained, "--out", out, "--materialise")[2]
    assert "kv_shift: an engine with paged attention lacks" in stderr
    assert "leave out --materialise (in Python: materialise), and use generate or headwater serve." in stderr
    recommended = build(preset("headwater-base").mechanisms)  # which docs/serving.md says is refused
    image_model = HeadwaterForImageClassification(HeadwaterVisionConfig(hidden_size=16, num_attention_heads=2))
    for model, reason in (recommended, "short_conv: an engine"), (image_model, "is for engines that generate text"):
        with pytest.raises(HeadwaterError, match=rf"{reason}.* leave "):
            export(model, out, materialise=True)
    stderr = run("export", trained, "--out", out, "--family", "llama")[2]
    assert "cannot have mechanisms kv_shift and value_residual; change" in stderr
    for options, difference in (
        ({"qk_norm": True}, "qk_norm true, only false"),
        ({"sliding_window": 2}, "sliding_window 2, only null"),
    ):
        with pytest.raises(HeadwaterError, match=f"cannot have {difference}; .* headwater export without --family"):
            to_transformers(build({}, **options), "llama")
    assert not out.exists()


def test_the_command_for_an_adapter_merges_it(trained: Path, run: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapter, ids = tmp_path / "it's a poet", tokens(2, 9)
    model = AutoModelForCausalLM.from_pretrained(trained)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    model.save_pretrained(adapter)
    for command in ("export", adapter, "--out", tmp_path / "x"), ("serve", adapter), ("generate", adapter, "a"):
        stderr = run(*command)[2]
        assert "is an adapter, not a model; merge the adapter first: python -c " in stderr
    exec(shlex.split(stderr.partition("first: ")[2])[2])
    assert run("export", f"{adapter}-merged", "--out", tmp_path / "x")[0] == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "x")
    torch.testing.assert_close(merged(ids).logits, model(ids).logits)
    assert run("generate", tmp_path / "x", "a", "--max-new-tokens", 2)[0] == 0


def test_options_of_the_command_are_checked(trained: Path, run: Any, tmp_path: Path) -> None:
    assert "Name a new folder with --out, a repository with --push" in run("export", trained)[2]
    assert "--private has no effect without --push" in run("export", trained, "--out", tmp_path / "x", "--private")[2]


def test_the_card_is_what_the_run_recorded(trained: Path, run: Any, tmp_path: Path) -> None:
    assert run("export", trained, "--out", tmp_path / "exported")[0] == 0
    card = ModelCard.load(tmp_path / "exported" / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["headwater", "kv-shift", "value-residual"],
    }
    record = json.loads((trained / "record.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(trained)
    for fact in (
        f"{model.num_parameters():,} parameters, float32",
        "`kv_shift` (arXiv 2411.19574) reads the previous token; variant = clamped.",
        f"Cache: {cache_bytes_per_token(model.config):,} bytes a token",
        f"Trained on `input.txt`: {record['tokens']:,} tokens, 3 steps,",
        f"| bits per byte | {record['held_out'][-1]['metrics']['bits_per_byte']:.4f} |",
        "rows of 16 tokens that do not overlap.",
        record["data"]["sha256"],
        record["environment"]["device_name"],
        "1 warm-up steps",
        'tokenizer = AutoTokenizer.from_pretrained("exported", trust_remote_code=True)',
    ):
        assert fact in card.text
    recipe = yaml.safe_load(card.text.partition("```yaml\n")[2].partition("```")[0])
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "input.txt").write_bytes((tmp_path / "private" / "input.txt").read_bytes())
    code, _, err = run("train", tmp_path / "recipe.yaml", f"data.source={tmp_path}/input.txt", "--out", tmp_path / "b")
    assert code == 0, err
    again = json.loads((tmp_path / "b" / "record.json").read_text())
    assert again["held_out"][-1]["metrics"] == record["held_out"][-1]["metrics"]

    history = next(trained.glob("checkpoints/*/history.json"))
    assert str(tmp_path / "private") in history.read_text()
    assert str(tmp_path) not in card.content
    # Measured at another step, or the record of another run; then a model without a history.
    record["held_out"][-1]["step"] = 2
    changes = {"step": record, "seed": record | {"seed": 7}}
    for name, sections in {"step": {"Training"}, "seed": set()}.items():
        (trained / "record.json").write_text(json.dumps(changes[name]))
        assert run("export", trained, "--out", tmp_path / name)[0] == 0
        titles = set(re.findall("^## (.*)$", (tmp_path / name / "README.md").read_text(), re.M))
        assert titles & {"Training", "Held-out results"} == sections
    export(build({}), tmp_path / "bare")
    bare = ModelCard.load(tmp_path / "bare" / "README.md")
    assert "## Training" not in bare.text
    assert "## Held-out results" not in bare.text


def test_a_card_does_not_claim_what_the_source_was_trained_on(trained: Path, run: Any, tmp_path: Path) -> None:
    sizes = dict(vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "llama")
    (tmp_path / "llama" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Llama\n")
    lab.retrofit(str(tmp_path / "llama"), ["kv_shift"], out=tmp_path / "retrofitted")
    start = {"checkpoint": str(tmp_path / "retrofitted")}
    data = SETTINGS["data"] | {"source": str(tmp_path / "private" / "input.txt")}
    lab.train({key: SETTINGS[key] for key in ("name", "training")} | {"data": data, "start": start}, tmp_path / "more")
    claims = ("its source's own training, which is not recorded", "The source may have been trained on it.")
    for folder, is_unknown in ((trained, False), (tmp_path / "more", True)):
        assert run("export", folder, "--out", tmp_path / f"{folder.name}-exported")[0] == 0
        card = ModelCard.load(tmp_path / f"{folder.name}-exported" / "README.md")
        assert [claim in card.text for claim in claims] == [is_unknown] * 2
        assert card.data.license == ("apache-2.0" if is_unknown else None)
    assert "Retrofitted: mechanisms `kv_shift`; moved logits 0, kl 0" in card.text


def test_a_card_that_somebody_wrote_is_kept(trained: Path, run: Any, tmp_path: Path) -> None:
    assert run("export", trained, "--out", tmp_path / "exported")[0] == 0
    (tmp_path / "exported" / "README.md").write_text("# Mine\n")
    assert run("export", tmp_path / "exported", "--out", tmp_path / "again")[0] == 0
    assert (tmp_path / "again" / "README.md").read_text() == "# Mine\n"


@pytest.mark.slow
def test_the_card_of_a_conversion_names_its_base(hub: Hub, run: Any, tmp_path: Path) -> None:
    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(**sizes)).push_to_hub("them/llama")
    lab.retrofit("them/llama", ["neutreno"], out=tmp_path / "retrofitted", allow_change=True)
    assert run("export", tmp_path / "retrofitted", "--out", tmp_path / "exported")[0] == 0
    card = ModelCard.load(tmp_path / "exported" / "README.md")
    assert card.data.base_model == ["them/llama"]
    assert "Retrofitted: source them/llama; family llama" in card.text
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "secret" / "llama")
    lab.retrofit(str(tmp_path / "secret" / "llama"), out=tmp_path / "local")
    assert run("export", tmp_path / "local", "--family", "source", "--out", tmp_path / "plain")[0] == 0
    card = ModelCard.load(tmp_path / "plain" / "README.md")
    assert card.data.base_model is None
    assert "secret" not in card.content
    assert "trust_remote_code" not in card.text
