"""y = Σ_i w_i·x_i with learned scalars w: the sum in value residuals and DenseFormer."""

import torch
from torch import Tensor

from headwater.kernels import applies
from headwater.kernels.weighted_sum import fused_weighted_sum


def weighted_sum(weights: Tensor, *tensors: Tensor) -> Tensor:
    """weights: [n]; tensors: n of one shape and dtype -> their weighted sum, in that dtype."""
    # In half precision the plain form is faster than one that widens its operands.
    if tensors[0].dtype == weights.dtype and applies(weights, *tensors):
        return fused_weighted_sum(weights, *tensors)
    # 0-d factors do not raise the dtype of what they multiply.
    (weight, x), *rest = zip(weights.unbind(), tensors, strict=True)
    y = weight * x
    for weight, x in rest:
        # The compiler turns addcmul into a kernel for the weight and one for the sum.
        y = y + weight * x if torch.compiler.is_compiling() else torch.addcmul(y, weight, x)
    return y
