"""Interleaved timings of training steps, against transformers and by mechanism, and what autograd stores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from headwater.bench.decoding import shape_of
from headwater.bench.paired import PairedTimes, interleave
from headwater.config import HeadwaterConfig
from headwater.kernels.activation import activated
from headwater.kernels.scratch import keep_freed_memory
from headwater.mechanisms.base import BenchForm, Mechanism
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.image_classification import HeadwaterForImageClassification
from headwater.nn.masking import cu_seq_lens, takes_documents
from headwater.nn.norm import RMSNorm
from headwater.registry import MECHANISMS
from headwater.retrofit import to_transformers
from headwater.vision_config import HeadwaterVisionConfig

Base = Literal["llama", "gpt2"]
CLASSES = 1000


def training_step(
    model: PreTrainedModel, ids: Tensor, autocast: bool, given: dict[str, Any] | None = None
) -> Callable[[], None]:
    """One whole step on `ids` [B, T]: forward, loss, backward, clipping, fused AdamW.

    given: further inputs. Of images, ids are pixels [B, C, H, W], and given has the labels.
    """
    inputs = {"labels": ids, "use_cache": False, **(given or {})} if not ids.is_floating_point() else given or {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=ids.device.type in ("cpu", "cuda"))
    model.train()
    if ids.device.type == "cpu":
        keep_freed_memory()  # as training does

    def step() -> None:
        with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=autocast):
            loss = model(ids, **inputs).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if ids.device.type == "cuda":
            torch.cuda.synchronize()

    return step


def bench_train(
    precision: str = "32-true",
    *,
    base: Base = "llama",
    layers: int = 8,
    width: int = 256,
    context: int = 256,
    batch_size: int = 8,
    vocabulary: int = 512,
    pairs: int = 30,
    device: str = "cpu",
    attention: str = "sdpa",
    documents: int | None = None,
) -> PairedTimes:
    """A training step of headwater without mechanisms against the same shape in transformers.

    precision: "32-true", "bf16-true" (weights in bf16) or "bf16-mixed" (fp32 weights under autocast).
    attention: ours; theirs is sdpa.
    documents: rows are packed, with documents of this many tokens on average. Attention varlen is then told where they
        begin; under the others, theirs too, they are a mask.
    Both see the same tokens and, against Llama, start from the same weights.
    """
    torch.manual_seed(0)
    models = bases(base, layers=layers, width=width, context=context, vocabulary=vocabulary)
    models[0].set_attn_implementation(attention)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    ids = torch.randint(vocabulary, (batch_size, context)).to(device)
    packed: list[dict[str, Tensor]] = [{}, {}]
    if documents is not None:
        positions = packed_positions(batch_size, context, documents)
        packed = [{"position_ids": positions.to(device)} for _ in models]
        if takes_documents(attention) and (borders := cu_seq_lens(positions)) is not None:
            packed[0]["cu_seq_lens_q"] = borders.to(device)
    steps = [
        training_step(m.to(device, dtype), ids, precision == "bf16-mixed", given)
        for m, given in zip(models, packed, strict=True)
    ]
    return interleave(steps[0], steps[1], pairs)


def bench_train_images(
    precision: str = "32-true",
    *,
    layers: int = 8,
    width: int = 256,
    image_size: int = 224,
    patch_size: int = 16,
    batch_size: int = 8,
    pairs: int = 30,
    device: str = "cpu",
    attention: str = "sdpa",
) -> PairedTimes:
    """As `bench_train`, of an image classifier against transformers' ViT with the same weights on the same images."""
    models = image_models(layers=layers, width=width, image_size=image_size, patch_size=patch_size)
    models[0].set_attn_implementation(attention)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    pixels, labels = sample_images(batch_size, image_size)
    pixels, given = pixels.to(device, dtype), {"labels": labels.to(device)}
    steps = [training_step(m.to(device, dtype), pixels, precision == "bf16-mixed", given) for m in models]
    return interleave(steps[0], steps[1], pairs)


