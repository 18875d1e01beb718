"""Look inside a trained model: scalars, attention, reads from other layers."""

from headwater_lab.inspection.inspection import Inspection, check_same_kind, inspect_model, to_json
from headwater_lab.inspection.inspection_pictures import draw_pictures
from headwater_lab.inspection.tables import build_tables

__all__ = ["Inspection", "build_tables", "check_same_kind", "draw_pictures", "inspect_model", "to_json"]
