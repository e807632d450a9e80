"""Public names that are loaded when they are first used: the one way for every package that imports nothing by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType


def lazy_names(
    package: str, where: Mapping[str, str], moved: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` for a package, from the names that each module below it gives.

        __getattr__, __dir__, __all__ = lazy_names(__name__, {"files": "FileReport encode_file"})

    A module that gives its own name is a public module. `moved` lists, by their new module, names that anytorch-compat
    has now: asking for one says so.
    """
    home = {name: f"{package}.{module}" for module, names in where.items() for name in names.split()}
    gone = {name: module for module, names in (moved or {}).items() for name in names.split()}

    def load(name: str) -> Any:
        if name in gone:
            told = f"{package}.{name} has moved to anytorch-compat: from {gone[name]} import {name}"
            # `from package import name` would make "cannot import name" of an AttributeError; importlib asks first.
            caller: FrameType | None = sys._getframe(1)
            if caller is not None and caller.f_globals.get("__name__") == package:
                caller = caller.f_back  # the package's own __getattr__, where it has one
            if caller is not None and "importlib" in caller.f_code.co_filename:
                raise ImportError(told, name=package)
            raise AttributeError(told)
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from importlib import import_module

        module = import_module(home[name])
        value = module if home[name] == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    public = sorted(home)
    return load, lambda: public, public
