"""Holds ours against Llama, test by test: what Llama passes has to pass, and every exception has to be one.

A plugin of pytest's, which `make test-transformers` loads, and no conftest.py: that name is the other tests'.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
import sources

LLAMA = "TestLlama"
RANKS = ("failed", "exception", "passed", "skipped")

# class -> test -> how it went; in the process that reports, whether or not others run the tests
outcomes: dict[str, dict[str, str]] = defaultdict(dict)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        sources.folder()  # fetched by one process, before others start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.cls.__name__ == LLAMA:
            continue
        for (mechanism, name), reason in item.module.EXCEPTIONS.items():
            is_named = item.name.startswith(name) if name.endswith("_") else item.name == name
            if is_named and (mechanism is None or mechanism in item.cls.options["mechanisms"]):
                # Where subtests fail, the test around them passes.
                strict = item.name not in item.module.OF_SUBTESTS
                item.add_marker(pytest.mark.xfail(strict=strict, reason=reason))


def pytest_runtest_logreport(report: Any) -> None:
    if report.when != "call" and report.passed:
        return
    _, kind, name = report.nodeid.split("::")
    # A subtest of an exception may fail, and the test itself then counts as one.
    expected = "xfail" in report.keywords and (report.skipped or hasattr(report, "context"))
    outcome = "exception" if expected else report.outcome
    # Subtests report themselves too: one that fails decides, one that is skipped does not.
    outcomes[kind][name] = min(outcomes[kind].get(name, outcome), outcome, key=RANKS.index)


def _missed(kind: str) -> list[str]:
    """The tests that Llama passes and `kind` does not, exceptions aside."""
    llama = {name for name, outcome in outcomes[LLAMA].items() if outcome == "passed"}
    return sorted(name for name in llama if outcomes[kind].get(name, "missing") not in ("passed", "exception"))


def _compared(config: pytest.Config) -> bool:
    """Whether the whole suite ran: with `-k` and the like there is nothing to compare."""
    return not (config.option.keyword or config.option.markexpr or config.option.collectonly or len(outcomes) < 2)


def pytest_sessionfinish(session: pytest.Session) -> None:
    ours = [kind for kind in outcomes if kind != LLAMA]
    if not hasattr(session.config, "workerinput") and _compared(session.config):
        # Tests that Llama fails too do not count.
        session.exitstatus = pytest.ExitCode.TESTS_FAILED if any(map(_missed, ours)) else pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.section("transformers' own tests")
    for kind, results in outcomes.items():
        counts = Counter(results.values())
        told = ", ".join(f"{counts[name]} {name}" for name in RANKS)
        terminalreporter.line(f"{kind}: {told}")
        for name in _missed(kind) if _compared(terminalreporter.config) else ():
            terminalreporter.line(f"    Llama passes {name}: {results.get(name, 'missing')}")
