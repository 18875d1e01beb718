"""A causal language model as the ways of decoding call it: its cache, its positions, what each of its layers writes.

Any class of transformers, or with its interface: `forward(input_ids, …)` returns logits and, with `use_cache`, a cache
that the next call takes under the same name.
"""

import contextlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from headwater.nn.cache_name import CACHE
from headwater.util.errors import HeadwaterError

# Names of the cache in models' arguments and outputs. Before transformers 5.24 models did not agree on one.
CACHES = (*dict.fromkeys((CACHE, "past_key_values", "cache_params")), "state", "mems", "past_buckets_states")


class Double(TorchFunctionMode):
    """A mode that computes in fp64 wherever code names fp32.

    Most models compute norms, softmax and rotary embeddings in fp32, whatever the dtype of their weights. Rounding
    there would defeat the purpose of fp64: two orders of summation would differ by 1e-7 instead of 1e-15.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return function(*args, **kwargs)


@contextlib.contextmanager
def in_double(active: bool) -> Iterator[None]:
    """Let models compute in fp64 throughout in this context, if `active`."""
    if not active:
        yield
        return
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Double():
            yield
    finally:
        torch.set_default_dtype(default)


@dataclass(frozen=True)
class CallOutput:
    """The output of a call: logits [B, T, V], each layer's output [B, T, …] by name, in order, and the next cache."""

    logits: Tensor
    layers: dict[str, Tensor] = field(repr=False)
    cache: Any = field(repr=False)


class Subject:
    """A model to verify. It is used in its own dtype, in evaluation mode.

    Raises `HeadwaterError` if its forward takes no `input_ids`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.takes = set(inspect.signature(model.forward).parameters)
        if "input_ids" not in self.takes:
            raise HeadwaterError(f"{type(model).__name__} takes no input_ids; verify a text model.")
        self.cache_name = next((name for name in CACHES if name in self.takes), None)
        self.dtype = next(model.parameters()).dtype
        self.blocks = _list_blocks(model)
        self.positions = "position_ids" in self.takes  # whether positions count from 0 is tested later
        self.whole_mask = _takes_whole_mask(model)

    @property
    def config(self) -> Any:
        """The config of the text model."""
        return self.model.config.get_text_config(decoder=True)

    @torch.no_grad()
    def __call__(
        self,
        ids: Tensor,
        cache: Any = None,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        use_cache: bool = True,
        **options: Any,
    ) -> CallOutput:
        """Call the model once.

        ids: [B, T]. mask: [B, everything so far]. positions: [B, T], left out where the model takes none.
        """
        arguments: dict[str, Any] = {"input_ids": ids, **options}
        if mask is not None and "attention_mask" in self.takes:
            arguments["attention_mask"] = mask if self.whole_mask else mask[:, -ids.shape[1] :]
        if positions is not None and self.positions:
            arguments["position_ids"] = positions
        if "use_cache" in self.takes:
            arguments["use_cache"] = use_cache
        if cache is not None:
            if self.cache_name is None:
                raise HeadwaterError(f"{type(self.model).__name__} takes no cache")
            arguments[self.cache_name] = cache
        layers: dict[str, Tensor] = {}
        with in_double(self.dtype == torch.float64), self._watch_layers(ids, layers):
            output = self.model(**arguments)
        logits = output.logits
        if logits.shape[:2] != ids.shape:
            raise HeadwaterError(f"logits of shape {list(logits.shape)} for ids of shape {list(ids.shape)}")
        if use_cache and self.cache_name is not None:
            cache = getattr(output, self.cache_name, None)
        return CallOutput(logits, layers, cache)

    @contextlib.contextmanager
    def _watch_layers(self, ids: Tensor, layers: dict[str, Tensor]) -> Iterator[None]:
        def make_hook(name: str) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                wrote = output[0] if isinstance(output, tuple | list) and output else output
                if isinstance(wrote, Tensor) and wrote.ndim >= 3 and wrote.shape[:2] == ids.shape:
                    times = sum(key.partition(" ")[0] == name for key in layers)  # some models run a layer repeatedly
                    # Copied, because some layers later write into it.
                    layers[f"{name} (pass {times + 1})" if times else name] = wrote.detach().clone()

            return hook

        with contextlib.ExitStack() as hooks:
            for name, block in self.blocks:
                hooks.enter_context(block.register_forward_hook(make_hook(name)))
            yield


def _takes_whole_mask(model: PreTrainedModel) -> bool:
    """Whether calls with a cache take the mask of all tokens so far, as most models do.

    Mamba's first models take the mask of the call's own tokens, and make `generate` pass none after the prefill.
    """
    ids = torch.ones(1, 3, dtype=torch.long)
    try:
        arguments = model.prepare_inputs_for_generation(
            ids, next_sequence_length=1, attention_mask=ids, use_cache=True, is_first_iteration=False
        )
    except Exception:
        return True
    return not getattr(model, "_is_stateful", False) or arguments.get("attention_mask") is not None


def _list_blocks(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """The embedding and the layers of the text model, by name: of all lists of modules, the longest (the outermost)."""
    blocks: list[tuple[str, nn.Module]] = []
    with contextlib.suppress(NotImplementedError, AttributeError):
        embedding = model.get_input_embeddings()
        blocks = [(name, module) for name, module in model.named_modules() if module is embedding]
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and not re.search(r"(^|[._])(vision|visual|audio)([._]|$)", name)
    ]
    if lists:
        depth = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
        # Choose the outermost of the longest lists, because experts and heads lie inside layers.
        name, layers = max(lists, key=lambda item: (len(item[1]) == depth, -item[0].count("."), len(item[1])))
        blocks += [(f"{name}.{number}", layer) for number, layer in enumerate(layers)]
    return blocks
