"""What a config costs to train and to run on given hardware, from `counts`. Nothing is built."""

from headwater.cost.estimate import COLORS, Price, figure, price, si, table

__all__ = ["COLORS", "Price", "figure", "price", "si", "table"]
