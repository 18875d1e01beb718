"""The measurements of `headwater bench gpu`, a function for each phase of its queue.

They need only torch and transformers, unlike those of `gpu_quality`. On a CPU they run at tiny sizes, which checks them
but says nothing about speed.
"""

import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import transformers
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import is_kernels_available

from headwater.config.capabilities import LimitsKernels
from headwater.config.planner import plan_layers
from headwater.config.presets import PRESETS
from headwater.config.text import HeadwaterConfig
from headwater.cost import counts as cost
from headwater.cost.hardware import sheet_of
from headwater.kernels.varlen import VARLEN
from headwater.mechanisms.fp32 import KeepsPrecision
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.compiling import compile_blocks, compile_model
from headwater.models.decoding import Decoder
from headwater.nn.documents import FLASH3, make_cu_seq_lens
from headwater.plugins.mechanisms import MECHANISMS, resolve
from headwater.util.errors import HeadwaterError, first_line
from headwater.util.precision import Precision
from headwater.util.processor import describe_cpu
from headwater_lab.bench.gpu_queue import CUT, FAILED, LATE, RECOMMENDED, WRONG, append_line, is_open, read_lines
from headwater_lab.bench.paired import PairedTimes, random_ids, take_turns
from headwater_lab.bench.shapes import ModelShape, StepShape
from headwater_lab.bench.training_speed import make_twins, training_step
from headwater_lab.util.machine import c_compiler
from headwater_lab.util.machine_speed import copy_bandwidth, matmul_flops, peak_of, tf32

Measurement = dict[str, Any]


class Sizes(NamedTuple):
    """The sizes to measure, by default on a GPU. Shapes are (layers, width, rows a step)."""

    training: dict[str, tuple[int, int, int]] = {"124M": (12, 768, 64), "350M": (24, 1024, 32)}
    context: int = 1024
    small: tuple[int, int, int] = (8, 512, 64)  # the host's work takes longer than the GPU's
    mechanisms: tuple[int, int, int] = (12, 768, 32)
    decoding: dict[str, tuple[int, int]] = {"1.5B": (28, 2048), "124M": (12, 768)}  # (layers, width)
    many: int = 64
    prompt: int = 512
    tokens: int = 64
    vocab_size: int = 50304
    warm: int = 4
    steps: int = 10
    backend: str = "inductor"
    least: float = 15.0  # minimum seconds of a measurement that compiles, which is skipped if fewer are left


ON_GPU = Sizes()
ON_CPU = Sizes(
    training={"tiny": (2, 64, 2)},
    context=32,
    small=(2, 64, 2),
    mechanisms=(4, 64, 2),
    decoding={"tiny": (2, 64)},
    many=2,
    prompt=8,
    tokens=6,
    vocab_size=256,
    warm=1,
    steps=2,
    backend="aot_eager",
    least=0.0,
)


# Code that runs in a phase's process


