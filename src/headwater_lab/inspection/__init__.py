"""Look inside a trained model: scalars, attention, reads from other layers, parameter tokens that fire."""

from headwater_lab.inspection.inspection import Inspection, check_alike, inspect_model, to_json
from headwater_lab.inspection.pictures import draw
from headwater_lab.inspection.tables import tables

__all__ = ["Inspection", "check_alike", "draw", "inspect_model", "tables", "to_json"]
