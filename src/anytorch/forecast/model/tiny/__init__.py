"""The tiny checkpoint that comes with anytorch: half a million weights, trained on synthetic candles only.

It makes `anytorch forecast --sample` work at once and offline, and is a start for experiments. It has never seen a real
price. `examples/train_tiny.py` makes it again.
"""

from __future__ import annotations

from pathlib import Path

TINY = "tiny"  # the name to ask for it by
MAX_CONTEXT = 128  # rows: the windows it was trained on


def tiny_folder(kind: str) -> Path:
    """The folder of the "model" or the "tokenizer"."""
    return Path(__file__).parent / kind
