"""Pipeline stages: where models are cut, and which models cannot be."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torchtitan.distributed.pipeline_parallel import (
    _generate_llm_fqn_per_model_part,
    _get_pipeline_metadata,
    pipeline_llm,
)

from headwater.config.planner import plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.integrations.torchtitan.model import TitanModel
from headwater.util.errors import HeadwaterError


def pipeline_model(
    model: TitanModel, *, parallelism: Any, parallel_dims: Any, model_config: Any, **options: Any
) -> Any:
    """Run torchtitan's `pipeline_llm` after checking what it cannot handle: tensors that blocks pass on.

    Raises `HeadwaterError` if a block would read what a block of an earlier stage computed.
    """
    stages = parallelism.module_fqns_per_model_part
    if stages is None:
        stages = _generate_llm_fqn_per_model_part(*_get_pipeline_metadata(parallel_dims, parallelism, model_config))
    check_cuts(model.settings, stages)
    outside = [name for name, _ in model.named_children() if name in ("embed_positions", "dropout")]
    outside += [f"mechanisms.{key}" for key in model.mechanisms]
    stages = [
        [*stage, *(outside if number == 0 else []), *(["rotary_emb"] if model.rotary_emb is not None else [])]
        for number, stage in enumerate(stages)
    ]
    return pipeline_llm(
        model,
        parallelism=dataclasses.replace(parallelism, module_fqns_per_model_part=stages),
        parallel_dims=parallel_dims,
        model_config=model_config,
        **options,
    )


def check_cuts(config: HeadwaterConfig, stages: Sequence[Sequence[str]]) -> None:
    """Raise `HeadwaterError` if a block reads a tensor of a block, or of the embedding, that is in another stage.

    stages: torchtitan's names of what each stage has.
    """
    stage_of = {
        int(name.removeprefix("layers.")): number
        for number, names in enumerate(stages)
        for name in names
        if name.startswith("layers.")
    }
    stage_of[-1] = 0
    for plan in plan_layers(config):
        for source in plan.reads:
            if stage_of[source.layer] != stage_of[plan.index]:
                raise HeadwaterError(
                    f"Pipeline stages pass on only the residual stream, but block {plan.index} reads what "
                    f"{f'block {source.layer}' if source.layer >= 0 else 'the first stage'} computed (mechanisms: "
                    f"{', '.join(config.mechanisms)}); set pipeline_parallel_degree to 1, or cut the stages so that "
                    "these blocks are in one (module_fqns_per_model_part)."
                )
