"""Checkpoints of the papers' own code: names, sizes and functions, against forward passes written on those tensors."""

import json
import math
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from conftest import assert_near
from headwater import HeadwaterError
from headwater.conversion.foreign import LAYOUTS, read_foreign

VOCAB, WIDTH, DEPTH, HEADS, INNER = 61, 32, 3, 4, 40
IDS = torch.randint(VOCAB, (2, 13), generator=torch.Generator().manual_seed(3))


def random(*shape: int, scale: float = 0.3) -> Tensor:
    return scale * torch.randn(shape, dtype=torch.float64)


# The papers' forward passes


def turn(x: Tensor, theta: float, turned: int, sign: float = 1.0) -> Tensor:
    """RoPE on the first `turned` channels of x [B, T, H, d], the first half against the second."""
    angle = sign * torch.arange(x.shape[1]).double()[:, None] * theta ** (-torch.arange(0, turned, 2).double() / turned)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b, rest = x.split([turned // 2, turned // 2, x.shape[-1] - turned], dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, seen: int | None = None, scale: float = 1.0) -> Tensor:
    """q [B, T, H, d], k and v [B, T, K, d] -> [B, T, H·d]. seen: tokens of a window. scale: beside 1/√d."""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale / math.sqrt(q.shape[-1])
    square = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool)
    hidden = square.triu(1) if seen is None else square.triu(1) | square.tril(-seen)
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(hidden, -math.inf).softmax(-1), v).flatten(2)


def pattention(t: dict[str, Tensor], name: str, x: Tensor, score: str) -> Tensor:
    a = x @ t[f"{name}.key_param_tokens"].T
    if score == "softmax":
        a = a.exp() / a.exp().sum(-1, keepdim=True) * a.shape[-1]
    elif score == "gelu_l2_norm":
        a = torch.nn.functional.gelu(a)
        a = a / a.norm(dim=-1, keepdim=True) * math.sqrt(a.shape[-1])
    else:
        a = torch.nn.functional.gelu(a / a.norm(dim=-1, keepdim=True) * math.sqrt(a.shape[-1]))
    return a @ t[f"{name}.value_param_tokens"]


def tokenformer(t: dict[str, Tensor], ids: Tensor, heads: int = HEADS, score: str = "l2_norm_gelu") -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        weight, bias = t.get(f"{name}.weight"), t.get(f"{name}.bias")
        return torch.nn.functional.layer_norm(x, (WIDTH,), weight, bias, 1e-5)

    x = t["sequential.0.word_embeddings.weight"][ids]
    for layer in range(2, DEPTH + 2):
        at, y = f"sequential.{layer}", norm(x, f"sequential.{layer}.input_layernorm")
        q, k, v = (pattention(t, f"{at}.attention.{part}", y, score) for part in ("query", "key", "value"))
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in (q, k, v))
        turned = WIDTH // heads // 4
        read = attention(turn(q, 10_000.0, turned), turn(k, 10_000.0, turned), v)
        x = x + pattention(t, f"{at}.attention.proj", read, score)
        x = x + pattention(t, f"{at}.mlp", norm(x, f"{at}.post_attention_layernorm"), score)
    x = norm(x, f"sequential.{DEPTH + 3}.norm")
    return x @ t.get(f"sequential.{DEPTH + 4}.final_linear.weight", t["sequential.0.word_embeddings.weight"]).T


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def llama(t: dict[str, Tensor], ids: Tensor, theta: float, kind: str = "", weights: tuple = (0.5, 0.5)) -> Tensor:
    """Llama with the changes of the two papers; `kind` of mixing: identity, svformer, neutreno, neutreno_resformer."""
    d = WIDTH // HEADS
    x = t["model.embed_tokens.weight"][ids]
    first = None
    for layer in range(DEPTH):
        at = f"model.layers.{layer}"

        def linear(name: str, x: Tensor, at: str = at) -> Tensor:
            return x @ t[f"{at}.{name}.weight"].T

        y = rms(x, t[f"{at}.input_layernorm.weight"])
        q, k = linear("self_attn.q_proj", y), linear("self_attn.k_proj", y)
        v = first if kind == "svformer" and layer else linear("self_attn.v_proj", y)
        first = v if first is None else first
        own = v
        if layer and kind in ("identity", "neutreno_resformer"):
            v = own = weights[0] * first + weights[1] * v
        q, k, v = (part.unflatten(-1, (-1, d)) for part in (q, k, v))
        if kind == "shift":
            k, v = shift(k, t.get(f"{at}.self_attn.K")), shift(v, t.get(f"{at}.self_attn.V"))
        read = attention(turn(q, theta, d), turn(k, theta, d), v)
        if layer and kind.startswith("neutreno"):
            read = read + {"neutreno": 0.4, "neutreno_resformer": 0.2}[kind] * (first - own)
        x = x + linear("self_attn.o_proj", read)
        y = rms(x, t[f"{at}.post_attention_layernorm.weight"])
        inner = torch.nn.functional.silu(linear("mlp.gate_proj", y)) * linear("mlp.up_proj", y)
        x = x + linear("mlp.down_proj", inner)
    return rms(x, t["model.norm.weight"]) @ t.get("lm_head.weight", t["model.embed_tokens.weight"]).T