class Phase:
    """The context of a phase: the report that its rows go to, the device, the sizes, and the time left."""

    def __init__(self, name: str, report: Path, device: str, seconds: float) -> None:
        self.name, self.report, self.device = name, report, torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        self.sizes = ON_GPU if self.on_gpu else ON_CPU
        self.deadline = time.monotonic() + seconds
        self.measured: list[Measurement] = []
        self.cuts: list[Measurement] = []  # at deadlines, since the last new result
        attempted: list[Measurement] = []
        for line in read_lines(report):
            if line.get("phase") != name:
                continue
            if "row" in line:
                self._read_row(line, attempted)
            elif "status" in line or "inputs" in line:
                self.cuts += attempted if line.get("status") == CUT else []
                attempted.clear()

    def _read_row(self, line: Measurement, attempted: list[Measurement]) -> None:
        """Read a row of an earlier process. attempted: rows without a result, which may contain the work of others."""
        row = line["row"]
        if line["result"].get("outcome") == CUT:
            attempted.append(row)
        elif not is_open(line) and row not in self.measured:
            self.measured.append(row)
            self.cuts.clear()
            attempted.clear()
        elif row in attempted:
            attempted.remove(row)

    def put(self, row: Measurement, result: Measurement) -> None:
        """Write a row at once. row: what is measured; result: the figures."""
        append_line(self.report, {"phase": self.name, "row": row, "result": result})

    def attempt(self, measure: Callable[[], Measurement], *, least: float | None = None, **row: Any) -> None:
        """Measure one row, unless the report has it. If that fails, or there is no time, the row says so.

        least: seconds that must be left, 0 for what compiles nothing; default `Sizes.least`.
        """
        if row in self.measured:
            return
        if self.cuts.count(row) >= 2:
            self.put(row, {"outcome": "skipped: twice it had not ended at the deadline"})
            return
        if time.monotonic() > self.deadline - (self.sizes.least if least is None else least):
            self.put(row, {"outcome": LATE})
            return
        self.put(row, {"outcome": CUT})  # until the result replaces it
        torch._dynamo.reset()
        try:
            self.put(row, measure())
            self.measured.append(row)
        except torch.OutOfMemoryError:
            self.put(row, {"outcome": "skipped: not enough memory"})
        except Exception as error:
            self.put(row, {"outcome": f"{FAILED}: {type(error).__name__}: {first_line(error)[:300]}"})
        torch.cuda.empty_cache()

    def seconds(self, run: Callable[[], object], times: int) -> float:
        """Measure the seconds of a run, over `times` runs without waits between them."""
        self.wait()
        started = time.perf_counter()
        for _ in range(times):
            run()
        self.wait()
        return (time.perf_counter() - started) / times

    def wait(self) -> None:
        """Wait for the GPU, if there is one."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def draw(self, *shape: int) -> Tensor:
        """Draw random token ids."""
        return random_ids(self.sizes.vocab_size, *shape).to(self.device)


def make_model(phase: Phase, layers: int, width: int, context: int, **changes: Any) -> HeadwaterForCausalLM:
    """Make a model with random weights, drawn on the device; weights do not affect speed. changes: of the config."""
    config = HeadwaterConfig(**ModelShape(layers, width, phase.sizes.vocab_size).config(context) | changes)
    with torch.device("meta"):
        model = HeadwaterForCausalLM(config)
    return draw_weights(model, phase.device)


def draw_weights(model: HeadwaterForCausalLM, device: torch.device) -> HeadwaterForCausalLM:
    """Give a model without storage random weights, drawn on the device."""
    model.float().to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
        for module in model.modules():
            if isinstance(module, KeepsPrecision):
                module.restore_constants()
    return model


def combine_mechanisms(names: Sequence[str] = tuple(MECHANISMS.built_in)) -> dict[str, dict[str, dict]]:
    """List combinations of mechanisms: none, each alone, and as many as can act in one model."""
    alone: dict[str, dict[str, dict]] = {name: {name: {}} for name in names}
    together: dict[str, dict] = {}
    for options in alone.values():
        with suppress(HeadwaterError):
            plan_layers(_small_config(together | options))
            together |= options
    return {"none": {}, **alone, "together": together}


def environment(phase: Phase) -> None:
    """Report versions, the device, its data sheet, and its measured copies and matmuls."""
    device, name = phase.device, describe_cpu()
    facts: Measurement = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "C compiler": c_compiler() or "none",
    }
    if phase.on_gpu:
        properties = torch.cuda.get_device_properties(device)
        name = properties.name
        facts |= {
            "cuda": torch.version.cuda,
            "memory, GiB": properties.total_memory / 2**30,
            "processors": properties.multi_processor_count,
        }
    phase.put({"device": name}, facts)
    sheet = sheet_of(name)
    if sheet is not None:
        figures = {"bf16, TFLOP/s": sheet.flops / 1e12, "bandwidth, GB/s": sheet.bandwidth / 1e9}
        phase.put({"sheet": sheet.source}, figures)
    attempt_briefly = partial(phase.attempt, least=0)
    attempt_briefly(lambda: {"GB/s": copy_bandwidth(device) / 1e9}, measured="copy, bytes read and written")

    def matmul(dtype: torch.dtype, rounded: bool) -> Measurement:
        return {"TFLOP/s": matmul_flops(device, dtype, rounded) / 1e12}

    kinds = {"bfloat16": (torch.bfloat16, False), "float32": (torch.float32, False)}
    if phase.on_gpu:
        kinds["float32 in TF32"] = (torch.float32, True)
    for name, (dtype, rounded) in kinds.items():
        attempt_briefly(partial(matmul, dtype, rounded), measured=f"matmul {name}")


def correctness(phase: Phase) -> None:
    """Check the contract on this device: cached = uncached, packed = separate, bf16 near fp64, compiled = eager."""
    mechanisms_by_name = combine_mechanisms()
    extremes = {name: options for name, options in mechanisms_by_name.items() if name in ("none", "together")}
    attempt_briefly = partial(phase.attempt, least=0)
    for name, options in mechanisms_by_name.items():
        attempt_briefly(partial(_check_model, phase, options), mechanisms=name)
    for name, options in mechanisms_by_name.items():
        attempt_briefly(partial(_same_tokens, phase, options), tokens=name)
    for name, options in extremes.items():
        attempt_briefly(partial(_check_packed, phase, options, VARLEN), packed=name)
        if has_flash3(phase):
            attempt_briefly(partial(_check_packed, phase, options, FLASH3), packed=f"{name}, FlashAttention 3")
        attempt_briefly(partial(_same_tokens, phase, options, join=True), tokens=f"{name}, joined products")
    # Compilation takes most of the time, a minute or more for as many mechanisms as fit into one model.
    for name, options in mechanisms_by_name.items():
        if name in PRESETS[RECOMMENDED].fields["mechanisms"]:
            phase.attempt(partial(_check_compiled, phase, options), compiled=name)
    for name, options in extremes.items():
        phase.attempt(partial(_check_compiled, phase, options), compiled=name)
        phase.attempt(partial(_check_compiled, phase, options, join=True), compiled=f"{name}, joined products")
        phase.attempt(partial(_check_replayed, phase, options), replayed=name)
        phase.attempt(partial(_same_tokens, phase, options, compiled=True), tokens=f"{name}, compiled")


def _make_small(
    phase: Phase, mechanisms: dict[str, dict], length: int, dtype: torch.dtype = torch.float32
) -> tuple[HeadwaterForCausalLM, Tensor]:
    """Make a small model, and two rows of token ids for it."""
    model = HeadwaterForCausalLM(_small_config(mechanisms)).to(phase.device, dtype).eval()
    return model, random_ids(256, 2, length).to(phase.device)


def _small_config(mechanisms: dict[str, dict]) -> HeadwaterConfig:
    return HeadwaterConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        mechanisms=mechanisms,
    )


@torch.no_grad()
def _check_model(phase: Phase, mechanisms: dict[str, dict]) -> Measurement:
    model, ids = _make_small(phase, mechanisms, 48, torch.float64)
    uncached = model(ids, use_cache=False).logits
    cache, chunks = DynamicCache(config=model.config), []
    for chunk in ids.split([40, *[1] * 8], dim=1):
        chunks.append(model(chunk, past_key_values=cache).logits)
    cached = float((torch.cat(chunks, 1) - uncached).abs().max())
    positions = torch.cat((torch.arange(20), torch.arange(28))).to(phase.device)[None].expand(2, -1)
    packed = model(ids, position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(document, use_cache=False).logits for document in ids.split([20, 28], 1)], 1)
    apart = float((packed - alone).abs().max())
    near = _relative_error(model.to(torch.bfloat16)(ids, use_cache=False).logits, uncached)
    fine = cached < 1e-9 and apart < 1e-9 and near < 1e-2
    return {"cached - whole": cached, "packed - apart": apart, "bf16, rms": near, "outcome": "ok" if fine else WRONG}


@torch.no_grad()
def _check_packed(phase: Phase, mechanisms: dict[str, dict], kernel: str) -> Measurement:
    """Compare the hidden states of packed rows in bf16 by a kernel that takes borders with those under a mask."""
    fitting = {name: options for name, options in mechanisms.items() if not isinstance(resolve(name), LimitsKernels)}
    model, ids = _make_small(phase, fitting, 48)
    positions = (torch.arange(48) % 17).expand(2, -1)
    borders = cast(Tensor, make_cu_seq_lens(positions))
    documents = {"position_ids": positions.to(phase.device), "cu_seq_lens_q": borders.to(phase.device)}
    states = []
    with Precision.BF16_MIXED.autocast(phase.device.type):
        for attention in ("sdpa", kernel):
            model.set_attn_implementation(attention)
            states.append(model.model(ids, use_cache=False, **documents).last_hidden_state)
    apart = _relative_error(states[1], states[0])
    return {"from the mask, rms": apart, "outcome": "ok" if apart < 2e-2 else WRONG}


def _same_tokens(phase: Phase, mechanisms: dict[str, dict], compiled: bool = False, join: bool = False) -> Measurement:
    """Compare the tokens of a static cache, whose steps a GPU replays as a graph, with those without a cache."""
    model, ids = _make_small(phase, mechanisms, 16, torch.float64)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    static = Decoder(model, compiled, phase.sizes.backend, join=join)(ids, mask, max_new_tokens=12)
    plain = model.generate(
        ids, attention_mask=mask, max_new_tokens=12, do_sample=False, use_cache=False, pad_token_id=0
    )
    return {"outcome": "ok" if torch.equal(static, plain) else WRONG}


def has_flash3(phase: Phase) -> bool:
    """Whether FlashAttention 3 can be measured."""
    return phase.on_gpu and is_kernels_available() and torch.cuda.get_device_capability(phase.device)[0] == 9


def _check_compiled(phase: Phase, mechanisms: dict[str, dict], join: bool = False) -> Measurement:
    model, ids = _make_small(phase, mechanisms, 64)
    model.train()

    def gradients() -> Tensor:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    with tf32(False):  # otherwise TF32 would be compared with TF32
        eager = gradients()
        _count_graphs()
        compile_blocks(model.model.layers, phase.sizes.backend, join)
        compiled_gradients = gradients()
    error = _relative_error(compiled_gradients, eager)
    return {"gradients": error, **_count_graphs(), "outcome": "ok" if error < 1e-4 else WRONG}


def _check_replayed(phase: Phase, mechanisms: dict[str, dict]) -> Measurement:
    """Compare weights after steps that a GPU replays as CUDA graphs with those after the same compiled steps.

    The learning rate changes, and one step is skipped.
    """
    states = []
    for graphs in (False, phase.on_gpu):
        model, _ = _make_small(phase, mechanisms, 64)
        compile_model(model.train(), phase.sizes.backend, whole=True, cuda_graphs=graphs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            ids = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(step)).to(phase.device)
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            model(ids, labels=ids, skip_logits=True, use_cache=False).loss.backward()
            if step != 3:
                optimizer.step()
            optimizer.zero_grad()
        states.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    error = _relative_error(states[1], states[0])
    return {"weights": error, **_count_graphs(), "outcome": "ok" if error < 1e-6 else WRONG}


def _relative_error(x: Tensor, reference: Tensor) -> float:
    """Measure the norm of a tensor's difference from the reference, divided by that of the reference."""
    x, reference = x.double(), reference.double()
    return float((x - reference).norm() / reference.norm())