def train_memory_images(
    precision: str,
    *,
    layers: int = 8,
    width: int = 256,
    image_size: int = 224,
    patch_size: int = 16,
    batch_size: int = 8,
    attention: str = "sdpa",
) -> tuple[int, int]:
    """As `train_memory`, of an image classifier and transformers' ViT."""
    models = image_models(layers=layers, width=width, image_size=image_size, patch_size=patch_size)
    models[0].set_attn_implementation(attention)
    pixels, labels = sample_images(batch_size, image_size)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    kept = []
    for model in models:
        model.to(dtype).train()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
            kept.append(saved_bytes(partial(_loss, model, pixels.to(dtype), labels), model.parameters()))
    return kept[0], kept[1]


def _loss(model: Any, pixels: Tensor, labels: Tensor) -> Tensor:
    return model(pixels, labels=labels).loss


def sample_images(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Noise [count, 3, size, size] and labels [count]."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, size, size, generator=draw), torch.randint(CLASSES, (count,), generator=draw)


def image_models(
    *, layers: int, width: int, image_size: int, patch_size: int
) -> tuple[HeadwaterForImageClassification, PreTrainedModel]:
    """An image classifier without mechanisms, and transformers' ViT with its weights."""
    config = HeadwaterVisionConfig(
        image_size=image_size,
        patch_size=patch_size,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        num_labels=CLASSES,
    )
    ours = HeadwaterForImageClassification(config)
    return ours, to_transformers(ours, "vit")


def packed_positions(rows: int, context: int, documents: int) -> Tensor:
    """Position ids [rows, context] of documents with `documents` tokens on average, geometrically distributed."""
    starts = torch.rand(rows, context, generator=torch.Generator().manual_seed(0)) < 1 / documents
    slot = torch.arange(context)
    return slot - torch.where(starts, slot, 0).cummax(1).values


def bases(
    base: Base, *, layers: int, width: int, context: int, vocabulary: int
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A headwater model without mechanisms and transformers' LlamaForCausalLM or GPT2LMHeadModel (no dropout)."""
    heads = width // 64
    ours: PreTrainedModel
    theirs: PreTrainedModel
    if base == "gpt2":
        ours = HeadwaterForCausalLM(
            HeadwaterConfig.gpt2(
                vocab_size=vocabulary,
                hidden_size=width,
                intermediate_size=4 * width,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                max_position_embeddings=context,
            )
        )
        theirs = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocabulary,
                n_embd=width,
                n_layer=layers,
                n_head=heads,
                n_positions=context,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
        return ours, theirs
    shape = shape_of(layers, width, vocabulary, context)
    ours = HeadwaterForCausalLM(HeadwaterConfig(**shape, norm_eps=1e-6))
    theirs = LlamaForCausalLM(LlamaConfig(**shape, bos_token_id=None, eos_token_id=None))
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def train_memory(
    precision: str,
    *,
    base: Base = "llama",
    layers: int = 8,
    width: int = 256,
    context: int = 256,
    batch_size: int = 8,
    vocabulary: int = 512,
    attention: str = "sdpa",
) -> tuple[int, int]:
    """Bytes that autograd stores in a forward pass with its loss: headwater's, and the same shape in transformers.

    The parameters are not counted; under autocast their casts to bf16 are.
    """
    models = bases(base, layers=layers, width=width, context=context, vocabulary=vocabulary)
    models[0].set_attn_implementation(attention)
    kept = [kept_bytes(model, precision, batch_size, context) for model in models]
    return kept[0], kept[1]


def kept_bytes(model: PreTrainedModel, precision: str, batch_size: int, context: int) -> int:
    """Bytes that autograd stores for `batch_size` rows of `context` tokens, without parameters."""
    ids = torch.zeros(batch_size, context, dtype=torch.long)
    model.to(torch.bfloat16 if precision == "bf16-true" else torch.float32).train()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
        return saved_bytes(lambda: model(ids, labels=ids, use_cache=False).loss, model.parameters())


def bench_mechanism(
    mechanisms: dict[str, dict],
    precision: str = "32-true",
    *,
    layers: int = 8,
    width: int = 256,
    context: int = 256,
    batch_size: int = 8,
    vocabulary: int = 512,
    pairs: int = 30,
    device: str = "cpu",
) -> PairedTimes:
    """A training step of a model with `mechanisms` against the same model without.

    If a mechanism replaces linear layers, the other model has its `twin` instead, with the same matmuls.
    """
    ours, twin = twins(mechanisms, layers=layers, width=width, context=context, vocabulary=vocabulary)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    ids = torch.randint(vocabulary, (batch_size, context), generator=torch.Generator().manual_seed(0)).to(device)
    steps = [training_step(m.to(device, dtype), ids, precision == "bf16-mixed") for m in (ours, twin)]
    return interleave(steps[0], steps[1], pairs)


def twins(
    mechanisms: dict[str, dict], *, layers: int, width: int, context: int, vocabulary: int
) -> tuple[HeadwaterForCausalLM, HeadwaterForCausalLM]:
    """A model with `mechanisms` and the one it is compared with."""

    def model(mechanisms: dict[str, dict]) -> HeadwaterForCausalLM:
        config = HeadwaterConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            max_position_embeddings=context,
            mechanisms=mechanisms,
        )
        return HeadwaterForCausalLM(config)

    ours, other = model(mechanisms), model({})
    if any(_twin(module) is not None for module in ours.modules()):
        other = model(mechanisms)
        for parent in list(other.modules()):
            for name, child in parent.named_children():
                if (twin := _twin(child)) is not None:
                    setattr(parent, name, twin)
    return ours, other


def _twin(module: nn.Module) -> nn.Module | None:
    return module.twin() if isinstance(module, Mechanism) else None


def saved_bytes(run: Callable[[], Tensor], given: Iterable[Tensor] = ()) -> int:
    """Bytes that autograd stores while `run` computes its result, each storage once, without `given`."""
    known = {tensor.untyped_storage().data_ptr() for tensor in given}
    # The tensors are kept, so that no address is used twice.
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor.detach()  # a graph that holds tensors of its own is never freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in known)


def step_memory(
    mechanisms: dict[str, dict],
    precision: str,
    *,
    layers: int = 8,
    width: int = 256,
    context: int = 256,
    batch_size: int = 8,
    vocabulary: int = 512,
) -> tuple[int, int]:
    """Bytes that autograd stores in a forward pass with its loss: with `mechanisms`, and in its counterpart.

    The parameters are not counted; under autocast their casts to bf16 are.
    """
    models = twins(mechanisms, layers=layers, width=width, context=context, vocabulary=vocabulary)
    kept = [kept_bytes(model, precision, batch_size, context) for model in models]
    return kept[0], kept[1]


def form_memory(
    precision: str, *, batch_size: int = 8, context: int = 256, heads: int = 4
) -> dict[str, tuple[int, int]]:
    """For each mechanism with a custom training operation, by label: bytes it stores, and those of the plain form.

    Heads are 64 wide. The input and the parameters are not counted.
    """
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    x = torch.randn(batch_size, context, 64 * heads, dtype=dtype, requires_grad=True)
    kept = {}
    for form in mechanism_forms(heads, dtype):
        known = [x, *form.module.parameters()]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
            one, other = (saved_bytes(partial(run, x), known) for run in (form.ours, form.plain))
        kept[form.label] = one, other
    return kept


def mechanism_forms(heads: int, dtype: torch.dtype) -> list[BenchForm]:
    """The custom operations of the mechanisms."""
    found = (MECHANISMS.resolve(name).bench_form(heads, dtype) for name in MECHANISMS.names)
    return [form for form in found if form is not None]


def bench_forms(
    precision: str, *, batch_size: int = 8, context: int = 256, heads: int = 4, pairs: int = 30
) -> dict[str, PairedTimes]:
    """Forward and backward of training's custom operations, against the plain form.

    precision: "32-true" or "bf16-true". Heads are 64 wide.
    """
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    width = 64 * heads
    norm, act = RMSNorm(width, 1e-6).to(dtype), nn.SiLU()
    gate, up, down = (nn.Linear(*sizes, dtype=dtype) for sizes in ((width, 3 * width),) * 2 + ((3 * width, width),))

    forms: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        **{form.label: (form.ours, form.plain) for form in mechanism_forms(heads, dtype)},
        "RMSNorm": (norm, lambda x: nn.functional.rms_norm(x, (width,), norm.weight, norm.eps)),
        "feed-forward": (lambda x: activated(act, gate(x), up(x), down), lambda x: down(act(gate(x)) * up(x))),
    }
    x = torch.randn(batch_size, context, width, dtype=dtype, requires_grad=True)

    def step(form: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        return lambda: form(x).sum().backward()

    return {name: interleave(step(ours), step(plain), pairs) for name, (ours, plain) in forms.items()}
