"""Text embeddings: the ArrowEngine, its queue, and their parts, in the order data flows.

recipe      a folder → what it says about making vectors (plain data)
tokens      texts → packed token ids     windows   any iterable, tokenized one window ahead
place       a request → a device and an encoder on it
runner      batches through the encoder; budget finds their best size, fit_batch their largest
head        pooled vectors → the answer  compare   similarities, and the nearest
engine      all of it together (building: the encoder for it; parts: a stream of windows through it)
queue       many callers, one engine: queue_line, who waits; queue_worker, who computes; sharing, who gets into a batch
outputs     vectors to .npy and .jsonl   pool, files   several devices; whole files, resumable
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anytorch.text.embed.compare import Hit as Hit
    from anytorch.text.embed.engine import ArrowEngine as ArrowEngine
    from anytorch.text.embed.files import FileReport as FileReport
    from anytorch.text.embed.files import encode_file as encode_file
    from anytorch.text.embed.queue import EngineQueue as EngineQueue
    from anytorch.text.embed.queue_line import QueueStats as QueueStats
    from anytorch.text.embed.stats import EncodeStats as EncodeStats

NAMES = {
    "ArrowEngine": "engine",
    "EncodeStats": "stats",
    "EngineQueue": "queue",
    "FileReport": "files",
    "Hit": "compare",
    "QueueStats": "queue_line",
    "encode_file": "files",
}
__all__ = ["ArrowEngine", "EncodeStats", "EngineQueue", "FileReport", "Hit", "QueueStats", "encode_file"]


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{NAMES[name]}"), name)
