"""Whether decoding with a cache says what the model without one says: every way of decoding, of any causal model.

`watch` calls a model and watches its layers, `ways` are the ways of decoding, `verdicts` runs them in each precision;
`own` is for headwater's models, `small` and `sweep` for every model type of transformers.
"""

from headwater.verify.own import Served, combinations, resident_memory, serve_requests, tiny, verify, ways_of
from headwater.verify.small import TYPES, open_type, small_config, small_model
from headwater.verify.sources import open_model
from headwater.verify.sweep import as_data, as_markdown, summary, sweep, versions
from headwater.verify.verdicts import Verified
from headwater.verify.ways import WAYS, Parting, Way

__all__ = [
    "TYPES",
    "WAYS",
    "Parting",
    "Served",
    "Verified",
    "Way",
    "as_data",
    "as_markdown",
    "combinations",
    "open_model",
    "open_type",
    "resident_memory",
    "serve_requests",
    "small_config",
    "small_model",
    "summary",
    "sweep",
    "tiny",
    "verify",
    "versions",
    "ways_of",
]
