"""Cost of training and running a config on given hardware, from `counts`. Nothing is built."""

from headwater.cost.estimate import ModelEstimate, estimate_model

__all__ = ["ModelEstimate", "estimate_model"]
