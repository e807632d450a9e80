"""What the cores of this machine can do at most: the floors that `bench/graphs.py` states on the CPU."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import torch

from anytorch import native
from anytorch.graph.back import cpp

SOURCE = Path(__file__).parent / "cpu_limits.cpp"
AT_LEAST_S = 0.02  # of one measurement
TRIES = 7
BLOCK = 4096  # float32 numbers: parts are multiples of it, so that sums of ones are exact


def _best(name: str, buffers: list[torch.Tensor], part: int) -> float:
    """Seconds that one round of the function takes at the best, by all of torch's threads in one launch.

    Rounds are repeated within a launch: waking the threads is no part of the limit.
    """
    function = getattr(native.load("cpu-limits", [SOURCE], header="lanes.h"), name)
    items = torch.get_num_threads()
    addresses = [one.data_ptr() for one in buffers]

    def seconds(rounds: int) -> float:
        launch = cpp.launcher(ctypes.cast(function, ctypes.c_void_p), [part, rounds], items)
        launch(addresses)
        begun = time.perf_counter()
        launch(addresses)
        return (time.perf_counter() - begun) / rounds

    rounds = max(1, int(AT_LEAST_S / seconds(1)))
    return min(seconds(rounds) for _ in range(TRIES))


def bytes_per_s(nbytes: int) -> float:
    """The rate at which so many bytes are read again and again: from a cache where they lie in one, as a row's inputs do."""
    items = torch.get_num_threads()
    part = max(BLOCK, nbytes // 4 // items // BLOCK * BLOCK)
    numbers, sums = torch.ones(items * part), torch.zeros(items)
    best = _best("read_all", [numbers, sums], part)
    assert bool((sums == part).all()), "the numbers were not all read"
    return 4.0 * items * part / best


def operations_per_s() -> float:
    """Float32 operations by products that are added, in registers alone."""
    count, sums = 1 << 12, torch.zeros(torch.get_num_threads())
    best = _best("multiply_all", [sums], count)
    each = float(sums[0])  # operations of an item in a round, as it counts them itself
    return each * len(sums) / best
