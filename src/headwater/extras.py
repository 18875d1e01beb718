"""What is installed with which extra, and the sentence for what is missing."""

from __future__ import annotations

from headwater.errors import HeadwaterError

# Modules by the extra of pyproject.toml that brings them. What comes with torch and transformers is always there.
MODULES = {
    "train": ("lightning_fabric", "datasets", "pyarrow", "tensorboard", "filelock"),
    "report": ("scipy", "matplotlib", "plotly", "jinja2"),
    "evaluate": ("lm_eval",),
    "wandb": ("wandb",),
}


def missing(error: ModuleNotFoundError) -> HeadwaterError | None:
    """The sentence for a module that an extra brings; None for any other."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in MODULES.items():
        if module in modules:
            return HeadwaterError(
                f"This needs {module.replace('_', '-')}, which is not installed; install it with: "
                f"pip install 'headwater[{extra}]'"
            )
    return None
