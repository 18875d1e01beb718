"""The tokens before one in its document, and the mix of a token with them: y_t = Σ_s w_s·x_{t-s}."""

import torch
from torch import Tensor

from headwater.kernels import can_fuse, can_fuse_traced
from headwater.kernels.fused_shift import Shift, TracedShift, shift_back
from headwater.mechanisms.contract import Ancestors, Reach, Tail

# The tokens before x: [B, heads, n, d], or one tensor [B, heads, 1, d] each, from a static cache.
Previous = Tensor | tuple[Tensor, ...] | None


def shift(
    x: Tensor,
    weight: Tensor,
    reach: Reach = None,
    previous: Previous = None,
    residual: bool = False,
) -> Tensor:
    """y_t = Σ_s weight[s]·x_{t-s}, per head or channel, with zeros before the first token.

    x, y: [B, K, T, d]; weight: [window, K], or [window, K, d].
    previous: the window - 1 tokens before x, [B, K, window - 1, d] or as many of [B, K, 1, d]; default zeros.
    reach: [B, T]; where it is below s, the token s back belongs to another document and counts as zero. `Ancestors`
        name the token s back themselves; `previous` may then be longer.
    residual: whether x_t itself is added.
    """
    window, length = weight.shape[0], x.shape[2]
    if length == 1 and window > 2 and isinstance(previous, Tensor) and reach is None:
        # For a decoding step: one product for all taps, without adding 1 to the taps.
        terms = weight.view(window, x.shape[1], -1).flip(0).transpose(0, 1) * torch.cat((previous, x), dim=2)
        y = terms.sum(2, keepdim=True)
        return (y + x if residual else y).to(x.dtype)
    if previous is None and not isinstance(reach, Ancestors):
        whole = torch.cat((weight[:1] + 1, weight[1:])) if residual else weight
        if reach is None and can_fuse(x, whole, needs_grad=False, cpu_only=True):
            return Shift.apply(x, whole)
        if can_fuse_traced():
            return TracedShift.apply(x, whole, reach)
    first, *taps = weight.view(window, x.shape[1], 1, -1).unbind()
    y = (first + 1 if residual else first) * x
    for steps, tap in enumerate(taps, 1):
        y = torch.addcmul(y, tap, earlier(x, steps, reach, previous))
    return y.to(x.dtype)


def shift_second(x: Tensor, dim: int, size: int, reach: Reach = None, previous: Previous = None) -> Tensor:
    """Shift all but the first `size` heads (dim 1) or channels (dim 3) of x [B, heads, T, d] by one token."""
    last = previous[-1] if isinstance(previous, tuple) else previous
    late, earlier_late = (y if y is None else y.narrow(dim, size, x.shape[dim] - size) for y in (x, last))
    halves = x.narrow(dim, 0, size), earlier(late, 1, reach, earlier_late)
    # Concatenate in the memory layout of projections. Attention's output takes its layout from the queries.
    return torch.cat([y.transpose(1, 2) for y in halves], 2 if dim == 1 else 3).transpose(1, 2)


def dynamic_shift(
    x: Tensor,
    weight: Tensor,
    token_weights: Tensor,
    reach: Reach = None,
    previous: Previous = None,
) -> Tensor:
    """Compute y_t = Σ_s (weight[s] + token_weights[s]_t)·x_{t-s}: `shift` with token_weights [window, B, K, T, 1]."""
    taps = weight.view(len(weight), x.shape[1], 1, -1)
    y = (taps[0] + token_weights[0]) * x
    for steps in range(1, len(taps)):
        y = y + (taps[steps] + token_weights[steps]) * earlier(x, steps, reach, previous)
    return y.to(x.dtype)


def read_tail(tail: Tail | None, name: str, x: Tensor, length: int, reach: Reach = None) -> Previous:
    """The `length` raw tokens before x in a cache, which stores the last ones of x under `name`; None without a cache.

    Where rows branch, all tokens that the cache has.
    """
    branches = isinstance(reach, Ancestors)
    if x.shape[2] == 1 and not branches and hasattr(tail, "shift_tail"):
        return tail.shift_tail(name, x, length)
    return None if tail is None else tail.update_tail(name, x, length, everything=branches)


def previous_token(x: Tensor, reach: Reach, tail: Tail | None, name: str) -> Tensor:
    """x_{t-1} of x [B, K, T, d], or 0 at a document's first token. tail: has the token before x under `name`."""
    return earlier(x, 1, reach, read_tail(tail, name, x, 1, reach))


def earlier(x: Tensor, steps: int, reach: Reach = None, previous: Previous = None) -> Tensor:
    """Return x_{t-steps} of x [B, K, T, d], or 0 where the document has none. reach, previous: as in `shift`."""
    if isinstance(reach, Ancestors):
        return reach.look_back(x, torch.cat(previous, dim=2) if isinstance(previous, tuple) else previous, steps)
    if isinstance(previous, tuple):
        past = previous[len(previous) - steps]
    elif previous is None:
        return shift_back(x, steps, reach)
    else:
        past = previous if x.shape[2] == 1 else torch.cat((previous, x), dim=2)
        past = past.narrow(2, previous.shape[2] - steps, x.shape[2])
    return past if reach is None else torch.where((reach >= steps)[:, None, :, None], past, 0)
