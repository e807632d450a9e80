"""The CPU encoder: our own C++ over packed tokens, without torch. See docs/concepts/cpu-encoder.md."""

from __future__ import annotations

from anytorch.text.packed.encoder import FORMATS, POOLINGS, PackedEncoder

__all__ = ["FORMATS", "POOLINGS", "PackedEncoder"]
