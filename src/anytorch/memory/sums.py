"""Checksums of what we write ourselves: one 64-bit sum per MiB, at the speed of memory.

A sum of 64-bit words finds every flipped bit, every zeroed or stale page and every cut-off file; one per MiB also finds
parts that changed places. It is no defence against somebody who means harm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PART = 2**20
WORD = 8
MASK = 2**64 - 1


def sums_of(buffer: torch.Tensor) -> tuple[int, ...]:
    """Of a contiguous uint8 tensor on the CPU, part by part; a last, shorter part counts as filled up with zeros."""
    import torch

    whole = buffer.numel() // PART * PART
    found: list[int] = []
    if whole:
        words = buffer[:whole]
        if words.storage_offset() % WORD or words.data_ptr() % WORD:
            words = words.clone()
        found += words.view(torch.int64).view(-1, PART // WORD).sum(1).tolist()
    if whole < buffer.numel():
        tail = torch.zeros(-(-(buffer.numel() - whole) // WORD) * WORD, dtype=torch.uint8)
        tail[: buffer.numel() - whole].copy_(buffer[whole:])
        found.append(int(tail.view(torch.int64).sum()))
    return tuple(value & MASK for value in found)


def digits(sums: tuple[int, ...]) -> str:
    return "".join(f"{value:016x}" for value in sums)
