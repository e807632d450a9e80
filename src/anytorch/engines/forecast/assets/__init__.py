"""The tiny checkpoint, which lies with the model's code so that `Kronos.from_pretrained("tiny")` finds it, too."""

from __future__ import annotations

from anytorch.models.kronos.tiny import MAX_CONTEXT, TINY, tiny_folder

__all__ = ["MAX_CONTEXT", "TINY", "tiny_folder"]
