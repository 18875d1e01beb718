"""y = Σ_i w_i·x_i with learned scalars w: the sum in value residuals and DenseFormer."""

import torch
from torch import Tensor


def weighted_sum(weights: Tensor, *tensors: Tensor) -> Tensor:
    """Sum n tensors of one shape and dtype, weighted by weights [n], in that dtype."""
    # 0-d factors do not promote the dtype of the other factor.
    (weight, x), *terms = zip(weights.unbind(), tensors, strict=True)
    y = weight * x
    for weight, x in terms:
        # The compiler turns addcmul into a kernel for the weight and one for the sum.
        y = y + weight * x if torch.compiler.is_compiling() else torch.addcmul(y, weight, x)
    return y
