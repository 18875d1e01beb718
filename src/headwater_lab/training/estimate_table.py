"""The table that `headwater plan` prints."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from headwater.cost.estimate import AtContext, Limits, ModelEstimate
from headwater.cost.hardware import Hardware
from headwater_lab.util.terminal import SideBySide, Table, si


class EstimateTable(SideBySide):
    """A table with a column for each model, and ratios to the first."""

    def __init__(self, models: Sequence[ModelEstimate]) -> None:
        super().__init__((model.name for model in models), caption=_write_note(models))
        self.models = models
        self.unit, self.batch = models[0].unit, f"batch {models[0].batch}"
        # Whether some layers run only for a prompt's last token.
        self.is_shortened = any(model.last_token_layers for model in models)

    def add_row(self, label: str, values: Sequence[Any], ratio: bool = True) -> None:
        """Add a row, unless no model has a value. Values by part are summed."""
        values = [sum(value.values()) if isinstance(value, dict) else value for value in values]
        cells = ["" if v is None else f"{v:,}" if isinstance(v, int) and v < 100_000 else si(v) for v in values]
        if ratio and values[0]:
            cells[1:] = [
                cell if value is None else f"{cell} ×{value / values[0]:.3f}"
                for cell, value in zip(cells[1:], values[1:], strict=True)
            ]
        self.add_cells(label, cells)

    def add_rows(self, sources: Sequence[Any], labels: Mapping[str, str], ratio: bool = True) -> None:
        """Add a row for each field of the sources, by its label."""
        for label, field in labels.items():
            self.add_row(label, [getattr(source, field) for source in sources], ratio)

    def add_models(self) -> None:
        """Add rows of what no context changes."""
        self.section = "parameters"
        for name in self.models[0].parameters:
            if any(model.parameters[name] for model in self.models):
                self.add_row(name, [model.parameters[name] for model in self.models], ratio=False)
        self.add_rows(self.models, {"all": "parameters"})
        if self.unit == "token":
            self.section = "K/V cache"
            self.add_rows(self.models, {"bytes per token": "cache_bytes_per_token"})
        if self.is_shortened:
            self.section = "prompt"
            self.add_rows(self.models, {"layers for its last token alone": "last_token_layers"}, ratio=False)
        self.section = "training state"
        self.add_rows(self.models, {"bytes": "state_bytes"})

    def add_context(self, contexts: Sequence[AtContext]) -> None:
        """Add rows for one context, or size of images."""
        forward = f"forward FLOPs per {self.unit}"
        if self.unit == "image":
            sizes = (
                f"{high} x {wide}" for high, wide in (context.image_size for context in contexts if context.image_size)
            )
            self.section = f"images of {', '.join(dict.fromkeys(sizes))}"
            self.add_rows(contexts, {"sequence length": "context"}, ratio=False)
        else:
            self.section = f"context {contexts[0].context:,}"
        for name in contexts[0].forward:
            label = f"{forward}: {'linear layers' if name == 'maps' else name}"
            self.add_row(label, [context.forward[name] for context in contexts], ratio=False)
        self.add_rows(contexts, {forward: "forward", "  full attention": "forward_full"})
        self.add_rows(contexts, {f"training FLOPs per {self.unit}": "training", "  full attention": "training_full"})
        if self.is_shortened:
            self.add_rows(contexts, {f"FLOPs of a prompt, {self.batch}": "prefill"})
        if self.unit == "token":
            self.add_rows(contexts, {"FLOPs of one sequence's next token": "decoding"})
        memory = {f"cache bytes, {self.batch}": "cache_bytes", f"activation bytes, {self.batch}": "activation_bytes"}
        self.add_rows(contexts, memory)
        self.add_rows(contexts, {"  gradient checkpointing": "activation_bytes_checkpointed"}, ratio=False)
        if any(map(_list_memory_settings, self.models)):
            self.add_rows(contexts, {"training state and activations, as trained": "step_bytes"})

    def add_limits(self, hardware: Hardware, limits: Sequence[Limits | None]) -> None:
        """Add rows about the hardware's limits."""
        model, units = self.models[0], f"{self.unit}s"
        self.add_rows(limits, {f"training ceiling, {units}/s, {model.devices} × {hardware.name}": "training_ceiling"})
        budgets = [(model.images if self.unit == "image" else model.tokens) or 0 for model in self.models]
        amount = si(budgets[0]) if self.unit == "image" else si(budgets[0]).replace("G", "B")
        budget = f"{amount} {units}"
        if len(set(budgets)) > 1:
            self.add_row(f"training {units}", budgets, ratio=False)
            budget = "these"
        days = f"days for {budget} at MFU {model.mfu:g}"
        self.add_rows(limits, {days: "days", "device-hours": "device_hours"}, ratio=False)
        largest = f"largest batch, {'images' if self.unit == 'image' else 'rows'} per device"
        batches = {largest: "largest_batch", "  gradient checkpointing": "largest_batch_checkpointed"}
        self.add_rows(limits, batches, ratio=False)
        generation = f"generation ceiling, tokens/s, {self.batch}"
        self.add_rows(limits, {generation: "generation_ceiling", "most sequences when generating": "most_sequences"})
        self.add_rows(limits, {"inference ceiling, images/s, one device": "inference_ceiling"})