def shift(x: Tensor, taps: Tensor | None) -> Tensor:
    """The listing's convolution: x [B, T, K, d] padded in front, taps from the oldest token to the current one."""
    if taps is None:
        return x
    window = taps.shape[1]
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, window - 1, 0))
    return (padded.unfold(1, window, 1) * taps[None, None, :, None]).sum(-1)


# Their checkpoints


def tokenformer_tensors(pairs: tuple[int, int, int] = (24, 16, 48), plain: bool = False, tied: bool = True) -> dict:
    t = {"sequential.0.word_embeddings.weight": random(VOCAB, WIDTH)}
    for layer in range(2, DEPTH + 2):
        counts = dict.fromkeys(("query", "key", "value"), pairs[0]) | {"proj": pairs[1]}
        for name, count in [(f"attention.{part}", n) for part, n in counts.items()] + [("mlp", pairs[2])]:
            for token in ("key", "value"):
                t[f"sequential.{layer}.{name}.{token}_param_tokens"] = random(count, WIDTH)
        if plain:
            for norm in ("input_layernorm", "post_attention_layernorm"):
                t[f"sequential.{layer}.{norm}.weight"], t[f"sequential.{layer}.{norm}.bias"] = random(2, WIDTH)
    t[f"sequential.{DEPTH + 3}.norm.weight"], t[f"sequential.{DEPTH + 3}.norm.bias"] = random(2, WIDTH)
    if not tied:
        t[f"sequential.{DEPTH + 4}.final_linear.weight"] = random(VOCAB, WIDTH)
    return t


def llama_tensors(kv_heads: int = HEADS, **taps: int) -> dict[str, Tensor]:
    """taps: K and V of KV shifting, by their windows."""
    d = WIDTH // HEADS
    t = {"model.embed_tokens.weight": random(VOCAB, WIDTH), "model.norm.weight": random(WIDTH)}
    for layer in range(DEPTH):
        at = f"model.layers.{layer}"
        for name, (rows, columns) in {
            "self_attn.q_proj": (WIDTH, WIDTH),
            "self_attn.k_proj": (kv_heads * d, WIDTH),
            "self_attn.v_proj": (kv_heads * d, WIDTH),
            "self_attn.o_proj": (WIDTH, WIDTH),
            "mlp.gate_proj": (INNER, WIDTH),
            "mlp.up_proj": (INNER, WIDTH),
            "mlp.down_proj": (WIDTH, INNER),
        }.items():
            t[f"{at}.{name}.weight"] = random(rows, columns)
        t[f"{at}.input_layernorm.weight"], t[f"{at}.post_attention_layernorm.weight"] = random(2, WIDTH)
        for part, window in taps.items():
            t[f"{at}.self_attn.{part}"] = random(kv_heads, window)
    t["lm_head.weight"] = random(VOCAB, WIDTH)
    return t


