"""The linear layer of all models."""

from torch import Tensor, nn
from torch.nn.functional import linear

from headwater.kernels.choose import remembered
from headwater.kernels.linear import fastest


class Linear(nn.Linear):
    """x [..., d_in] -> x·weightᵀ + bias [..., d_out]; `nn.Linear` in all but the kernel that `generate` runs."""

    def forward(self, x: Tensor) -> Tensor:
        memory = remembered()
        if memory is None or type(x) is not Tensor:
            return linear(x, self.weight, self.bias)
        key = self, x.shape, x.dtype
        if key not in memory:
            memory[key] = fastest(self, x)
        form = memory[key]
        return linear(x, self.weight, self.bias) if form is None else form(self, x)
