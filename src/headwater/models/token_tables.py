"""Tables of mechanisms with a row for each token's id, which are resized with the token embedding."""

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.capabilities import HoldsTokenTables
from headwater.nn.stages import find_owner
from headwater.util.errors import HeadwaterError


def check_resizable(model: PreTrainedModel, new: int) -> None:
    """Raise `HeadwaterError` if the model's mechanisms cannot have a vocabulary of `new` tokens."""
    changed = copy.deepcopy(model.config)
    changed.vocab_size = new
    old_shapes, new_shapes = _mechanism_shapes(model, model.config), _mechanism_shapes(model, changed)
    for name, (parameter, count) in token_tables(model).items():
        rows = count * model.config.vocab_size
        if parameter.shape[0] != rows:
            raise HeadwaterError(
                f"{name!r} has {parameter.shape[0]} rows instead of {rows}, so it cannot be resized with the "
                "embedding; resize the model before sharding it."
            )
        if name in new_shapes and new_shapes[name][0] == count * new:
            old_shapes[name] = new_shapes[name]
    for name in new_shapes:
        if old_shapes.get(name) != new_shapes[name]:
            raise HeadwaterError(
                f"{name!r} would have the shape {list(new_shapes[name])} with {new} tokens, and its mechanism does not "
                "say how to resize it; define count_token_tables() there."
            )


@torch.no_grad()
def resize_token_tables(model: PreTrainedModel, new: int, from_mean: bool = True) -> None:
    """Give every table by token id (`HoldsTokenTables`) `new` rows, and keep the first ones.

    from_mean: rows that are added are the mean of a table's old ones; otherwise they are drawn as in a new model. Both
    are reproducible, so that a saved adapter, which does not contain them, finds the same rows.
    """
    for name, (parameter, count) in token_tables(model).items():
        owner, _, inner = name.rpartition(".")
        holder, rows = model.get_submodule(owner), parameter.unflatten(0, (count, -1))
        # Resize the parameter in place, as transformers does for the embedding. `initial_value` reads its size.
        parameter.data = rows.new_empty(count * new, *rows.shape[2:])
        old = rows.shape[1]
        if from_mean:
            mean = rows.mean(1, keepdim=True, dtype=torch.promote_types(rows.dtype, torch.float32)).to(rows.dtype)
            added = mean.expand(-1, max(0, new - old), *rows.shape[2:])
        else:
            added = model.initial_value(holder, inner).unflatten(0, (count, -1))[:, old:].to(rows)
        parameter.copy_(torch.cat((rows[:, :new], added), dim=1).flatten(0, 1))
        if isinstance(holder, nn.Embedding):
            holder.num_embeddings = len(parameter)


def token_tables(model: nn.Module) -> dict[str, tuple[nn.Parameter, int]]:
    """The parameters that hold tables by token id, by qualified name, and how many tables each holds."""
    tables = {}
    for name, parameter in model.named_parameters():
        owner, inner = find_owner(model, name)
        if owner is not None and isinstance(owner, HoldsTokenTables) and (count := owner.count_token_tables(inner)):
            tables[name] = parameter, count
    return tables


def _mechanism_shapes(model: PreTrainedModel, config: HeadwaterConfig) -> dict[str, torch.Size]:
    """The shapes of the parameters that mechanisms have in a model of this kind with `config`."""
    skeleton = type(model).make_skeleton(copy.deepcopy(config))
    parameters = skeleton.named_parameters()
    return {name: parameter.shape for name, parameter in parameters if find_owner(skeleton, name)[0] is not None}
