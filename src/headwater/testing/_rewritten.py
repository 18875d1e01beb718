"""Make pytest show the values in failing assertions, as in test files."""

import pytest

pytest.register_assert_rewrite(f"{__package__}.contract_suite", f"{__package__}.small_models")
