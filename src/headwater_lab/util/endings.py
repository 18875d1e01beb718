"""Exceptions that end runs early."""

from headwater.util.errors import HeadwaterError


class Diverged(HeadwaterError):
    """The loss or the weights of a run stopped being finite. In a comparison that is a result, not a failure."""


class Interrupted(Exception):
    """Stopped on request, with everything saved. The message says how to resume."""
