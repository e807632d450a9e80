"""Text generation with a Hugging Face causal language model: `TextGenerator`. Importing the package imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytorch.lazy import lazy_names

if TYPE_CHECKING:
    from anytorch.text.generate.generator import TextGenerator as TextGenerator
    from anytorch.text.generate.pool import TextPool as TextPool
    from anytorch.text.generate.stream import Completion as Completion
    from anytorch.text.generate.stream import Stream as Stream

__getattr__, __dir__, __all__ = lazy_names(
    __name__, {"generator": "TextGenerator", "pool": "TextPool", "stream": "Completion Stream"}
)
