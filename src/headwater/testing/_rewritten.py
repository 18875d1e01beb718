"""Make pytest show the values in failing assertions, as in test files."""

import pytest

pytest.register_assert_rewrite("headwater.testing.contract", "headwater.testing.models")
