"""What each of several processes does in test_titan.py: the same step as one process, split in some way."""

import json
import traceback
import types
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torchtitan.tools.utils as titan_tools
from torch import nn
from torch.distributed.tensor import DTensor

# torchtitan 0.3 takes a machine without an accelerator for one with CUDA.
titan_tools.device_type = "cpu"
titan_tools.device_module = types.SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")}
    | dict(
        set_device=lambda device: None,
        get_device_name=lambda device=None: "CPU",
        current_device=lambda: 0,
        device_count=lambda: 1,
        get_device_properties=lambda device: types.SimpleNamespace(total_memory=2**34),
        reset_peak_memory_stats=lambda *_: None,
        empty_cache=lambda: None,
        memory_stats=lambda device=None: {},
        synchronize=lambda *_: None,
    )
)

from torchtitan.config import CompileConfig, ConfigManager, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC  # noqa: E402

from headwater import HeadwaterConfig, HeadwaterForCausalLM  # noqa: E402
from headwater.integrations.torchtitan import spec  # noqa: E402
from headwater.integrations.torchtitan.model import WRAPPED  # noqa: E402
from headwater.integrations.torchtitan.titan_checkpoints import ours_of  # noqa: E402
from headwater.util.errors import HeadwaterError  # noqa: E402

DEGREES = {"tp": "tensor_parallel_degree", "cp": "context_parallel_degree", "pp": "pipeline_parallel_degree"}
ROWS, TOKENS = 4, 12
DIMS: dict[str, ParallelDims] = {}  # connecting processes takes longer than a step


def main(file: Path, rank: int, world: int) -> None:
    """file: jobs, by name; the first process writes what came of them beside it."""
    meeting = f"file://{file}.meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(minutes=10))
    made = {}
    for name, job in json.loads(file.read_text()).items():
        torch.set_default_dtype(torch.float32)
        try:
            made[name] = trained(job["arguments"]) if "arguments" in job else compared(job["config"], job["by"])
        except HeadwaterError as error:
            made[name] = str(error)
        except Exception:  # others may be waiting, but not for long
            made[name] = {"error": traceback.format_exc()[-3000:]}
        if rank == 0:
            file.with_suffix(".made").write_text(json.dumps(made))
    dist.destroy_process_group()


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """This process's summand of the mean over all tokens, in the logits' precision (torchtitan's own is in fp32)."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (ROWS * TOKENS)


def compared(fields: dict, by: list[str]) -> dict[str, float]:
    """The largest differences between a step split `by` these and the plain model's: of logits, of gradients.

    by: names of `DEGREES`, each for two processes; "ac" and "compile". The remaining processes share the rows (FSDP2).
    """
    torch.set_default_dtype(torch.float64)
    kind = HeadwaterConfig.gpt2 if fields.pop("base", None) else HeadwaterConfig
    config = kind(**fields)
    plain = HeadwaterForCausalLM(config).train()
    draw = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(0, config.vocab_size, (2, ROWS, TOKENS), generator=draw)
    positions = torch.cat([torch.arange(5), torch.arange(7)]).repeat(ROWS, 1)  # two documents
    wanted = plain(input_ids=ids, position_ids=positions).logits
    loss_of(wanted, labels).backward()

    parallelism = ParallelismConfig(
        spmd_backend="partial_dtensor",
        enable_sequence_parallel=False,
        context_parallel_load_balancer=None,
        pipeline_parallel_schedule="GPipe",
        **{DEGREES[one]: 2 for one in by if one in DEGREES},
    )
    dims = DIMS.setdefault(repr(parallelism), ParallelDims.from_config(parallelism, dist.get_world_size()))
    training = TrainingConfig(seq_len=TOKENS, local_batch_size=ROWS, mixed_precision_param="float32")
    options = spec(config)
    common = dict(
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable="compile" in by, backend="aot_eager"),
        ac_config=FullAC.Config() if "ac" in by else None,
        dump_folder="",
    )

    def share(x: torch.Tensor) -> torch.Tensor:
        for mesh, dim in (("batch", 0), ("cp", 1)):
            there = dims.get_optional_mesh(mesh)
            x = x if there is None else x.chunk(there.size(), dim)[there.get_local_rank()]
        return x.contiguous()

    with torch.device("meta"):
        model = options.model.build()
    logits = None
    if "pp" in by:
        schedule, (model,), first, last = options.pipelining_fn(
            model,
            **common,
            device=torch.device("cpu"),
            model_config=options.model,
            parallelize_fn=options.parallelize_fn,
            loss_fn=lambda made, labels, **_: (loss_of(made, labels), {}),
        )
        started(model)
        schedule.step(
            *([ids] if first else []),
            target=labels if last else None,
            losses=[] if last else None,
            return_outputs=False,
            positions=positions,
        )
    else:
        model = options.parallelize_fn(model, **common)
        started(model)
        made = model(share(ids), positions=share(positions))
        logits = made.full_tensor() if isinstance(made, DTensor) else made
        loss_of(logits, share(labels)).backward()

    gradients = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.requires_grad}
    found = {
        ours_of(name.replace(WRAPPED, "")): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert found.keys() == gradients.keys() or "pp" in by
    assert all(gradient is not None for gradient in found.values())
    errors = {
        name: float((whole(gradient) - gradients[name]).abs().max() / gradients[name].abs().max().clamp(min=1e-6))
        for name, gradient in found.items()
    }
    split = sum(isinstance(p, DTensor) and p.numel() > p.to_local().numel() for p in model.parameters())
    return {
        "logits": 0.0 if logits is None else float((logits - share(wanted)).detach().abs().max()),
        "gradients": max(errors.values()),
        "split": split,
    }


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def started(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    model.init_states()
    model.train()


def trained(arguments: list[str]) -> str:
    """Run torchtitan's own trainer to the end; returns its folder."""
    config = ConfigManager().parse_args(["--module", "headwater_lab.titan", *arguments])
    trainer = config.build()
    try:
        trainer.train()
    finally:
        with suppress(AttributeError):
            trainer.close()
    return config.dump_folder
