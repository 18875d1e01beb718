"""The parallel plan: which process holds which part of a model, and what they exchange.

    tensor     Each process computes some heads of every attention and some columns of every feed-forward. The residual
               stream is whole in all of them. Embedding and output head are split by tokens of the vocabulary.
    context    Each process has consecutive tokens of a row. Within attention, between the projections, it has all
               tokens of some heads instead, so that a mechanism that looks at earlier tokens finds them.
    FSDP2      as torchtitan's own models: one group a block, one for the head.

Under the first two, attention is built once more from plans of the process's own heads (`engines.split.narrow_plans`).
Parameters keep their shapes and names: they become DTensors, and a module's code sees only its local part
(`view_parameter`). Within attention a replicated parameter or tensor has a different gradient in each process, and what
counts is the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import (
    disable_fsdp_gradient_division,
    enable_fsdp_symm_mem,
    get_fsdp_reshard_after_forward_policy,
)

from headwater.config.plan import LayerPlan
from headwater.config.text import HeadwaterConfig
from headwater.engines.split import Portion
from headwater.integrations.torchtitan.limits import check_model
from headwater.integrations.torchtitan.model import TitanModel
from headwater.mechanisms.contract import Mechanism
from headwater.mechanisms.fp32 import KeepsPrecision
from headwater.models.compiling import expect_layers
from headwater.nn.attention import Attention
from headwater.nn.block import Block
from headwater.nn.feed_forward import FeedForward
from headwater.util.errors import HeadwaterError

View = Callable[[Tensor], Tensor]


class Placing(NamedTuple):
    """The part of a parameter that a process of tensor parallelism has.

    placement: split or replicated. gradient: what a process computes of its part's gradient: all of it, or a summand.
    then: maps the part to what the module sees.
    """

    placement: Placement = Replicate()
    gradient: Placement = Replicate()
    then: View | None = None


SUMMAND = Placing(gradient=Partial())
Placings = dict[tuple[nn.Module, str], Placing]


def parallelize_model(
    model: TitanModel,
    *,
    parallel_dims: ParallelDims,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> TitanModel:
    """Apply torchtitan's parallelisms to a model, or to a pipeline's stage, on the meta device; returns it.

    The arguments match torchtitan's own functions. Raises `HeadwaterError` for what `limits.check_model`
    refuses, and for mechanisms whose heads cannot be split according to the plans.
    """
    check_model(model.settings, parallelism, training.seq_len)
    tensor = parallel_dims.get_optional_mesh("tp")
    context = parallel_dims.get_optional_mesh("cp")
    compiles = compile_config.enable and "model" in compile_config.components
    if compiles and (tensor is not None or context is not None):
        raise HeadwaterError(
            "Blocks whose heads are split over processes are not compiled yet; set compile.enable to false, or train "
            "without tensor and context parallelism."
        )
    model.context_mesh = context
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    data = parallel_dims.get_mesh(names)
    everything = data if tensor is None else parallel_dims.get_mesh([*names, "tp"])

    unsharded = distribute_parameters(model, split_model(model, tensor, context), tensor, everything)
    if unsharded and training.enable_cpu_offload:
        raise HeadwaterError(
            "The mechanisms' scalars stay on the device, unsharded; set training.enable_cpu_offload to false."
        )
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compiles:
        expect_layers(model.settings.num_hidden_layers)
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    policy = choose_precision(model, training)
    always = parallelism.fsdp_reshard_after_forward == "always"
    after_forward = get_fsdp_reshard_after_forward_policy(
        parallelism.fsdp_reshard_after_forward, parallel_dims.pp_enabled
    )
    shard_model(model, data, policy, after_forward, always, unsharded, offload=training.enable_cpu_offload)
    if parallelism.enable_fsdp_symm_mem:
        enable_fsdp_symm_mem(model)
    return model


def split_model(model: TitanModel, tensor: DeviceMesh | None, context: DeviceMesh | None) -> Placings:
    """Split heads, feed-forwards and the vocabulary over the processes; returns where each parameter goes."""
    placings: Placings = {}
    blocks = [cast(Block, block) for block in model.layers.values()]
    if tensor is not None or context is not None:
        split = SplitHeads(model.settings, tensor, context, placings)
        for block in blocks:
            split.split_attention(block)
    if tensor is not None:
        for block in blocks:
            split_feed_forward(block, tensor, placings)
        split_vocabulary(model, tensor, placings)
    return placings


def choose_precision(model: TitanModel, training: Any) -> MixedPrecisionPolicy:
    """Choose the precision from torchtitan's options; fp64 models are not changed."""
    if any(parameter.dtype == torch.float64 for parameter in model.parameters()):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        cast_forward_inputs=False,
    )


