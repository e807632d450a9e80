"""Counters for programs that share a tile: each takes a number when it is done, and the last one joins the parts.

A launch finds its counters at 0 and leaves them at 0. Nobody else may use them meanwhile:

    launches of one stream      follow one another, and share theirs
    a recorded launch           may be replayed on any stream, beside anything: it has counters of its own for good
    recorded to be timed        the same, from a block that goes when the recording goes (`borrowed`)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from anytorch.devices.locate import locate

BLOCK = 1 << 16  # counters made at once for recordings
RECORDED = -1  # stands in for a stream
_blocks: dict[tuple[torch.device, int], tuple[torch.Tensor, int]] = {}  # (counters, how many of them are given away)
_kept: list[torch.Tensor] = []  # blocks that are given away: recordings hold their addresses alone
_lock = threading.Lock()
_local = threading.local()


def take(device: torch.device, count: int) -> torch.Tensor:
    """At least `count` counters for a launch on the current stream."""
    if not _records(device):  # XPU queues are in order, and Triton's interpreter runs one program after another
        return _shared(device, 0, count)
    if not torch.cuda.is_current_stream_capturing():
        _ready_for_recordings(device)
        return _shared(device, torch.cuda.current_stream(device).cuda_stream, count)
    lent: tuple[torch.Tensor, int] | None = getattr(_local, "lent", None)
    if lent is not None:
        borrowed_block, given = lent
        if borrowed_block.numel() >= given + count:
            _local.lent = (borrowed_block, given + count)
            return borrowed_block[given : given + count]
        return torch.zeros(count, dtype=torch.int32, device=device)
    with _lock:
        block, used = _blocks.get((device, RECORDED), (None, 0))
        if block is None or block.numel() < used + count:
            return torch.zeros(count, dtype=torch.int32, device=device)  # set to 0 anew in every replay
        _blocks[device, RECORDED] = (block, used + count)
        return block[used : used + count]


@contextmanager
def borrowed(device: torch.device) -> Iterator[torch.Tensor]:
    """Counters for what this thread records meanwhile; whoever keeps the recording keeps them."""
    block = torch.zeros(BLOCK, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()
    _local.lent = (block, 0)
    try:
        yield block
    finally:
        _local.lent = None


@lru_cache(maxsize=64)
def _records(device: torch.device) -> bool:
    backend, index = locate(device)
    return backend.caps(index).graphs and hasattr(torch.get_device_module(device), "CUDAGraph")


def _shared(device: torch.device, stream: int, count: int) -> torch.Tensor:
    with _lock:
        block, _ = _blocks.get((device, stream), (None, 0))
        if block is None or block.numel() < count:
            block = torch.zeros(max(count, 1024), dtype=torch.int32, device=device)
            _blocks[device, stream] = (block, 0)
        return block


def _ready_for_recordings(device: torch.device) -> None:
    """Counters for recordings are made outside of them: there, setting them to 0 would be a launch of its own."""
    with _lock:
        block, used = _blocks.get((device, RECORDED), (None, 0))
        if block is None or block.numel() - used < BLOCK // 2:
            made = torch.zeros(BLOCK, dtype=torch.int32, device=device)
            torch.cuda.current_stream(device).synchronize()
            _kept.append(made)
            _blocks[device, RECORDED] = (made, 0)
