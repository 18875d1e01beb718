"""Has pytest show the values in assertions that fail, as it does in test files."""

import pytest

pytest.register_assert_rewrite("headwater.testing.contract", "headwater.testing.models")
