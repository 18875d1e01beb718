"""Extras and the modules they install, and the error for a missing module.

A module that headwater imports and Python does not find is looked up here last: whichever function a program calls, the
error has the command that installs it, as the commands' errors do. Imports by other packages are left alone.
"""

import re
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from importlib import metadata
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from headwater.util.errors import HeadwaterError
from headwater.util.layout import LIBRARY, is_ours, package_folder

# The modules that each extra of pyproject.toml installs, except dependencies of torch and transformers.
MODULES = {
    "vision": ("torchvision", "PIL", "sklearn", "matplotlib", "rendercv_fonts"),
    "train": ("lightning_fabric", "datasets", "pandas", "pyarrow", "tensorboard", "filelock"),
    "report": ("scipy", "matplotlib", "jinja2"),
    "evaluate": ("lm_eval",),
    "serve": ("uvicorn", "starlette"),
    "wandb": ("wandb",),
    "gguf": ("gguf",),
    "titan": ("torchtitan",),
    "vllm": ("vllm",),
}
# Extras that combine others.
_MADE_OF = {"compare": ("train", "report"), "evaluate": ("train", "report", "evaluate"), "titan": ("train", "titan")}
_EXTRA_OF = {module: extra for extra, modules in MODULES.items() for module in modules}


class MissingExtra(HeadwaterError, ModuleNotFoundError):
    """A package of an extra is not installed. name: the package, or what needs several."""

    def __init__(self, name: str, extra: str) -> None:
        super().__init__(f"This needs {name}, which is not installed; install it with `{install_command(extra)}`.")
        self.name, self.extra = name, extra

    def __reduce__(self) -> tuple[type, tuple[str | None, str]]:
        return type(self), (self.name, self.extra)


def install_command(extra: str) -> str:
    """Return the command that installs an extra: from the clone that this code is in, or else its packages by name."""
    clone = package_folder(__name__).parents[1]
    if (clone / "pyproject.toml").is_file():
        where = "." if clone == Path.cwd() else str(clone)
        return f"pip install -e {shlex.quote(f'{where}[{extra}]')}"
    packages = list(dict.fromkeys(_list_packages(extra)))
    missing = [package for package in packages if not _is_installed(package)]
    return f"pip install {shlex.join(missing or packages)}"


def _list_packages(extra: str) -> Iterator[str]:
    """Yield the packages of an extra as the installed metadata name them, without versions except pinned ones."""
    try:
        requirements = [Requirement(text) for text in metadata.requires(LIBRARY) or ()]
    except metadata.PackageNotFoundError:  # the code was copied without its metadata
        yield from (module.replace("_", "-") for module in MODULES.get(extra, ()))
        return
    for requirement in requirements:
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.name == LIBRARY:
            for inner in sorted(requirement.extras):
                yield from _list_packages(inner)
            continue
        requirement.marker = None
        if not str(requirement.specifier).startswith("=="):
            requirement.specifier = SpecifierSet()
        yield str(requirement)


def _is_installed(package: str) -> bool:
    try:
        metadata.version(Requirement(package).name)
    except metadata.PackageNotFoundError:
        return False
    return True


class _LastFinder:
    """Import finder that finds nothing: when it is called, no other finder has found the module."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name in _EXTRA_OF and is_ours(_importing_module()):
            raise MissingExtra(name.replace("_", "-"), _EXTRA_OF[name])


class _TorchvisionFinder:
    """Import finder that finds nothing, but makes torchvision for GPUs importable with PyTorch for CPUs.

    torchvision's compiled operators cannot be loaded then, and its import ends in "operator torchvision::nms does not
    exist". The package index has only that torchvision for Linux, and transforms need none of the operators.
    """

    library: object = None

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name != "torchvision" or self.library is not None:
            return
        import torch

        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None or torch.version.cuda or torch.version.hip:
            return
        version = Path(spec.origin).with_name("version.py")
        if version.is_file() and re.search(r"__version__ = '[^']*\+(cu|rocm)", version.read_text()):
            library = torch.library.Library(name, "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.library = library  # keep the library: freeing it removes its operators


def _importing_module() -> str:
    """The module that is importing something."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in (__name__, "importlib._bootstrap"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def check_extra(extra: str, spared: Collection[str] = ()) -> None:
    """Raise `MissingExtra` where a package of an extra is missing, before there is work to lose.

    spared: modules that this work does not need.
    """
    for name in _MADE_OF.get(extra, (extra,)):
        for module in MODULES[name]:
            if module not in spared and find_spec(module) is None:
                raise MissingExtra(module.replace("_", "-"), extra)


def look_after_imports() -> None:
    """Name from now on the extra that installs a missing module that headwater imports."""
    sys.meta_path.insert(0, _TorchvisionFinder())
    sys.meta_path.append(_LastFinder())