def logits(path, *arguments, **keywords) -> Tensor:
    model = read_foreign(path, *arguments, **keywords)
    assert not model.training
    with torch.no_grad():
        return model(IDS).logits


def saved(tensors: dict, path):
    torch.save(tensors, path)
    return path


# TokenFormer


@pytest.mark.parametrize("score", ["l2_norm_gelu", "gelu_l2_norm", "softmax"])
@pytest.mark.parametrize(("plain", "tied"), [(False, True), (True, False)])
def test_tokenformer_is_the_same_function(tmp_path, score, plain, tied):
    tensors = tokenformer_tensors(plain=plain, tied=tied)
    # As in the authors' files, which YAML reads though they look like JSON with comments.
    (tmp_path / "150M_eval.yml").write_text(
        f'{{"num_attention_heads": {HEADS}, "rotary_pct": 0.25, "norm_activation_type": "{score}", # a comment\n'
        '"max_position_embeddings": 128, "adlr_autoresume": True, "tokenizer-type": "HFTokenizer"}\n'
    )
    saved(tensors, tmp_path / "pytorch_model.bin")
    assert_near(logits(tmp_path), tokenformer(tensors, IDS, score=score), 1e-10)


def test_tokenformer_without_a_config_takes_keywords_and_the_papers_defaults(tmp_path):
    tensors = tokenformer_tensors()
    file = saved({"module": tensors | {"sequential.2.attention.rotary_emb.inv_freq": torch.ones(1)}}, tmp_path / "a.pt")
    model = read_foreign(file, num_attention_heads=HEADS, mechanisms={"pattention": {"score": "gelu_l2_norm"}})
    assert_near(model(IDS).logits, tokenformer(tensors, IDS, score="gelu_l2_norm"), 1e-10)
    options = model.config.mechanisms["pattention"]
    assert [options[f"{name}_pairs"] for name in ("query", "key", "value", "output", "ffn")] == [24, 24, 24, 16, 48]
    with pytest.raises(HeadwaterError, match="pass num_attention_heads"):
        read_foreign(file)


def test_tokenformer_says_what_it_does_not_read(tmp_path):
    saved(tokenformer_tensors(), tmp_path / "pytorch_model.bin")
    for text, message in (
        ('{"pos_emb": "alibi", "num_attention_heads": 4}', "pos_emb 'alibi'"),
        ('{"norm_activation_type": "l1", "num_attention_heads": 4}', "norm_activation_type 'l1'"),
        ("- a list", "not a mapping"),
        ("{", "cannot be read"),
    ):
        (tmp_path / "config.yml").write_text(text)
        with pytest.raises(HeadwaterError, match=message):
            read_foreign(tmp_path)


# ResFormer


@pytest.mark.parametrize(
    ("kind", "mechanisms"),
    [
        ("identity", None),
        ("svformer", None),
        ("neutreno", {"neutreno": {"weight": 0.4}}),
        # The code takes the difference to the mixed values, which is half of that to the raw ones.
        ("neutreno_resformer", {"value_residual": {}, "neutreno": {"weight": 0.1}}),
    ],
)
def test_resformer_is_the_same_function(tmp_path, kind, mechanisms):
    tensors = llama_tensors()
    if kind == "svformer":
        tensors = {n: t for n, t in tensors.items() if not ("v_proj" in n and "layers.0." not in n)}
    (tmp_path / "config.json").write_text(
        json.dumps({"num_attention_heads": HEADS, "rope_theta": 5000.0, "rms_norm_eps": 1e-05, "rope_scaling": None})
    )
    save_file(tensors, tmp_path / "model.safetensors")
    keywords = {} if mechanisms is None else {"mechanisms": mechanisms}
    assert_near(logits(tmp_path, "resformer", **keywords), llama(tensors, IDS, 5000.0, kind), 1e-10)