def estimate_table(models: Sequence[ModelEstimate]) -> Table:
    """Lay the models out side by side, with ratios to the first; all of text, or all of images."""
    result = EstimateTable(models)
    result.add_models()
    for contexts in zip(*(model.at for model in models), strict=True):
        result.add_context(contexts)
        if models[0].hardware is not None:
            result.add_limits(models[0].hardware, [context.limits for context in contexts])
    if any((model.devices_needed or 1) > 1 for model in models):
        result.add_rows(models, {"devices to shard the training state over": "devices_needed"}, ratio=False)
    return result.table


def _list_memory_settings(model: ModelEstimate) -> list[str]:
    """List in words the settings that change the memory of training."""
    settings = ["gradient checkpointing"] if model.gradient_checkpointing else []
    if "teacher" in model.state_bytes:
        settings.append("a teacher, whose forward pass is in the FLOPs")
    if model.loss_chunk_tokens is not None:
        settings.append(f"logits of {model.loss_chunk_tokens:,} tokens at once")
    if model.masked:
        some = len(model.masked) < len(model.at)
        lengths = f" of {', '.join(f'{length:,}' for length in model.masked)} tokens" if some else ""
        settings.append(f"a mask for packed rows{lengths}")
    return settings


def _write_note(models: Sequence[ModelEstimate]) -> str:
    """Write the footnote of the table."""
    precision, device = models[0].precision, models[0].hardware
    attention = ", causal attention unless it says full" if models[0].unit == "token" else ""
    sentences = [
        f"{precision}; FLOPs are matmuls{attention}; × is over the first column.",
        "Activations and largest batches are estimates.",
    ]
    for setting in dict.fromkeys(chain(*map(_list_memory_settings, models))):
        names = ", ".join(model.name for model in models if setting in _list_memory_settings(model))
        sentences.append(f"Trained with {setting}: {names}.")
    if device is not None:
        sentences.append(
            f"{device.name}: {device.peak(precision) / 1e12:.4g} TFLOP/s, {device.memory / 1e9:.4g} GB, "
            f"{device.bandwidth / 1e9:.4g} GB/s ({device.source}). Ceilings are 100 % of these."
        )
    limits = [context.limits for model in models for context in model.at if context.limits is not None]
    if any(limit.most_sequences is not None and limit.generation_ceiling is None for limit in limits):
        sentences.append(f"No generation ceiling where memory holds fewer than {models[0].batch:,} sequences.")
    return " ".join(sentences)
