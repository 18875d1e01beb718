"""Reading a few of many rows: which have the largest scores, and their weighted sum. Product keys, arXiv 1907.05242."""

import torch
from torch import Tensor, nn

from headwater.kernels import can_fuse
from headwater.mechanisms.fp32 import KeepsPrecision


class ProductKeys(KeepsPrecision):
    """The k pairs (i, j) with the largest sums a_i + b_j of s numbers each. arXiv 1907.05242, section 3.1.

    They are among the k largest a and b. The i-th largest with the j-th is the least of i·j pairs, so that those with
    i·j ≤ k will do: about k·ln k of k². side: s. top_k: k. Buffer: `ranks` [2, about k·ln k], these i and j, from 0.

        >>> import torch
        >>> from headwater.mechanisms.product_keys import ProductKeys
        >>> pairs, sums = ProductKeys(side=3, top_k=2)(torch.tensor([[0.0, 5.0, 2.0], [1.0, 0.0, 2.0]]))
        >>> pairs, sums
        (tensor([5, 3]), tensor([7., 6.]))
    """

    ranks: Tensor

    def __init__(self, side: int, top_k: int) -> None:
        super().__init__()
        self.side, self.top_k = side, top_k
        self.register_buffer("ranks", self.constants()["ranks"], persistent=False)

    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores [..., 2, s] -> i·s + j and a_i + b_j, [..., k], the largest first."""
        best = find_largest(scores.detach(), min(self.top_k, self.side))
        # Index by rank within each half, then by rank of the pair.
        ranked = best.gather(-1, self.ranks.expand(*best.shape[:-1], -1))
        largest = find_largest(scores.detach().gather(-1, ranked).sum(-2), self.top_k)
        entries = ranked.gather(-1, largest.unsqueeze(-2).expand(*largest.shape[:-1], 2, -1))
        return entries[..., 0, :] * self.side + entries[..., 1, :], take_entries(scores, entries).sum(-2)

    def constants(self) -> dict[str, Tensor]:
        most = min(self.top_k, self.side)
        pairs = [(i, j) for i in range(most) for j in range(most) if (i + 1) * (j + 1) <= self.top_k]
        return {"ranks": torch.tensor(pairs).T.contiguous()}


def find_largest(a: Tensor, k: int) -> Tensor:
    """Find the k largest numbers of each row, in order, of equal ones the first, as indices: [..., n] -> [..., k]."""
    if a.dtype != torch.float32:
        return a.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    # topk leaves the order of equal numbers undefined, and sorting is slower. So make all keys distinct: the high half
    # is the bits, whose order is that of the numbers once negative ones are reversed, and the low half the index.
    bits = a.view(torch.int32)
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits).long()
    position = torch.arange(a.shape[-1] - 1, -1, -1, device=a.device)
    return ordered.mul_(2**32).add_(position).topk(k).indices


def take_entries(a: Tensor, index: Tensor) -> Tensor:
    """Compute `a.gather(-1, index)`, storing the indices and not `a` for the backward pass."""
    rows = torch.arange(index.shape[:-1].numel(), device=index.device).view(*index.shape[:-1], 1)
    return a.flatten().index_select(0, (rows * a.shape[-1] + index).flatten()).view(index.shape)


def weighted_rows(table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Σ_i weights_i·table[rows_i]: table [n, d], rows and weights [..., k] -> [..., d]."""
    if can_fuse(table, weights, needs_grad=False):  # it stores the weights, but not the rows
        flat = rows.flatten(0, -2)
        out = nn.functional.embedding_bag(flat, table, per_sample_weights=weights.reshape(flat.shape), mode="sum")
        return out.view(*rows.shape[:-1], table.shape[1])
    return (weights.unsqueeze(-1) * table[rows]).sum(-2)
