"""What a config costs to train and to run on given hardware, from `counts`. Nothing is built."""

from headwater.cost.estimate import ImagePrice, Price, price, si, table
from headwater.cost.pictures import COLORS, figure
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
