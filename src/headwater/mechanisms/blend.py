"""A model's own keys and values mixed with those that a cheaper model would attend to, during a conversion.

    K̃_h^l = (1 - w)·K_h^l + w·K_h^{s(l,h)}        Ṽ likewise with s'        w from 0 to 1

s(l, h) and s'(l, h) are the layers that head h of layer l attends to in the cheaper model, the goal: this model with
other `mechanisms`. K^s is that layer's own, after its own mechanisms and RoPE, not what it attended to. At w = 0 the
model is unchanged; at w = 1 it computes the goal's function with the same weights, and no head attends to keys or
values that the goal lacks. If the goal has N < K key/value heads, each head is first blended with the mean of its group
of K / N (GQA, arXiv 2305.13245, section 2.1), which is the head of the mean of their weights:

    k_h ← (1 - w)·k_h + w·(N / K)·Σ_{h' in the group of h} k_h'        v likewise

The weight is the one of value residual (arXiv 2410.17897) as a schedule: it moves linearly over the steps of a run
whose recipe says `convert: {anneal: true}`. Until `headwater.conversion.convert.finish_model` makes the goal,
every layer stores all.
"""

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from headwater.config.options import complete_options
from headwater.config.plan import Attends, LayerPlan, Part, Source, Stage
from headwater.config.planner import plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.capabilities import Shown, Step
from headwater.mechanisms.contract import KV, QKV, Context, Mechanism, OptionValues
from headwater.mechanisms.fp32 import KeepsPrecision
from headwater.mechanisms.growth_map import GrowthMap
from headwater.plugins.mechanisms import has_own, in_order, resolve
from headwater.util.errors import HeadwaterError


def _list_cached(plans: Sequence[LayerPlan]) -> set[tuple[str, int, int]]:
    """List what is cached: "k" or "v", layer and head."""
    return {
        (letter, layer, head)
        for plan in plans
        for head, attends in enumerate(plan.attends)
        for letter, layer in attends._asdict().items()
    }