def test_resformer_in_shards_tied_and_with_another_mode(tmp_path):
    tensors = llama_tensors(kv_heads=2)
    del tensors["lm_head.weight"]
    names = list(tensors)
    shards = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
    for shard, inside in shards.items():
        saved({name: tensors[name] for name in inside}, tmp_path / shard)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {n: shard for shard, inside in shards.items() for n in inside}}))
    mechanisms = {"value_residual": {"mode": "constant"}}
    actual = logits(tmp_path, "resformer", num_attention_heads=HEADS, mechanisms=mechanisms)
    assert_near(actual, llama(tensors, IDS, 10_000.0, "identity", (2.0, 1.0)), 1e-10)
    # A tied head that is written out changes nothing.
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": HEADS, "tie_word_embeddings": True}))
    saved(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, tmp_path / "whole.bin")
    index.unlink()
    assert_near(logits(tmp_path / "whole.bin", "resformer", mechanisms=mechanisms), actual, 1e-12)
    with pytest.raises(HeadwaterError, match="several files"):
        read_foreign(tmp_path, "resformer")
    index.write_text(json.dumps({"weight_map": {names[0]: "../elsewhere.bin"}}))
    with pytest.raises(HeadwaterError, match=r"'\.\./elsewhere.bin' that is not in its folder"):
        read_foreign(tmp_path, "resformer")


# KV shifting


