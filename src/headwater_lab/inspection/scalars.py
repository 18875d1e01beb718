"""The scalars of a model's mechanisms, as its forward pass uses them, and the census of shifted keys and values."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from headwater.mechanisms.capabilities import ShowsScalars
from headwater.mechanisms.contract import Mechanism
from headwater.nn.block import Block
from headwater.nn.stages import run_shared
from headwater_lab.inspection.scores import compose_taps
from headwater_lab.util.model_kinds import AnyModel, is_of_images


@dataclass(frozen=True)
class Scalars:
    """The numbers of one symbol in one layer.

    place: the linear layer they belong to ("q_proj", …, "mlp"), or "" for the whole layer.
    by: "kv head", "query head", "layer" (the layer whose summand they weigh; -1: the embedding), or "" for one
    number. at: indices of these heads or layers.
    """

    layer: int
    mechanism: str
    place: str
    symbol: str
    by: str
    at: tuple[int, ...]
    values: list[float]

    @property
    def key(self) -> tuple[str, str, str]:
        """The mechanism, symbol and place, which identify a section or picture."""
        return self.mechanism, self.symbol, self.place


@dataclass(frozen=True)
class Census:
    """Key/value heads, by the token whose key and the token whose value weighs more (KV shifting, Table 4).

    current_key: α1 > α2; previous_key: otherwise; current_value: β1 > β2; previous_value: otherwise. With longer
    windows the current token's weight is compared with the largest of the others. heads: heads with both shifted.
    """

    heads: int
    current_key_current_value: int
    previous_key_current_value: int
    current_key_previous_value: int
    previous_key_previous_value: int


def list_blocks(model: AnyModel) -> list[Block]:
    return cast("list[Block]", list(model.model.layers))


def find_mechanisms(block: Block) -> Iterator[tuple[str, Mechanism]]:
    """Yield (name, module) for each mechanism of a block; the name of the linear layer it replaces, else ""."""
    for path, module in block.named_modules():
        if isinstance(module, Mechanism):
            parent, _, name = path.rpartition(".")
            yield "" if parent.endswith("mechanisms") else name, module


@torch.no_grad()
def collect_scalars(model: AnyModel) -> list[Scalars]:
    """Collect all scalars of a model, layer by layer."""
    if is_of_images(model.config):
        shared = run_shared(model.model.mechanisms.named_mechanisms())
    else:  # for tables read by token id, the first token's
        shared = model.model.shared_tensors(torch.zeros(1, 1, dtype=torch.long, device=model.device))
    return [
        Scalars(
            block.plan.index, module.registered_name(), path, symbol, shown.owner, shown.indices, shown.values.tolist()
        )
        for block in list_blocks(model)
        for path, module in find_mechanisms(block)
        if isinstance(module, ShowsScalars)
        for symbol, shown in module.show_scalars(block.plan, shared).items()
    ]


@torch.no_grad()
def compose_windows(block: Block, tensor: str) -> Tensor | None:
    """Find the weights that mix a layer's keys ("k") or values ("v") over tokens, [window, its heads]; None without."""
    composed: Tensor | None = None
    for _, module in find_mechanisms(block):
        windows: dict[str, Tensor] = getattr(module, "show_windows", dict)()
        if tensor in windows:
            composed = windows[tensor] if composed is None else compose_taps(composed, windows[tensor])
    return composed


def take_census(model: AnyModel) -> Census | None:
    """Count a model's heads for the census; None if it does not mix both keys and values over tokens."""
    counts = {(key, value): 0 for key in (True, False) for value in (True, False)}
    for block in list_blocks(model):
        keys, values = (_by_head(block, tensor) for tensor in ("k", "v"))
        for head in keys.keys() & values.keys():
            counts[keys[head], values[head]] += 1
    heads = sum(counts.values())
    if not heads:
        return None
    return Census(heads, counts[True, True], counts[False, True], counts[True, False], counts[False, False])


def _by_head(block: Block, tensor: str) -> dict[int, bool]:
    """Map each key/value head to whether the current token weighs more than all before it."""
    window = compose_windows(block, tensor)
    if window is None:
        return {}
    heads = block.plan.k_heads if tensor == "k" else block.plan.v_heads
    return dict(zip(heads, (window[0] > window[1:].amax(0)).tolist(), strict=True))


def value_taps(model: AnyModel) -> list[Tensor]:
    """Find for each layer the taps [window, H] of the values its query heads attend to, from any layer. Values that are
    made from a latent have the mean of its parts' taps."""
    blocks = list_blocks(model)
    windows = [compose_windows(block, "v" if block.plan.value_part == "v" else "k") for block in blocks]
    result = []
    for block in blocks:
        longest = max([1, *(len(window) for window in windows if window is not None)])
        taps = torch.zeros(longest, len(block.plan.attends), dtype=torch.float64)
        for head, attended in enumerate(block.plan.attends):
            window, owner = windows[attended.v], blocks[attended.v].plan
            if window is None:
                taps[0, head] = 1
            elif owner.latent_heads:
                taps[: len(window), head] = window.mean(1)
            else:
                taps[: len(window), head] = window[:, owner.stored_values.index(head)]
        result.append(taps.repeat_interleave(block.self_attn.num_key_value_groups, dim=1))
    return result
