"""What a config costs to train and to run on given hardware, from `counts`. Nothing is built."""

from headwater.cost.estimate import COLORS, ImagePrice, Price, figure, price, si, table
from headwater.cost.schedule import price_schedule, schedule_table

__all__ = [
    "COLORS",
    "ImagePrice",
    "Price",
    "figure",
    "price",
    "price_schedule",
    "schedule_table",
    "si",
    "table",
]
