"""The mechanisms: one file each, with the paper, the equation and the departures on top."""

from headwater.mechanisms.base import KV, Local, Mechanism
from headwater.mechanisms.kv_shift import KVShift
from headwater.mechanisms.value_residual import ValueResidual

__all__ = ["KV", "KVShift", "Local", "Mechanism", "ValueResidual"]
