"""Random numbers: one seed for the device, and a counter-based generator that every adapter computes alike."""

from __future__ import annotations

import threading

import torch

_lock = threading.Lock()
_seed = torch.initial_seed() & (2**63 - 1)
_offset = 0
_host: torch.Generator | None = None


def seed_all(seed: int) -> None:
    global _seed, _offset, _host
    with _lock:
        _seed, _offset, _host = int(seed) & (2**64 - 1), 0, None


def initial_seed() -> int:
    return _seed


def take(numbers: int) -> tuple[int, int]:
    """(seed, first counter) for a kernel that draws `numbers` 32-bit numbers; the stream moves on."""
    global _offset
    with _lock:
        first = _offset
        _offset += -(-numbers // 4)  # a Philox block is four numbers
    return _seed, first


def host_generator() -> torch.Generator:
    """The generator of ops that still run on the CPU; it follows the device's seed."""
    global _host
    with _lock:
        if _host is None:
            _host = torch.Generator().manual_seed(_seed & (2**63 - 1))
        return _host


def get_state() -> torch.Tensor:
    """16 bytes of seed and offset, then the host generator's state."""
    words = torch.tensor([_seed - 2**64 if _seed >= 2**63 else _seed, _offset], dtype=torch.int64).view(torch.uint8)
    return torch.cat([words, host_generator().get_state()])


def set_state(state: torch.Tensor) -> None:
    global _seed, _offset
    seed, offset = state[:16].clone().view(torch.int64).tolist()
    seed_all(seed)
    _offset = offset
    host_generator().set_state(state[16:].clone())
