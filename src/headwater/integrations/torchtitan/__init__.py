"""headwater models in torchtitan's trainer, with its tensor, pipeline and context parallelism and its float8.

    torchrun --nproc-per-node 8 -m torchtitan.train --module headwater_lab.titan --config RECIPE

docs/devices.md says what works with which mechanism. `spec` gives torchtitan's description of any model, for a config
of your own; `export` turns a checkpoint of its trainer into one of headwater's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headwater.config.text import HeadwaterConfig
from headwater.integrations.torchtitan.titan_checkpoints import export
from headwater.util.errors import HeadwaterError
from headwater.util.extras import check_extra

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

__all__ = ["export", "spec"]


def spec(config: HeadwaterConfig, name: str = "headwater", converters: Sequence[Any] = ()) -> ModelSpec:
    """Make the `model_spec` of a torchtitan trainer's config for the model of `config`.

    name: what torchtitan's logs call it.
    converters: configs of torchtitan's converters, such as `Float8LinearConverter.Config()`. They replace linear
        layers, but those inside mechanisms; parameter tokens stay as they are.

    Raises `MissingExtra` without torchtitan. What the model cannot do under the trainer's parallelisms raises
    `HeadwaterError` when the trainer starts.
    """
    check_extra("titan")
    if not config.is_causal:
        raise HeadwaterError("torchtitan's trainer reads text, and this is an image model; use headwater train.")
    from torchtitan.protocols.model_spec import ModelSpec

    from headwater.integrations.torchtitan.model import Linears, TitanAdapter, TitanModel
    from headwater.integrations.torchtitan.parallel import parallelize_model
    from headwater.integrations.torchtitan.pipeline import pipeline_model

    model: Any = TitanModel.Config(headwater=config, linears=Linears(config))
    for converter in converters:
        model = converter.build().convert(model)
    return ModelSpec(
        name="headwater",
        flavor=name,
        model=model,
        parallelize_fn=parallelize_model,
        pipelining_fn=pipeline_model,
        post_optimizer_build_fn=None,
        state_dict_adapter=TitanAdapter,
    )
