"""Change modules right after they are loaded, whatever loads them. Standard library only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Change = Callable[[ModuleType], None]


class WhenLoaded(MetaPathFinder):
    """Calls a function with each of the named modules once it is loaded; at once for those that are."""

    def __init__(self, changes: Mapping[str, Change]) -> None:
        self._changes = changes
        sys.meta_path.insert(0, self)
        for name, change in changes.items():
            if name in sys.modules:
                change(sys.modules[name])

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self._changes:
            return None
        return changed_after_loading(found_elsewhere(self, name, path), self._changes[name])


class Changing(Loader):
    """Loads a module as its own loader does, and then changes it."""

    def __init__(self, loader: Any, change: Change) -> None:
        self._loader, self._change = loader, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader  # as if we had never been there
        self._loader.exec_module(module)
        self._change(module)


def changed_after_loading(spec: ModuleSpec | None, change: Change) -> ModuleSpec | None:
    """The spec, with `change` called on its module once that is loaded."""
    if spec is not None and spec.loader is not None:
        spec.loader = Changing(spec.loader, change)
    return spec


def found_elsewhere(finder: MetaPathFinder, name: str, path: Any = None) -> ModuleSpec | None:
    """What the other finders find."""
    for other in sys.meta_path:
        found = getattr(other, "find_spec", None)
        if other is not finder and found is not None and (spec := found(name, path, None)) is not None:
            result: ModuleSpec = spec
            return result
    return None