def shard_model(
    model: TitanModel,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    after_forward: bool,
    always: bool,
    unsharded: set[nn.Parameter],
    offload: bool,
) -> None:
    """FSDP2: a group for each block, one for the embedding, one for norm and head (all three if they are tied).

    after_forward: whether a block's parameters are freed after its forward pass; always: the head's too. unsharded: not
    sharded. Gradients are summed, since the loss is divided by the tokens of all processes.
    """
    options: dict[str, Any] = dict(
        mesh=mesh,
        mp_policy=policy,
        ignored_params=unsharded,
        offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
    )
    ends = [module for module in (model.norm, model.lm_head) if module is not None]
    if model.enable_weight_tying:
        ends.insert(0, cast(nn.Module, model.tok_embeddings))
    elif model.tok_embeddings is not None:
        fully_shard(model.tok_embeddings, **options, reshard_after_forward=after_forward)
    if ends:
        fully_shard(ends, **options, reshard_after_forward=always)
    for block in model.layers.values():
        fully_shard(block, **options, reshard_after_forward=after_forward)
    fully_shard(model, **options)
    disable_fsdp_gradient_division(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # otherwise FSDP2 scales by 1 first, which gloo does not support
            module.set_force_sum_reduction_for_comms(True)


# Views of the part of a parameter that belongs to this process


def distribute_parameters(
    model: TitanModel, placings: Placings, tensor: DeviceMesh | None, everything: DeviceMesh
) -> set[nn.Parameter]:
    """Turn parameters into DTensors, and let modules see their own part; returns those that FSDP2 must not touch.

    These stay in fp32 and whole in every process, and `Totals` adds up their gradients: FSDP2 needs one dtype for what
    it gathers together, and would round them with the rest. placings: of all that are not simply replicated.
    """
    unsharded: set[nn.Parameter] = set()
    replaced: dict[nn.Parameter, nn.Parameter] = {}  # a tied table has two owners but stays one parameter
    for module in model.modules():
        scalars = isinstance(module, KeepsPrecision)
        for name, old in list(module.named_parameters(recurse=False)):
            placing = placings.get((module, name), Placing())
            if scalars:
                mesh = everything
                placements: list[Placement] = [Replicate()] * everything.ndim
                gradient: list[Placement] = [Partial()] * everything.ndim
                if tensor is not None:
                    gradient[-1] = placing.gradient
            elif tensor is not None:
                mesh, placements, gradient = tensor, [placing.placement], [placing.gradient]
            else:
                if placing.then is not None:
                    view_parameter(module, name, None, placing.then)
                continue
            if old not in replaced:
                # Every process has the whole of it, so nothing is sent.
                new = distribute_tensor(old.detach(), mesh, placements, src_data_rank=None)
                replaced[old] = nn.Parameter(new, requires_grad=old.requires_grad)
            module.register_parameter(name, replaced[old])
            view_parameter(module, name, gradient, placing.then)
            if scalars:
                unsharded.add(replaced[old])
    if unsharded:
        model.after_init = Totals(everything, placings).watch_gradients
    return unsharded


class Totals:
    """Sum of the gradients of the parameters that FSDP2 does not touch over the processes, at the end of each backward.

    They are sent in one message and a fixed order, because processes may compute them in different orders.
    """

    def __init__(self, mesh: DeviceMesh, placings: Placings) -> None:
        self.mesh, self.placings = mesh, placings
        self.parameters: list[nn.Parameter] = []
        self.pending: dict[int, Tensor] = {}

    def watch_gradients(self, model: nn.Module) -> None:
        """Register hooks, once the parameters are on their devices."""
        is_first = "tp" not in (self.mesh.mesh_dim_names or ()) or self.mesh.get_local_rank("tp") == 0
        for module in model.modules():
            if not isinstance(module, KeepsPrecision):
                continue
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    # Count a gradient once if every tensor-parallel process has computed all of it.
                    counts = is_first or self.placings.get((module, name), Placing()).gradient.is_partial()
                    parameter.register_hook(partial(self.take_gradient, len(self.parameters), counts))
                    self.parameters.append(parameter)

    def take_gradient(self, number: int, counts: bool, gradient: Tensor) -> Tensor:
        if not self.pending:
            torch.autograd.Variable._execution_engine.queue_callback(self.add_gradients)
        local = cast(DTensor, gradient).to_local()
        self.pending[number] = local if counts else torch.zeros_like(local)
        return torch.zeros_like(self.parameters[number])

    @torch.no_grad()
    def add_gradients(self) -> None:
        locals_ = [cast(DTensor, x).to_local() for x in self.parameters]
        flat = torch.cat([self.pending.get(i, torch.zeros_like(x)).flatten() for i, x in enumerate(locals_)])
        for dim in range(self.mesh.ndim):
            dist.all_reduce(flat, group=self.mesh.get_group(dim))
        for parameter, gradient in zip(self.parameters, flat.split([x.numel() for x in locals_]), strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            cast(DTensor, parameter.grad).to_local().add_(gradient.view(parameter.shape))
        self.pending.clear()


def view_parameter(module: nn.Module, name: str, gradient: Sequence[Placement] | None, then: View | None) -> None:
    """Let the code of `module` see its own part of a parameter from now on.

    State dicts, optimizers and FSDP2 see the parameter itself. gradient: the part that this process computes, for each
    dimension of the mesh; None: the parameter is not a DTensor in a forward pass.
    """
    kind: Any = type(module)
    module.__class__ = make_view_class(kind, name, None if gradient is None else tuple(gradient), then)


@cache
def make_view_class(kind: type, name: str, gradient: tuple[Placement, ...] | None, then: View | None) -> type:
    """A class of modules; the same for all layers that see a parameter alike, so that they share a compiled graph."""

    def read_parameter(self: nn.Module) -> Tensor | None:
        parameter: Tensor | None = self._parameters[name]
        if isinstance(parameter, DTensor):
            if gradient is None or parameter.device_mesh.ndim != len(gradient):
                return parameter  # sharded by FSDP2: this is not a forward pass
            parameter = parameter.to_local(grad_placements=gradient)
        return parameter if then is None or parameter is None else then(parameter)

    return type(kind.__name__, (kind,), {name: property(read_parameter)})


# Communication between tensor-parallel processes. The backward pass does the reverse.


def share_tensor(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Pass x through unchanged, and sum its gradient over the processes."""
    return move_tensor(x, mesh, Replicate(), Replicate(), Partial())


def sum_tensor(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum x over the processes; every process gets the result."""
    return move_tensor(x, mesh, Partial(), Replicate())


def move_tensor(
    x: Tensor, mesh: DeviceMesh, source: Placement, target: Placement, gradient: Placement | None = None
) -> Tensor:
    """Redistribute x from placement `source` to `target`. gradient: the part that a process computes; default: all."""
    placed = DTensor.from_local(x, mesh, [source], run_check=False).redistribute(placements=[target])
    return placed.to_local(grad_placements=None if gradient is None else [gradient])


# Attention


class SplitHeads:
    """The heads of every attention, split over the processes of tensor and context parallelism."""

    def __init__(
        self, config: HeadwaterConfig, tensor: DeviceMesh | None, context: DeviceMesh | None, placings: Placings
    ) -> None:
        self.config, self.tensor, self.context, self.placings = config, tensor, context, placings
        number, count = 0, 1
        for mesh in (tensor, context):
            if mesh is not None:
                number, count = number * mesh.size() + mesh.get_local_rank(), count * mesh.size()
        self.heads = Portion(config, number, count)

    def split_attention(self, block: Block) -> None:
        """Replace a block's attention by one of this process's heads."""
        plan, full = block.plan, block.self_attn
        local = self.heads.build_attention(full, OwnHeads)
        for name, module in full.mechanisms.named_mechanisms():
            local_module, parameters = local.mechanisms[name], dict(module.named_parameters())
            # The module for this process's heads gets the parameters of all heads, and sees only its own part.
            for qualified, entries in self.heads.divide_parameters(cast(Mechanism, module), local_module, plan).items():
                owner, _, leaf = qualified.rpartition(".")
                inside = local_module.get_submodule(owner)
                setattr(inside, leaf, parameters[qualified])
                then = None if entries is None else partial(pick_entries, entries[0], list(entries[1]))
                self.placings[inside, leaf] = Placing(gradient=Partial(), then=then)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            setattr(local, name, module := getattr(full, name))
            for inner in () if module is None or name == "o_proj" else module.modules():
                self.placings |= {(inner, parameter): SUMMAND for parameter, _ in inner.named_parameters(recurse=False)}
        everything = tuple(range(self.config.num_key_value_heads))
        self.split_projection(local.q_proj, None)
        self.split_projection(local.k_proj, None if plan.k_heads == everything else plan.k_heads)
        self.split_projection(local.v_proj, None if plan.v_heads == everything else plan.v_heads)
        self.split_output(local.o_proj)
        local.register_forward_pre_hook(self.make_input_hook(plan), with_kwargs=True)
        local.stores_some = not plan.k_heads == plan.v_heads == everything
        order_children(local, full)
        block.self_attn = local

    def split_projection(self, module: nn.Module | None, stored: tuple[int, ...] | None) -> None:
        """Split the output of a query, key or value map: [B, T, heads·d] of this process's heads and all tokens.

        stored: the heads that a map of the whole model gives; None: all.
        """
        if module is None:
            return
        tensor, context, d = self.tensor, self.context, self.config.head_dim
        columns = tensor is not None and stored is None and isinstance(module, nn.Linear)
        if columns:
            self.placings.update({(module, name): Placing(Shard(0), Shard(0)) for name in ("weight", "bias")})
        chosen = [index for index, head in enumerate(stored or ()) if head in self.heads.heads]

        def divide_output(_: nn.Module, inputs: Any, y: Tensor) -> Tensor:
            if stored is not None:
                if context is not None:
                    y = move_tensor(y, context, Shard(1), Replicate(), Partial())
                return y.unflatten(2, (-1, d))[:, :, chosen].flatten(2)
            if tensor is not None and not columns:
                y = y.chunk(tensor.size(), dim=-1)[tensor.get_local_rank()]
            return y if context is None else move_tensor(y, context, Shard(1), Shard(2))

        module.register_forward_hook(divide_output)

    def split_output(self, module: nn.Module) -> None:
        """The output map: from this process's heads and all tokens to its own tokens, the same for all heads."""
        tensor, context = self.tensor, self.context
        rows = tensor is not None and isinstance(module, nn.Linear)

        def prepare_output(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            x = inputs[0]
            if context is not None:
                x = move_tensor(x, context, Shard(2), Shard(1))
            if tensor is not None and not rows:
                x = move_tensor(x, tensor, Shard(2), Replicate())
            return (x,)

        module.register_forward_pre_hook(prepare_output)
        if tensor is not None and rows:
            split_rows(module, tensor, self.placings)

    def make_input_hook(self, plan: LayerPlan) -> Callable[..., Any]:
        """Make the hook for what reaches attention: shared tensors, whole, and a mask of this process's heads."""
        tensor = self.tensor
        common = [True, *(source.kind in ("stream", "shared") for source in plan.reads)]

        def prepare_inputs(_: nn.Module, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> tuple[Any, Any]:
            if tensor is not None:
                tensors = tuple(
                    share_tensor(x, tensor) if is_common else x for x, is_common in zip(tensors, common, strict=True)
                )
                inputs = {name: options.get(name) for name in ("key_input", "value_input")}
                options = options | {name: share_tensor(x, tensor) for name, x in inputs.items() if x is not None}
            return tensors, self.heads.narrow_mask(options)

        return prepare_inputs


class OwnHeads(Attention):
    """Attention of the heads of one process.

    If the layer stores keys or values of some heads only, and none of this process's heads read them, their parameters
    would have no gradient here, and the other processes would wait for it. So the output depends on them through a term
    that is zero.
    """

    stores_some = False

    def project_inputs(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project_inputs(*inputs)
        return (q + make_zero(k, v).to(q.dtype), k, v) if self.stores_some else (q, k, v)

    def forward(self, *inputs: Tensor, **options: Any) -> tuple[Tensor | None, ...]:
        out, *exports = super().forward(*inputs, **options)
        if self.stores_some:
            inner = [(module, name) for module in self.mechanisms.modules() for name in module._parameters]
            seen_ = [getattr(module, name) for module, name in inner]
            out = out + make_zero(*(x for x in seen_ if x is not None)).to(out.dtype)
        return out, *exports


def order_children(local: nn.Module, full: nn.Module) -> None:
    """Order children and parameters as in `full`: FSDP2 gathers them in this order, in all processes."""
    for name, module in full.named_modules():
        counterpart = local.get_submodule(name)
        for entries, order in ((counterpart._modules, module._modules), (counterpart._parameters, module._parameters)):
            assert entries.keys() <= order.keys(), f"{name}: {entries.keys()} are not among {order.keys()}"
            ordered = {key: entries[key] for key in order if key in entries}
            entries.clear()
            entries.update(ordered)


def make_zero(*tensors: Tensor) -> Tensor:
    """Return a zero that depends on these tensors, so that they get gradients."""
    return torch.cat([x.flatten()[:0].float() for x in tensors]).sum() if tensors else torch.zeros(())


def pick_entries(dim: int, entries: list[int], parameter: Tensor) -> Tensor:
    """Select some entries along a dimension of a parameter."""
    return parameter[(slice(None),) * dim + (entries,)]


# The rest of the model


def split_rows(module: nn.Module, mesh: DeviceMesh, placings: Placings) -> None:
    """A linear layer whose input is split over the processes: its weight by columns, its output summed."""
    placings[module, "weight"] = Placing(Shard(1), Shard(1))
    placings[module, "bias"] = Placing(gradient=Partial(), then=lambda bias: bias / mesh.size())  # each adds it
    module.register_forward_hook(lambda _, inputs, y: sum_tensor(y, mesh))


def split_feed_forward(block: Block, mesh: DeviceMesh, placings: Placings) -> None:
    """A feed-forward of linear layers by its inner columns; every process computes the whole of any other."""
    module = block.mlp
    if not isinstance(module, FeedForward):
        return
    for projection in (module.gate_proj, module.up_proj):
        if projection is not None:
            placings.update({(projection, name): Placing(Shard(0), Shard(0)) for name in ("weight", "bias")})
    split_rows(module.down_proj, mesh, placings)
    module.register_forward_pre_hook(lambda _, inputs: (share_tensor(inputs[0], mesh),))


def split_vocabulary(model: TitanModel, mesh: DeviceMesh, placings: Placings) -> None:
    """Embedding and head by tokens of the vocabulary. The logits are a DTensor, which torchtitan's losses take."""
    if model.tok_embeddings is not None:
        table = model.tok_embeddings
        table.__class__ = Vocabulary
        cast(Vocabulary, table).mesh = mesh
        placings[table, "weight"] = Placing(Shard(0), Shard(0))
    if model.lm_head is not None:
        placings[model.lm_head, "weight"] = Placing(Shard(0), Shard(0))
        model.lm_head.register_forward_pre_hook(lambda _, inputs: (share_tensor(inputs[0], mesh),))
        model.lm_head.register_forward_hook(
            lambda _, inputs, y: DTensor.from_local(y, mesh, [Shard(2)], run_check=False)
        )


class Vocabulary(nn.Embedding):
    """An embedding of which this process has consecutive tokens."""

    mesh: DeviceMesh

    def forward(self, ids: Tensor) -> Tensor:
        table = self.weight
        rows = ids - self.mesh.get_local_rank() * len(table)
        absent = (rows < 0) | (rows >= len(table))
        vectors = nn.functional.embedding(rows.masked_fill(absent, 0), table)
        return sum_tensor(vectors.masked_fill(absent[..., None], 0), self.mesh)
