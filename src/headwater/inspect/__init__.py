"""Looking into a trained model: its scalars, where its heads look, what it reads of other layers, which pairs fire."""

from headwater.inspect.inspection import Inspection, inspect_model, to_json, write_json
from headwater.inspect.pictures import draw
from headwater.inspect.tables import tables

__all__ = ["Inspection", "draw", "inspect_model", "tables", "to_json", "write_json"]
