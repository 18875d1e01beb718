"""Which extra installs what, and the error for a missing module."""

from __future__ import annotations

from headwater.errors import HeadwaterError

# Modules by the extra of pyproject.toml that installs them. Dependencies of torch and transformers are always there.
MODULES = {
    "train": ("lightning_fabric", "datasets", "pyarrow", "tensorboard", "filelock"),
    "report": ("scipy", "matplotlib", "plotly", "jinja2"),
    "evaluate": ("lm_eval",),
    "wandb": ("wandb",),
}


def missing(error: ModuleNotFoundError) -> HeadwaterError | None:
    """The error for a missing module of an extra; None for any other module."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in MODULES.items():
        if module in modules:
            return HeadwaterError(
                f"This needs {module.replace('_', '-')}, which is not installed; install it with: "
                f"pip install 'headwater[{extra}]'"
            )
    return None
