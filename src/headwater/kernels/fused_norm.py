"""RMSNorm on a CPU that stores x and one number per row, instead of two copies of x in fp32."""

import torch
from torch import Tensor, nn

from headwater.kernels import can_fuse
from headwater.kernels.scratch import get_scratch


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / rms(x) · weight over the last dimension of x [..., D]; weight [D] or None. Returned in the dtype of x.

    Computed in the wider dtype of the two, at least fp32. On devices other than a CPU, PyTorch's own kernel stores just
    as little if the two are of one dtype.
    """
    fits = weight is None or weight.dtype in (x.dtype, torch.float32)
    if can_fuse(x, weight, cpu_only=True) and fits and x.numel():
        return _RMSNorm.apply(x, weight, eps)
    wide = x if weight is None else x.to(torch.promote_types(x.dtype, weight.dtype))
    return nn.functional.rms_norm(wide, x.shape[-1:], weight, eps).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm in the same steps that PyTorch takes on a CPU."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        wide, product = _widen_input(x, dtype)
        inverse = torch.pow(wide, 2, out=product).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        if weight is None:
            return torch.mul(wide, inverse).to(x.dtype)
        return torch.mul(torch.mul(wide, inverse, out=product), weight).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        wide, product = _widen_input(x, inverse.dtype)
        gx = grads[0] * inverse
        torch.mul(gx, wide, out=product)
        gw = None
        if weight is not None:
            gw = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
            product *= weight
            gx *= weight
        # Remove the component along x.
        along = product.sum(-1, keepdim=True).mul_(inverse.square()).div_(-x.shape[-1])
        return gx.addcmul_(wide, along).to(x.dtype), gw, None


def _widen_input(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in `dtype`, and working memory of the same shape."""
    if x.dtype == dtype:
        return x, get_scratch(1, x.shape, dtype, x)[0]
    wide, product = get_scratch(2, x.shape, dtype, x)
    return wide.copy_(x), product
