"""The functions that change a model: `lab.grow` and `lab.retrofit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel

from headwater import growth
from headwater.conversion import add_mechanisms, from_transformers
from headwater.models.kinds import MODEL_TYPES, AnyModel
from headwater.models.load import model_type
from headwater.models.pretrained import HeadwaterPreTrainedModel
from headwater.plugins import outside
from headwater.plugins.registry import as_mapping
from headwater.util.errors import HeadwaterError, shown
from headwater.util.files import local
from headwater_lab.api.common import quiet
from headwater_lab.training.checkpoints import load_model, newest_checkpoint


@quiet()
def grow(
    model: Any,
    attention_pairs: int | None = None,
    ffn_pairs: int | None = None,
    *,
    trust: Sequence[str] = (),
    **arguments: Any,
) -> AnyModel:
    """A larger model from a trained one, like `headwater grow`: by default without changing its function.

    model: a headwater model or one of a family that `retrofit` converts, which is not changed; the folder of a
    checkpoint or run; or a name on the hub. trust: as in `train`. The rest are the fields of
    `headwater.growth.GrowthOptions`.
    Raises `HeadwaterError`.
    """
    outside.trust(trust)
    return growth.grow(_opened("grow", model)[0], attention_pairs, ffn_pairs, **arguments)


@quiet()
def retrofit(
    model: Any,
    mechanisms: Mapping[str, Mapping[str, Any]] | Sequence[str] | str = (),
    *,
    allow_change: bool = False,
    family: str | None = None,
    trust: Sequence[str] = (),
) -> AnyModel:
    """Convert a trained model, and add mechanisms without changing its function, like `headwater retrofit`.

    model: a headwater model or one of a supported family, a checkpoint's folder, or a name on the hub; it is not
    changed. mechanisms: names, or name -> options; not needed to convert a model of another family. allow_change: allow
    mechanisms that change the function. family: the family of a model that is not headwater's, "package.module:NAME"
    for an outside one; default: from its config. trust: as in `train`. Raises `HeadwaterError`.
    """
    outside.trust(trust)
    outside.trust_names_in(mechanisms)
    given = as_mapping([mechanisms] if isinstance(mechanisms, str) else mechanisms)
    if not isinstance(given, Mapping):
        raise HeadwaterError(f"mechanisms must be names, or a mapping name: options, not {shown(given)}.")
    source = repr(str(model)) if isinstance(model, str | Path) else f"A {type(model).__name__}"
    opened, foreign = _opened("retrofit", model, family)
    if not foreign and family is not None:
        raise HeadwaterError(f"{source} is already a headwater model; leave out family={family!r}.")
    if not foreign and not given:
        raise HeadwaterError(f"{source} is already a headwater model; name mechanisms to add.")
    added = {name: dict(options) for name, options in given.items()}
    return add_mechanisms(opened, added, allow_change) if added else opened


def _opened(what: str, model: Any, family: str | None = None) -> tuple[AnyModel, bool]:
    """A headwater model from any model, folder or name, and whether it was another family's. what: for the message."""
    if not isinstance(model, str | Path | PreTrainedModel):
        raise HeadwaterError(f"{what} takes a model, a folder or a name on the hub, not {type(model).__name__!r}.")
    if isinstance(model, str | Path) and local(model).is_dir():
        path = newest_checkpoint(Path(model))
        model = load_model(path) if model_type(path) in MODEL_TYPES else path
    if isinstance(model, HeadwaterPreTrainedModel):
        return cast("AnyModel", model), False
    return from_transformers(model, family), True
