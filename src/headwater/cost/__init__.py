"""What a config costs to train and to run on given hardware, from `counts`. Nothing is built."""

from headwater.cost.estimate import ImagePrice, Price, price, si, table
from headwater.cost.schedule import price_schedule, schedule_table

__all__ = [
    "ImagePrice",
    "Price",
    "price",
    "price_schedule",
    "schedule_table",
    "si",
    "table",
]