class Blend(KeepsPrecision, Mechanism):
    """Mixes keys and values with others: (1 - w)·x + w·target, exactly x at w = 0 and exactly target at w = 1.

    Args
        pool_size: how many consecutive heads become one. weight: w.
        keys, values: the slot of the source from which each head takes them; None: from the layer itself.

    Buffer: `weight` [1], in fp32.

        >>> import torch
        >>> from headwater.mechanisms.blend import Blend
        >>> own, others = torch.randn(2, 3, 4, 16, 64)
        >>> blend = Blend(weight=1.0)
        >>> torch.equal(blend(own, others), others)
        True
        >>> torch.equal(Blend(pool_size=4, weight=1.0).pool_heads(own)[:, 0], own.mean(1))
        True
    """

    source = "a layer's own, gradually replaced by a cheaper model's"

    class Options:
        mechanisms: dict[str, Any] | None = None
        num_key_value_heads: int | None = None
        weight: float = 0.0

    def __init__(
        self,
        pool_size: int = 1,
        weight: float = 0.0,
        keys: tuple[int | None, ...] = (),
        values: tuple[int | None, ...] = (),
    ) -> None:
        super().__init__()
        self.pool_size, self.initial, self.keys, self.values = pool_size, weight, keys, values
        self.weight: Tensor
        self.register_buffer("weight", torch.full((1,), weight, dtype=torch.float32))

    def constants(self) -> dict[str, Tensor]:
        return {"weight": torch.full((1,), self.initial)}

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Mix x and target, [B, K, S, d] each."""
        return x.lerp(target, self.weight.to(x.dtype))

    def pool_heads(self, x: Tensor) -> Tensor:
        """x [B, K, T, d] -> each head mixed with the mean of its group."""
        return self(x, x.unflatten(1, (-1, self.pool_size)).mean(2).repeat_interleave(self.pool_size, dim=1))

    def transform_projections(self, x: QKV, context: Context) -> QKV:
        return QKV(x.q, self.pool_heads(x.k), self.pool_heads(x.v))

    def transform_attended_kv(self, kv: KV, context: Context) -> KV:
        keys = self.mix_sources(kv.k, self.keys, context.sources)
        return KV(keys, self.mix_sources(kv.v, self.values, context.sources))

    def mix_sources(self, x: Tensor, slots: tuple[int | None, ...], sources: list[Tensor]) -> Tensor:
        if not any(slot is not None for slot in slots):
            return x
        targets = [(x if slot is None else sources[slot])[:, head] for head, slot in enumerate(slots)]
        return self(x, torch.stack(targets, dim=1))

    # In a headwater model

    @classmethod
    def goal_config(cls, options: OptionValues, config: HeadwaterConfig) -> HeadwaterConfig:
        """Return the config of the cheaper model. Raises `HeadwaterError` if there is no such model."""
        heads, fewer = config.num_key_value_heads, options["num_key_value_heads"]
        goal = cls.remove_blend(config)
        mechanisms = goal.mechanisms or {}
        if repeated := mechanisms.keys() & (options["mechanisms"] or {}).keys():
            raise HeadwaterError(f"The model already has mechanism {min(repeated)!r}; convert it to another.")
        goal.mechanisms = in_order(mechanisms | (options["mechanisms"] or {}), mechanisms)
        if fewer is not None:
            if not 1 <= fewer < heads:
                raise HeadwaterError(
                    f"The model has {heads} key/value heads, so num_key_value_heads must be "
                    f"{'1' if heads == 2 else f'from 1 to {heads - 1}'} to make them fewer, not {fewer}."
                    if heads > 1
                    else f"The model has one key/value head, which cannot become {fewer}; let layers share instead."
                )
            if heads % fewer:
                raise HeadwaterError(
                    f"{heads} key/value heads cannot be divided into {fewer} groups of equal size; choose a "
                    f"num_key_value_heads that divides {heads}."
                )
            if "num_key_value_heads" in (config.sliding_fields or {}):
                raise HeadwaterError(
                    "The model's layers differ in their number of key/value heads (sliding_fields), so these cannot be "
                    "pooled; let layers share instead, and leave num_key_value_heads out."
                )
            goal.num_key_value_heads = fewer
        goal.complete_fields()
        return goal

    @classmethod
    def remove_blend(cls, config: HeadwaterConfig) -> HeadwaterConfig:
        """Return the config of the model that is converted."""
        plain = copy.deepcopy(config)
        blend = cls.registered_name()
        plain.mechanisms = {name: options for name, options in (config.mechanisms or {}).items() if name != blend}
        return plain

    @classmethod
    def find_pool_size(cls, options: OptionValues, config: HeadwaterConfig) -> int:
        """Find how many key/value heads become one."""
        return config.num_key_value_heads // (options["num_key_value_heads"] or config.num_key_value_heads)

    @classmethod
    def validate_options(cls, options: OptionValues, config: HeadwaterConfig) -> None:
        if not 0 <= options["weight"] <= 1:
            raise HeadwaterError(f"Mechanism 'blend': weight must be from 0 to 1, not {options['weight']}.")
        if not options["mechanisms"] and options["num_key_value_heads"] is None:
            raise HeadwaterError("Mechanism 'blend' needs mechanisms or num_key_value_heads to convert to.")
        cls.goal_config(options, config)

    @classmethod
    def plan_stages(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        cls._check_goal(options, config)
        cls._check_base(config)
        pool_size, goals = cls.find_pool_size(options, config), plan_layers(cls.goal_config(options, config))
        new = []
        for plan, goal in zip(plans, goals, strict=True):
            if pool_size > 1:
                plan = plan.acting(cls, cls.transform_projections)
            sources = [
                Source("bank", letter, layer)
                for attends in goal.attends
                for letter, layer in attends._asdict().items()
                if layer != plan.index
            ]
            new.append(plan.reading(*sources).acting(cls, cls.transform_attended_kv) if sources else plan)
        if new == plans:
            raise HeadwaterError(
                "Heads would read the same keys and values as before; choose mechanisms that let layers share, or "
                "fewer key/value heads."
            )
        return new

    @classmethod
    def _check_goal(cls, options: OptionValues, config: HeadwaterConfig) -> None:
        """Raise `HeadwaterError` if a mechanism of the goal does more than share, or saves no cache."""
        goals = plan_layers(cls.goal_config(options, config))
        for name in options["mechanisms"] or {}:
            shares = has_own(resolve(name), "redirect_heads")
            if not shares or any(name == acting for goal in goals for _, acting in goal.acts):
                raise HeadwaterError(
                    f"Mechanism {name!r} does more than let layers share keys and values, so the converted model would "
                    "differ at the end of the conversion; convert without it, and add it with `headwater retrofit`."
                )
            fewer = {other_name: fields for other_name, fields in options["mechanisms"].items() if other_name != name}
            without = plan_layers(cls.goal_config(options | {"mechanisms": fewer}, config)) if fewer else ()
            if fewer and len(_list_cached(without)) <= len(_list_cached(goals)):
                raise HeadwaterError(
                    f"Mechanism {name!r} makes the cache no smaller than {' and '.join(map(repr, fewer))} alone; "
                    "leave it out."
                )

    @classmethod
    def _check_base(cls, config: HeadwaterConfig) -> None:
        """Raise `HeadwaterError` if layers already share, or a mechanism depends on the source of values."""
        for plan in plan_layers(cls.remove_blend(config)):
            if any(attended != Attends(plan.index, plan.index) for attended in plan.attends):
                raise HeadwaterError(
                    f"Layer {plan.index} already attends to another layer's keys or values; convert the model before "
                    "layers share."
                )
            if plan.value_part != "v":
                raise HeadwaterError(f"Layer {plan.index} has one cached vector for keys and values already.")
            if acting := plan.at(Stage.ATTENTION_WEIGHTS, Stage.HEAD_OUTPUTS):
                raise HeadwaterError(
                    f"Mechanism {acting[0]!r} acts on what heads have read, which depends on the layer that provides "
                    "the values; remove it before the model is converted."
                )

    @classmethod
    def build_module(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Self:
        pool_size = cls.find_pool_size(options, config)
        goal = plan_layers(cls.goal_config(options, config))[plan.index]
        attends = goal.attends if plan.at(Stage.ATTENDED_KV) else ()

        def list_slots(letter: Part) -> tuple[int | None, ...]:
            """List the slots of the sources of all heads' keys or values."""
            layers = (getattr(attended, letter) for attended in attends for _ in range(pool_size))
            return tuple(None if layer == plan.index else plan.slot(Source("bank", letter, layer)) for layer in layers)

        return cls(pool_size, options["weight"], list_slots("k"), list_slots("v"))

    # Capabilities

    @classmethod
    def complete_options(cls, options: OptionValues, config: HeadwaterConfig) -> OptionValues:
        mechanisms = options["mechanisms"] or {}
        completed = {name: complete_options(resolve(name), fields, config) for name, fields in mechanisms.items()}
        return options | {"mechanisms": completed or None}

    @classmethod
    def grow_options(cls, options: OptionValues, config: HeadwaterConfig, growth: GrowthMap) -> OptionValues:
        raise HeadwaterError("The model is being converted to a smaller cache; finish the conversion before it grows.")

    def prepare_training(self, step: Step) -> float | None:
        return float(self.weight) if (step.start.get("convert") or {}).get("anneal") else None

    def prepare_step(self, state: Any, step: Step) -> None:
        self.weight.fill_(state + (1 - state) * (step.number + 1) / step.steps)

    @classmethod
    def describe_training(cls, modules: int, step: Step) -> str:
        steps = "one step" if step.steps == 1 else f"{step.steps} steps"
        return f"The keys and values of {modules} layers are replaced by fewer ones over {steps}."

    per_head = per_token = False

    def show_scalars(self, plan: LayerPlan, shared: dict[Source, Tensor]) -> dict[str, Shown]:
        return {"w": Shown(self.weight)}