@pytest.mark.parametrize("taps", [{"K": 2, "V": 2}, {"K": 2}, {"V": 2}, {"K": 3, "V": 3}])
def test_kv_shifting_is_the_same_function(tmp_path, taps):
    tensors = llama_tensors(kv_heads=2, **taps)
    file = saved({f"module.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.pt")
    model = read_foreign(file)
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (HEADS, 2)
    assert_near(model(IDS).logits, llama(tensors, IDS, 100_000.0, "shift"), 1e-10)


def test_kv_shifting_with_the_names_of_baichuan_m1(tmp_path):
    tensors = llama_tensors(kv_heads=2, K=2, V=2)
    theirs = dict(tensors)
    for layer in range(DEPTH):
        at = f"model.layers.{layer}.self_attn"
        theirs[f"{at}.W_pack.weight"] = torch.cat([theirs.pop(f"{at}.{part}_proj.weight") for part in "qkv"])
        for part in "KV":
            theirs[f"{at}.conv_{part.lower()}"] = theirs.pop(f"{at}.{part}")[None, None, :, None]
    rows = tensors["lm_head.weight"]
    expected = llama(tensors | {"lm_head.weight": rows / rows.norm(dim=1, keepdim=True)}, IDS, 100_000.0, "shift")
    saved(theirs, tmp_path / "model.pt")
    assert_near(logits(tmp_path), expected, 1e-10)
    (tmp_path / "config.json").write_text(json.dumps({"sliding_window_layers": [1, 3]}))
    with pytest.raises(HeadwaterError, match="without a sliding_window; pass sliding_window"):
        read_foreign(tmp_path)


def baichuan(t: dict[str, Tensor], ids: Tensor, config: dict) -> Tensor:
    """Baichuan-M1: layers with and without a window, of different heads; keys and values are convolved before RoPE."""
    x = t["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        slides, at = layer in config["sliding_window_layers"], f"model.layers.{layer}"
        heads = config["num_swa_attention_heads" if slides else "num_attention_heads"]
        groups = config["num_swa_key_value_heads" if slides else "num_key_value_heads"]
        d = WIDTH // heads
        packed = rms(x, t[f"{at}.input_layernorm.weight"]) @ t[f"{at}.self_attn.W_pack.weight"].T
        q, k, v = (y.unflatten(-1, (-1, d)) for y in packed.split([WIDTH, groups * d, groups * d], dim=-1))
        k, v = (shift(y, t[f"{at}.self_attn.conv_{part}"][0, 0, :, 0]) for y, part in ((k, "k"), (v, "v")))
        q, k = (turn(y, config["rope_theta"], d) for y in (q, k))
        read = attention(q, k, v, config["sliding_window"] if slides else None)
        x = x + read @ t[f"{at}.self_attn.o_proj.weight"].T
        y = rms(x, t[f"{at}.post_attention_layernorm.weight"])
        gate, up, down = (t[f"{at}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        x = x + (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
    return rms(x, t["model.norm.weight"]) @ torch.nn.functional.normalize(t["lm_head.weight"], dim=-1).T


BAICHUAN = dict(
    model_type="baichuan_m1",
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=1,
    num_swa_attention_heads=2,
    num_swa_key_value_heads=2,
    sliding_window=5,
    sliding_window_layers=[1, 3],
    conv_window=2,
    rope_theta=1e5,
    rms_norm_eps=1e-5,
)


def baichuan_tensors() -> dict[str, Tensor]:
    t = {"model.embed_tokens.weight": random(VOCAB, WIDTH), "model.norm.weight": random(WIDTH)}
    t["lm_head.weight"] = random(VOCAB, WIDTH)
    for layer in range(4):
        at, groups, d = f"model.layers.{layer}", (1, 2)[layer % 2], (8, 16)[layer % 2]
        t[f"{at}.self_attn.W_pack.weight"] = random(WIDTH + 2 * groups * d, WIDTH)
        t[f"{at}.self_attn.o_proj.weight"] = random(WIDTH, WIDTH)
        t |= {f"{at}.self_attn.conv_{part}": random(1, 1, groups, 1, 2, scale=1.0) for part in "kv"}
        t |= {f"{at}.mlp.{part}_proj.weight": random(INNER, WIDTH) for part in ("gate", "up")}
        t[f"{at}.mlp.down_proj.weight"] = random(WIDTH, INNER)
        t[f"{at}.input_layernorm.weight"], t[f"{at}.post_attention_layernorm.weight"] = random(2, WIDTH)
    return t


def relative(model, ids: Tensor, expected: Tensor) -> float:
    """The largest difference of the logits, without and with a cache, relative to the largest."""
    with torch.no_grad():
        begun = model(ids[:, :6], use_cache=True)
        steps = [
            begun,
            *(model(ids[:, t, None], past_key_values=begun.past_key_values) for t in range(6, ids.shape[1])),
        ]
        both = model(ids).logits, torch.cat([step.logits for step in steps], dim=1)
    return max(((given - expected).abs().max() / expected.abs().max()).item() for given in both)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_baichuan_m1_with_its_windows_and_their_heads(tmp_path, dtype, tolerance):
    torch.manual_seed(0)
    tensors = {name: tensor.to(dtype) for name, tensor in baichuan_tensors().items()}
    saved(tensors, tmp_path / "model.pt")
    (tmp_path / "config.json").write_text(json.dumps(BAICHUAN))
    expected = baichuan({name: tensor.double() for name, tensor in tensors.items()}, IDS, BAICHUAN)
    model = read_foreign(tmp_path)
    assert relative(model, IDS, expected) <= tolerance
    assert model.config.sliding_fields == dict(num_attention_heads=2, num_key_value_heads=2, head_dim=16)


# nanochat


def nanochat(t: dict[str, Tensor], ids: Tensor, config: dict, scale: float, sharp: float, theta: float, short: int):
    """The repository's forward pass; what is not in the tensors changed between versions."""

    def norm(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()

    x = norm(t["transformer.wte.weight"][ids])
    if "smear_gate.weight" in t:
        gate = t["smear_lambda"] * (x[:, 1:, :24] @ t["smear_gate.weight"].T).sigmoid()
        x = torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], 1)
    first, outputs, pattern = x, [], config["window_pattern"]
    for i in range(config["n_layer"]):
        at = f"transformer.h.{i}"
        if "resid_lambdas" in t:
            x = t["resid_lambdas"][i] * x + t["x0_lambdas"][i] * first
        y = norm(x)
        q, k, v = (
            (y @ t[f"{at}.attn.c_{part}.weight"].T).unflatten(-1, (-1, config["n_embd"] // config["n_head"]))
            for part in "qkv"
        )
        if f"value_embeds.{i}.weight" in t:
            gate = t[f"{at}.attn.ve_gate.weight"]
            opened = scale * (y[..., : gate.shape[1]] @ gate.T).sigmoid()
            v = v + opened[..., None] * t[f"value_embeds.{i}.weight"][ids].unflatten(-1, v.shape[-2:])
        q, k = (norm(turn(part, theta, part.shape[-1], -1.0)) for part in (q, k))
        is_short = pattern[i % len(pattern)] == "S" and i < config["n_layer"] - 1
        read = attention(q, k, v, short + 1 if is_short else None, sharp**2)
        x = x + read @ t[f"{at}.attn.c_proj.weight"].T
        x = x + (norm(x) @ t[f"{at}.mlp.c_fc.weight"].T).relu().square() @ t[f"{at}.mlp.c_proj.weight"].T
        outputs.append(x)
    if "backout_lambda" in t:
        x = x - t["backout_lambda"] * outputs[config["n_layer"] // 2]
    return 15 * ((norm(x) @ t["lm_head.weight"].T)[..., : config["vocab_size"]] / 15).tanh()


NANOCHAT = dict(vocab_size=VOCAB, n_layer=5, n_head=4, n_kv_head=2, n_embd=WIDTH, sequence_len=12, window_pattern="SSL")


def nanochat_tensors(channels: int, lambdas: bool = True) -> dict[str, Tensor]:
    d, rows = WIDTH // 4, 64  # the vocabulary is padded
    t = {"transformer.wte.weight": random(rows, WIDTH), "lm_head.weight": random(rows, WIDTH, scale=3.0)}
    if lambdas:
        t |= {"resid_lambdas": 1 + random(5), "x0_lambdas": random(5)}
    for i in range(5):
        at = f"transformer.h.{i}"
        shapes = {"attn.c_q": (WIDTH, WIDTH), "attn.c_k": (2 * d, WIDTH), "attn.c_v": (2 * d, WIDTH)}
        shapes |= {"attn.c_proj": (WIDTH, WIDTH), "mlp.c_fc": (4 * WIDTH, WIDTH), "mlp.c_proj": (WIDTH, 4 * WIDTH)}
        t |= {f"{at}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        if channels and i % 2 == 0:
            t[f"{at}.attn.ve_gate.weight"] = random(2, channels)
            t[f"value_embeds.{i}.weight"] = random(rows, 2 * d)
    return t


@pytest.mark.parametrize(
    ("channels", "length", "version"),
    [
        (0, 12, dict(scale=2, sharp=1, theta=1e4, short=6)),
        (32, 12, dict(scale=2, sharp=1, theta=1e4, short=6)),
        (12, 400, dict(scale=3, sharp=1.15, theta=1e5, short=256)),
        (12, 600, dict(scale=3, sharp=1.2, theta=1e5, short=256)),
    ],
)
def test_nanochat_is_the_same_function(tmp_path, channels, length, version):
    torch.manual_seed(0)
    config = NANOCHAT | dict(sequence_len=length)
    tensors = nanochat_tensors(channels, lambdas=bool(channels))
    if version["sharp"] == 1.2:
        tensors |= {"smear_gate.weight": random(1, 24), "smear_lambda": random(1), "backout_lambda": random(1)}
    saved(tensors, tmp_path / "model_000100.pt")
    saved({}, tmp_path / "model_000020.pt")
    saved({"momentum": torch.zeros(1)}, tmp_path / "optim_000100_rank0.pt")
    (tmp_path / "meta_000100.json").write_text(json.dumps({"step": 100, "model_config": config}))
    model = read_foreign(tmp_path)
    assert model.config.sliding_window == version["short"] + 1
    if length > 100:
        model = read_foreign(tmp_path, sliding_window=version["short"] // 64 + 1)
        version = version | dict(short=version["short"] // 64)
    expected = nanochat(tensors, IDS, config, **version)
    assert relative(model, IDS, expected) <= 1e-12
    assert relative(model.float(), IDS, expected) <= 5e-6


def test_nanochat_says_what_it_does_not_read(tmp_path):
    tensors = nanochat_tensors(12)
    tensors["transformer.h.0.attn.ve_gate.weight"] = random(2, 20)
    with pytest.raises(HeadwaterError, match="read 32 or, in later versions, 12"):
        read_foreign(saved(tensors, tmp_path / "b.pt"), num_attention_heads=4)
    with pytest.raises(HeadwaterError, match="would run code"):
        read_foreign(saved(nanochat_tensors(12) | {"x": Harmful()}, tmp_path / "c.pt"))


def test_half_precision_stays_and_scalars_do_not(tmp_path):
    tensors = {name: tensor.bfloat16() for name, tensor in llama_tensors(K=2, V=2).items()}
    model = read_foreign(saved(tensors, tmp_path / "model.pt"))
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if "mechanisms" not in name} == {torch.bfloat16}
    assert {dtype for name, dtype in dtypes.items() if "mechanisms" in name} == {torch.float32}


# Refusals


class Harmful:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, capsys, zipped):
    file = tmp_path / "model.pt"
    if zipped:
        torch.save({"weight": Harmful()}, file)
    else:
        file.write_bytes(pickle.dumps({"weight": Harmful()}))
    with pytest.raises(HeadwaterError, match="would run code"):
        read_foreign(file, "resformer")
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "no tensor 'model.layers.1.mlp.up_proj.weight'"),
        (lambda t: t.pop("model.embed_tokens.weight"), "no tensor 'model.embed_tokens.weight'"),
        (lambda t: t.update(extra=random(2)), "a tensor 'extra'"),
        (lambda t: t.update({"model.norm.weight": random(3)}), r"'model.norm.weight' has the shape \[3\]"),
        (lambda t: t.update({"model.embed_tokens.weight": random(3)}), "should be a matrix"),
        (lambda t: t.update({"model.layers.2.self_attn.K": random(4, 3)}), r"self_attn.K' has the shape \[4, 3\]"),
        (lambda t: t.update({"model.layers.0.self_attn.K": random(4, 3)}), "must both be"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(WIDTH, dtype=torch.int64)}),
            "tensor",
        ),
        (lambda t: t.update({"module.model.norm.weight": random(WIDTH)}), "once the names of wrappers are removed"),
    ],
)
def test_the_first_tensor_that_does_not_fit_is_named(tmp_path, change, message):
    tensors = llama_tensors(K=2, V=2)
    change(tensors)
    with pytest.raises(HeadwaterError, match=message) as error:
        read_foreign(saved(tensors, tmp_path / "model.pt"), "kv-shifting")
    assert "\n" not in str(error.value)


def test_files_that_are_no_checkpoint_are_refused(tmp_path):
    llama_like = saved(llama_tensors(), tmp_path / "llama.pt")
    with pytest.raises(HeadwaterError, match="match no layout"):
        read_foreign(llama_like)
    with pytest.raises(HeadwaterError, match="did you mean 'resformer'"):
        read_foreign(llama_like, "resfromer")
    with pytest.raises(HeadwaterError, match="no field 'nope'"):
        read_foreign(llama_like, "resformer", nope=1)
    with pytest.raises(HeadwaterError, match="did you mean 'head_dim'"):
        read_foreign(llama_like, "resformer", head_dims=8)
    with pytest.raises(HeadwaterError, match="mechanisms must map"):
        read_foreign(llama_like, "resformer", mechanisms=5)
    with pytest.raises(HeadwaterError, match="no layers with this layout"):
        read_foreign(saved({"sequential.0.word_embeddings.weight": random(3, 4)}, tmp_path / "a.pt"), "tokenformer")
    with pytest.raises(HeadwaterError, match="no file of tensors"):
        read_foreign(tmp_path / "nowhere")
    for content in (b"", b"nothing like it"):
        (tmp_path / "broken.safetensors").write_bytes(content)
        (tmp_path / "broken.pt").write_bytes(content)
        for name in ("broken.safetensors", "broken.pt"):
            with pytest.raises(HeadwaterError, match=r"cannot be read"):
                read_foreign(tmp_path / name, "resformer")
    with pytest.raises(HeadwaterError, match="no named tensors"):
        read_foreign(saved([torch.ones(2)], tmp_path / "list.pt"), "resformer")
    assert set(LAYOUTS) == {"tokenformer", "resformer", "kv-shifting", "nanochat"}
