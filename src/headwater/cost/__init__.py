"""What a config costs to train and to run on given hardware, from `counts`. Nothing is built."""

from headwater.cost.estimate import Price, price

__all__ = ["Price", "price"]
