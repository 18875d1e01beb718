"""Verification that decoding with a cache equals the model without one: every way of decoding, of any causal model.

`subject` calls a model and watches its layers, `ways` are the ways of decoding, `verdicts` runs them in each precision,
`windows` shortens sliding windows; `own` is for headwater's models.
"""

from headwater.verification.own import verify
from headwater.verification.verdicts import Verified
from headwater.verification.windows import shorten_windows

__all__ = ["Verified", "shorten_windows", "verify"]
