"""Imports while a stand-in holds: what torch has, too, is given; what only CUDA has is told; some modules are changed
when they are loaded. Standard library only: `anytorch run` installs this before torch is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from anytorch.imports import changed_after_loading, found_elsewhere

GIVEN = ("flash_attn", "xformers")
PROBES = ("importlib.util", "pkgutil")  # code that only asks whether there is such a package gets the plain answer


class Finder(MetaPathFinder):
    """Stands first among Python's finders of modules while a stand-in holds."""

    def __init__(
        self,
        given: Collection[str],
        fill: Callable[[ModuleType], None],
        watched: Collection[str],
        refused: Callable[[str], ModuleNotFoundError],
        later: Mapping[str, Callable[[ModuleType], None]],
    ) -> None:
        """`given` are modules that `fill` makes, `watched` packages whose absence `refused` explains, and `later` what is
        done to a module when it has been loaded."""
        self._given, self._fill, self._watched, self._refused, self._later = given, fill, watched, refused, later

    def leave(self) -> None:
        """Take itself off the list, and the given modules out of Python's."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name, module in list(sys.modules.items()):
            if isinstance(getattr(getattr(module, "__spec__", None), "loader", None), Giving):
                del sys.modules[name]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in self._given:
            inner = any(other.startswith(f"{name}.") for other in self._given)
            return spec_from_loader(name, Giving(self._fill), is_package=inner)
        if name in self._later:
            return changed_after_loading(found_elsewhere(self, name, path), self._later[name])
        top = name.partition(".")[0]
        if top in self._given:  # a module of such a package that is none of ours
            if _imported():
                raise self._refused(name)
            return None
        if name == top and name in self._watched and _imported() and found_elsewhere(self, name) is None:
            raise self._refused(name)
        return None


class Giving(Loader):
    """Loads a module that `fill` makes."""

    def __init__(self, fill: Callable[[ModuleType], None]) -> None:
        self._fill = fill

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self._fill(module)


def _imported() -> bool:
    """True for `import x`, False for `importlib.util.find_spec("x")`."""
    frame = sys._getframe(2)
    while frame is not None and (
        frame.f_code.co_filename.startswith("<frozen importlib._boot") or frame.f_globals.get("__name__") == __name__
    ):
        if frame.f_back is None:
            return True
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") not in PROBES


class Waiting(MetaPathFinder):
    """Waits for `import torch`, and calls `ready` when torch is loaded."""

    def __init__(self, ready: Callable[[], None]) -> None:
        self._ready = ready

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            if name.partition(".")[0] in GIVEN and "torch" not in sys.modules:
                __import__("torch")  # which begins the stand-in; then its own finder answers
                return next(
                    (f.find_spec(name, path, target) for f in sys.meta_path if isinstance(f, Finder)),
                    None,
                )
            return None

        def ready(module: ModuleType) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._ready()

        return changed_after_loading(found_elsewhere(self, name, path), ready)
