"""What the compatibility packages share: the one sentence for a documented name that has not arrived yet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import NoReturn


def not_yet(name: str, arrives_with: str) -> str:
    return f"{name} is documented, but not part of this version of anytorch: it arrives with {arrives_with}"


def later(module: str, names: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """A module's `__getattr__` for names that are still to come: `__getattr__ = later(__name__, {"Engine": "…"})`.

    Reading an attribute raises AttributeError, so that `hasattr` keeps its meaning. `from module import Engine` would
    swallow that and say "cannot import name" instead; the import machinery asks first, and is told with ImportError.
    """

    def missing(name: str) -> NoReturn:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        sentence = not_yet(f"{module}.{name}", names[name])
        if "importlib" in sys._getframe(1).f_code.co_filename:  # "<frozen importlib._bootstrap>"
            raise ImportError(sentence, name=module)
        raise AttributeError(sentence)

    return missing
