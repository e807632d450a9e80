"""Text embeddings: the ArrowEngine, its queue, and their parts, in the order data flows.

recipe      a folder → what it says about making vectors (plain data)
tokens      texts → packed token ids     windows   any iterable, tokenized one window ahead
runner      batches through the encoder; Budget finds their best size, fit_batch their largest
head        pooled vectors → the answer  compare   similarities, and the nearest
engine      all of it together (encoder_builder: the encoder for it; encoder_device: where it computes)
queue       many callers, one engine (queue_line: which requests wait, and which get into a batch)
pool        several devices              files     whole files, resumable
folder      a folder, searchable         passages  its files, cut for a search
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytorch.lazy import lazy_names

if TYPE_CHECKING:
    from anytorch.text.embed.compare import Hit as Hit
    from anytorch.text.embed.engine import ArrowEngine as ArrowEngine
    from anytorch.text.embed.engine import EncodeStats as EncodeStats
    from anytorch.text.embed.files import FileReport as FileReport
    from anytorch.text.embed.files import encode_file as encode_file
    from anytorch.text.embed.folder import FolderIndex as FolderIndex
    from anytorch.text.embed.queue import EngineQueue as EngineQueue
    from anytorch.text.embed.queue_line import QueueStats as QueueStats

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "compare": "Hit",
        "engine": "ArrowEngine EncodeStats",
        "files": "FileReport encode_file",
        "folder": "FolderIndex",
        "queue": "EngineQueue",
        "queue_line": "QueueStats",
    },
)