def _count_graphs() -> Measurement:
    """Count graphs and breaks since the last call."""
    row = {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}
    counters.clear()
    return row


def _make_steps(
    phase: Phase, model: PreTrainedModel, ids: Tensor, precision: Precision = Precision.BF16_MIXED, **settings: bool
) -> Callable[[], None]:
    """Make training steps in bf16, compiled by block with head and loss as one graph. settings: of `compile_model`."""
    backend = phase.sizes.backend
    precision.cast_activations(model)
    if isinstance(model, HeadwaterForCausalLM):  # compile as `headwater train` does
        compile_model(model, backend, **settings)
        return training_step(model, lambda: model(ids, labels=ids, skip_logits=True, use_cache=False).loss, precision)
    compile_blocks(model.model.layers, backend)

    def loss_of(hidden: Tensor) -> Tensor:
        return model.loss_function(logits=model.lm_head(hidden), labels=ids, vocab_size=model.config.vocab_size)

    loss = torch.compile(loss_of, backend=backend)
    return training_step(model, lambda: loss(model.model(ids, use_cache=False).last_hidden_state), precision)


def _timed_steps(phase: Phase, step: Callable[[], None], config: HeadwaterConfig, tokens: int) -> Measurement:
    """Time training steps of so many tokens.

    MFU counts the pairs that causal attention computes; "all pairs" counts all, as nanoGPT, PaLM and nanochat do.
    """
    context = phase.sizes.context
    flops = tokens * cost.training_flops(config, context)
    # Causal attention has (context + 1) / 2 pairs a token; keys and values take 2 FLOPs each, three times in training.
    all_pairs = flops + tokens * 12 * config.num_hidden_layers * config.hidden_size * (context - 1) / 2
    _count_graphs()
    started = time.perf_counter()
    for _ in range(phase.sizes.warm):
        step()
    phase.wait()
    if phase.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter() - started
    second = phase.seconds(step, phase.sizes.steps)
    sheet = peak_of(phase.device, Precision.BF16_MIXED)
    row: Measurement = {"ms a step": second * 1e3, "tokens/s": tokens / second, "MFU": flops / second / sheet}
    row["MFU, all pairs"] = all_pairs / second / sheet
    if phase.on_gpu:
        row["MFU, measured peak"] = flops / second / matmul_flops(phase.device, torch.bfloat16)
        row["peak, GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return row | {"first steps, s": begun} | _count_graphs()


def training(phase: Phase) -> None:
    """Time training steps at commonly published sizes, with each remedy, and Llama's for comparison."""
    sizes, context = phase.sizes, phase.sizes.context

    def measure(
        shape: tuple[int, int, int], llama: bool = False, head_dim: int = 64, attention: str = "sdpa", **settings: Any
    ) -> Measurement:
        layers, width, rows = shape
        config = ModelShape(layers, width, sizes.vocab_size).config(context)
        heads = dict(num_attention_heads=max(1, width // head_dim))
        ids = phase.draw(rows, context)
        with torch.device(phase.device):
            model: PreTrainedModel
            if llama:
                model = LlamaForCausalLM(LlamaConfig(**config))
            else:
                model = make_model(phase, layers, width, context, **heads)
        model.set_attn_implementation(attention)
        steps = _make_steps(phase, model, ids, **settings)
        return _timed_steps(phase, steps, HeadwaterConfig(**config), ids.numel())

    stream = dict(precision=Precision.BF16_STREAM)
    remedies: dict[str, dict[str, Any]] = {
        "blocks": {},
        "whole": dict(whole=True),
        "blocks, bf16-stream": stream,
        "whole, bf16-stream": dict(whole=True, **stream),
        "blocks, joined products": dict(join=True),
        "whole, joined products, bf16-stream": dict(whole=True, join=True, **stream),
        "blocks, heads of 128": dict(head_dim=128),
    }
    if has_flash3(phase):
        remedies["blocks, heads of 128, FlashAttention 3"] = dict(head_dim=128, attention=FLASH3)
    for name, shape in sizes.training.items():
        for label, settings in remedies.items():
            phase.attempt(partial(measure, shape, **settings), model=name, compiled=label)
    for label, graphs in {"whole": False, "whole, CUDA graphs": phase.on_gpu}.items():
        steps = partial(measure, sizes.small, whole=True, cuda_graphs=graphs)
        phase.attempt(steps, model="{} layers of {}".format(*sizes.small), compiled=label)
    name, shape = next(iter(sizes.training.items()))
    phase.attempt(partial(measure, shape, llama=True), model=f"{name}, transformers' Llama", compiled="blocks")


def mechanisms(phase: Phase) -> None:
    """Time a training step with each mechanism over one without it, in turn; first all of the preset's."""
    layers, width, rows = phase.sizes.mechanisms
    shape = StepShape(layers, width, phase.sizes.vocab_size, phase.sizes.context)

    def measure(options: dict[str, dict]) -> Measurement:
        with torch.device("meta"):  # initialization on the CPU would take longer than the steps
            empty = make_twins(options, shape)
        models = [draw_weights(model, phase.device) for model in empty]
        ids = phase.draw(rows, phase.sizes.context)
        steps = [_make_steps(phase, model, ids) for model in models]
        for step in steps:
            for _ in range(phase.sizes.warm):
                step()
        runs = {name: partial(phase.seconds, step, 2) for name, step in zip(("with", "without"), steps, strict=True)}
        times = take_turns(runs, phase.sizes.steps, warmup=0)
        paired = PairedTimes(times["with"], times["without"])
        low, high = paired.quartiles
        flops = [cost.training_flops(model.config, phase.sizes.context) for model in models]
        return {
            "ratio": paired.ratio,
            "quartiles": f"{low:.3f}–{high:.3f}",
            "FLOPs, ratio": flops[0] / flops[1],
            "ms without": times["without"][-1] * 1e3,
        }

    mechanisms_by_name = {RECOMMENDED: PRESETS[RECOMMENDED].fields["mechanisms"]}
    mechanisms_by_name |= {name: {name: {}} for name in MECHANISMS.built_in}

    def order(name: str) -> tuple[bool, int]:
        """Sort the preset first, then by the least number of graphs: one for each number of inputs."""
        try:
            config = HeadwaterConfig(num_hidden_layers=layers, mechanisms=mechanisms_by_name[name])
            graphs = len({len(plan.reads) for plan in plan_layers(config)})
        except HeadwaterError:
            graphs = layers  # it does not fit this model, as its row will say
        return name != RECOMMENDED, graphs

    for name in sorted(mechanisms_by_name, key=order):
        phase.attempt(partial(measure, mechanisms_by_name[name]), mechanism=name)


def decoding(phase: Phase) -> None:
    """Time a generated token with a static cache, which a GPU replays as a graph, as a share of the bandwidth.

    The step is recorded uncompiled, compiled, tuned, and with joined products.
    """
    sizes = phase.sizes
    peak = copy_bandwidth(phase.device)

    def measure(layers: int, width: int, rows: int, compiled: bool = False, **settings: Any) -> Measurement:
        model = make_model(phase, layers, width, sizes.prompt + sizes.tokens).to(torch.bfloat16).eval()
        config = model.config
        decoder, ids = Decoder(model, compiled, sizes.backend, **settings), phase.draw(rows, sizes.prompt)
        times: list[float] = []  # when the host received each step's tokens

        def note(new: Tensor) -> None:
            times.append(time.perf_counter())

        for _ in range(2):  # the first compiles and records
            times.clear()
            decoder(ids, max_new_tokens=sizes.tokens, watch=note)
        second = (times[-1] - times[0]) / (len(times) - 1)
        step = 2 * cost.weights_read(config) + rows * cost.cache_bytes_read(config, sizes.prompt + sizes.tokens // 2, 2)
        return {
            "ms a token": second * 1e3,
            "tokens/s": rows / second,
            "GB a step": step / 1e9,
            "of the copy bandwidth": step / second / peak,
        }

    def attempt(step: str, rows: int, name: str) -> None:
        settings = steps[step] if phase.on_gpu else {**steps[step], "options": None}
        phase.attempt(partial(measure, *sizes.decoding[name], rows, **settings), model=name, batch=rows, step=step)

    tuned = {"coordinate_descent_tuning": True}
    steps: dict[str, dict[str, Any]] = {
        "compiled": dict(compiled=True),
        "compiled, tuned": dict(compiled=True, options=tuned),
        "compiled, tuned, PDL": dict(compiled=True, options={**tuned, "triton.enable_pdl": True}),
        "compiled, joined products": dict(compiled=True, join=True),
        "compiled, joined products, tuned": dict(compiled=True, join=True, options=tuned),
        "as it is": {},
    }
    # Compilation takes a minute, so of the steps with many rows those without it come first.
    for name, step in product(sizes.decoding, steps):
        attempt(step, 1, name)
    for step, name in product(("as it is", "compiled", "compiled, joined products"), sizes.decoding):
        attempt(step, sizes.many, name)


MEASUREMENTS = {phase.__name__: phase for phase in (environment, correctness, training, mechanisms, decoding)}
