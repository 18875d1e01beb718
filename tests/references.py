"""The naive reference of any model in the tests, image models included."""

import inspect
import math
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from headwater.testing import Case, Reference, tokens
from headwater.testing.contract_suite import T
from headwater.testing.naive import shift


class ImageReference(Reference):
    """`HeadwaterForImageClassification`, on one image at a time.

    A slot is the class token, a register or a patch; `places` holds the row and column of each patch.
    """

    def __call__(self, image: Tensor) -> Tensor:  # type: ignore[override]
        """Logits [classes] of one image [C, H, W]."""
        c = self.config
        high, wide = c.patch_shape
        grid = image.shape[1] // high, image.shape[2] // wide
        self.positions: list[Any] = [(r, col) for r in range(grid[0]) for col in range(grid[1])]
        patches = [image[:, r * high : (r + 1) * high, col * wide : (col + 1) * wide] for r, col in self.positions]
        x = self.linear("model.embed_patches", torch.stack([patch.flatten() for patch in patches]))
        for name in ("registers", "class_token"):
            tokens = self.weights.get(f"model.{name}.weight", x[:0])
            x, self.positions = torch.cat((tokens, x)), [None] * len(tokens) + self.positions
        self.position = torch.arange(len(x))
        x = self.norm("model.norm", self.run_blocks(x + self.added(grid)))
        of_patches = [place is not None for place in self.positions]
        return self.linear("classifier", (x[:1] if c.pooling == "token" else x[of_patches].mean(0, keepdim=True)))[0]

    def added(self, grid: tuple[int, int]) -> Any:
        """What is added to each slot for its position."""
        c, width = self.config, self.config.hidden_size
        if c.position == "learned":
            table = self.weights["model.embed_positions.weight"]
            trained = c.image_shape[0] // c.patch_shape[0], c.image_shape[1] // c.patch_shape[1]
            patches = table[len(table) - trained[0] * trained[1] :].T.unflatten(1, trained)
            if grid != trained:
                patches = interpolate(patches[None], size=grid, mode="bicubic", align_corners=False)[0]
            rows = [table[t] if place is None else patches[:, *place] for t, place in enumerate(self.positions)]
            return torch.stack(rows)
        if c.position == "sincos":

            def waves(coordinate: int) -> list[float]:
                angles = [coordinate / 10000 ** (4 * i / width) for i in range(width // 4)]
                return [math.sin(a) for a in angles] + [math.cos(a) for a in angles]

            rows = [[0.0] * width if place is None else waves(place[1]) + waves(place[0]) for place in self.positions]
            return torch.tensor(rows, dtype=torch.float64)
        return 0.0

    def find_visible(self) -> Tensor:
        return torch.ones(len(self.positions), len(self.positions), dtype=torch.bool)

    def list_previous(self) -> list[int | None]:
        """None for the tokens before the patches, the first patch, and if asked each row's first."""
        by_row = self.config.stop_at_rows
        starts = [at is None or at == (0, 0) or (by_row and at[1] == 0) for at in self.positions]
        return [None if start else t - 1 for t, start in enumerate(starts)]

    def compute_angles(self) -> Tensor:
        """Half of the pairs of channels turn by the patch's row, the others by its column; tokens do not turn."""
        rope = self.config.rope_parameters
        turned = int(self.config.head_dim * rope.get("partial_rotary_factor", 1.0))
        pairs = [divmod(i, turned // 4) for i in range(turned // 2)]
        rates = [(axis, rope["rope_theta"] ** (-4 * rate / turned)) for axis, rate in pairs]
        places = [place or (0, 0) for place in self.positions]
        return torch.tensor([[place[axis] * rate for axis, rate in rates] for place in places], dtype=torch.float64)


def run_check(check: Callable[..., None], case: Case, **more: Any) -> None:
    """Run a test of a contract suite on a case, with the fixtures that it takes."""
    fixtures = {"case": case, "model": case.model, "ids": tokens(2, T)} | more
    check(**{name: fixtures[name] for name in inspect.signature(check).parameters})


def reference(model: Any, differentiable: bool = False) -> Reference:
    """The reference with `model`'s weights; `differentiable` gives the model's own parameters to autograd."""
    kind = Reference if model.config.is_causal else ImageReference
    return kind(model.config, dict(model.state_dict(keep_vars=differentiable)))


def shift_naively(x: Tensor, weight: Tensor, starts: AbstractSet[tuple[int, int]] = frozenset()) -> Tensor:
    """y_t = Σ_s w_s·x_{t-s}. x: [B, K, T, d], weight: [window, K]; `starts`: (row, slot) of each document's start."""
    y = torch.zeros_like(x)
    for b, heads in enumerate(x):
        for h, head in enumerate(heads):
            previous = [None if t == 0 or (b, t) in starts else t - 1 for t in range(len(head))]
            y[b, h] = shift(head, weight[:, h], previous)
    return y
