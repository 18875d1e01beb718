"""Register headwater's models and cache layers with transformers once both are imported, in any order.

If transformers' Auto classes are loaded already, the models are registered at once; otherwise an import hook does it,
once no import of either package is in progress, since the models import much of transformers.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType

from headwater.util.layout import is_ours, top_package

# What to import once a module of transformers is imported. Every Auto class imports the first, and nothing else that
# headwater's config needs does; the models register themselves. Caches are made by the second, of any config.
IMPORTED_AFTER = {
    "transformers.models.auto.configuration_auto": (
        "headwater.models.causal_lm",
        "headwater.models.image_classification",
        "headwater.models.classification",
    ),
    "transformers.cache_utils": ("headwater.models.cache",),
}


def register_models() -> None:
    """Register the models with transformers' Auto classes and the cache layers with its caches, now or later."""
    hook = _Hook()
    hook.look_for_modules()
    if hook.waiting:
        sys.meta_path.insert(0, hook)


class _Hook:
    """A `MetaPathFinder` that delegates to the others, and checks after each import whether to register."""

    def __init__(self) -> None:
        self.under_way: set[str] = set()
        self.waiting = dict(IMPORTED_AFTER)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not is_ours(name) and top_package(name) != "transformers":
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                self.under_way.add(name)
                try:
                    run(module)
                finally:
                    self.under_way.discard(name)
                self.look_for_modules()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def look_for_modules(self) -> None:
        for name in IMPORTED_AFTER:
            if name in sys.modules and name in self.waiting and not self.under_way:
                for module in self.waiting.pop(name):
                    import_module(module)
        if not self.waiting and self in sys.meta_path:
            sys.meta_path.remove(self)
