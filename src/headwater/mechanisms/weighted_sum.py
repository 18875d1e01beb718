"""y = Σ_i w_i·x_i with learned scalars w: the sum in value residuals and DenseFormer."""

import torch
from torch import Tensor


def weighted_sum(weights: Tensor, *tensors: Tensor) -> Tensor:
    """Sum n tensors of one shape and dtype, weighted by weights [n], in that dtype."""
    if torch.compiler.is_compiling():
        # A weight's gradient is summed by row first, in the kernel that writes the gradients of the tensors.
        by_row = weights.view(-1, *[1] * tensors[0].ndim).expand(-1, *tensors[0].shape[:-1], 1)
        first, *others = (weight * x for weight, x in zip(by_row.unbind(), tensors, strict=True))
        return sum(others, start=first).to(tensors[0].dtype)
    # 0-d factors do not promote the dtype of the other factor.
    (weight, x), *terms = zip(weights.unbind(), tensors, strict=True)
    y = weight * x
    for weight, x in terms:
        y = torch.addcmul(y, weight, x)
    return y
