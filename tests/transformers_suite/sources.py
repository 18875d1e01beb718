"""transformers' own test classes, of the version that is installed.

They are no part of its wheel. The source distribution has the common ones (`ModelTesterMixin`, `ConfigTester`,
`TrainingTesterMixin`); the tests of generation, export and pipelines are in its repository only, and run too where
TRANSFORMERS_SOURCE names a checkout of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import transformers

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwater" / "transformers-tests"


def folder() -> Path:
    """The folder `tests` of transformers' sources; fetched from the package index the first time."""
    if options := os.environ.get("TRANSFORMERS_SOURCE"):
        return Path(options) / "tests"
    kept = CACHE / transformers.__version__
    if not kept.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as fresh:
            wanted = f"transformers=={transformers.__version__}"
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
            subprocess.run([*pip, "--dest", fresh, wanted], check=True)
            (archive,) = Path(fresh).glob("*.tar.gz")
            with tarfile.open(archive) as content:
                content.extractall(fresh, filter="data")
            unpacked = Path(fresh) / archive.name.removesuffix(".tar.gz")
            (unpacked / "tests" / "__init__.py").touch()  # they import what it is in the repository: a package
            unpacked.rename(kept)
    return kept / "tests"


def _stand_in(name: str, **content: Any) -> None:
    """A module in the place of one that the sources at hand lack, if they do."""
    package, _, _ = name.rpartition(".")
    if package not in sys.modules and find_spec(package) is None:
        _stand_in(package, __path__=[])
    if find_spec(name) is None:
        sys.modules[name] = module = ModuleType(name)
        vars(module).update(content)


def mixins() -> dict[str, type]:
    """The test classes by name; those that the sources at hand lack are left out."""
    sys.modules["tests"] = tests = ModuleType("tests")  # where they look for one another
    tests.__path__ = [str(folder())]
    _stand_in("tests.exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {}))
    _stand_in("tests.generation.test_utils", GenerationTesterMixin=type("GenerationTesterMixin", (), {}))
    _stand_in("tests.utils.test_configuration_utils", config_common_kwargs={})
    found = [
        ("tests.test_modeling_common", "ModelTesterMixin"),
        ("tests.generation.test_utils", "GenerationTesterMixin"),
        ("tests.test_training_mixin", "TrainingTesterMixin"),
        ("tests.test_configuration_common", "ConfigTester"),
    ]
    if find_spec("tests.pipelines") is not None:
        found.append(("tests.test_pipeline_mixin", "PipelineTesterMixin"))
    return {name: getattr(import_module(module), name) for module, name in found}
