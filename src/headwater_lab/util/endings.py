"""Exceptions that end runs early."""

from headwater.util.errors import HeadwaterError, render_briefly


class Diverged(HeadwaterError):
    """The loss or the weights of a run stopped being finite. In a comparison that is a result, not a failure."""


class Interrupted(Exception):
    """Stopped on request, with everything saved. The message says how to resume."""

    _render_traceback_ = render_briefly
