"""Text generation with a Hugging Face causal language model: `TextGenerator`. Importing the package imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anytorch.engines.generate.generator import TextGenerator as TextGenerator
    from anytorch.engines.generate.stream import Completion as Completion
    from anytorch.engines.generate.stream import Stream as Stream

PUBLIC = {
    "Completion": "anytorch.engines.generate.stream",
    "Stream": "anytorch.engines.generate.stream",
    "TextGenerator": "anytorch.engines.generate.generator",
}
__all__ = list(PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'anytorch.engines.generate' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(PUBLIC[name]), name)
    globals()[name] = value
    return value
