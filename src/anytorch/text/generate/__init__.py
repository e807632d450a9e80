"""Text generation with a Hugging Face causal language model: `TextGenerator`. Importing the package imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anytorch.text.generate.generator import TextGenerator as TextGenerator
    from anytorch.text.generate.stream import Completion as Completion
    from anytorch.text.generate.stream import Stream as Stream

PUBLIC = {
    "Completion": "anytorch.text.generate.stream",
    "Stream": "anytorch.text.generate.stream",
    "TextGenerator": "anytorch.text.generate.generator",
}
__all__ = list(PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'anytorch.text.generate' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(PUBLIC[name]), name)
    globals()[name] = value
    return value
