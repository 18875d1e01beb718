"""Cost of training and running a config on given hardware, from `counts`. Nothing is built."""

from headwater.cost.estimate import Price, price

__all__ = ["Price", "price"]
