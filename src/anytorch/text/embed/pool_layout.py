"""Measure how many processes are fastest on this CPU, one with all cores or several with a share each, and store it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from anytorch import logs
from anytorch.cache import Store
from anytorch.errors import CacheError
from anytorch.probe import snapshot
from anytorch.text.embed.pool import Job, PoolEncoder

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

log = logs.logger(__name__)

LENGTHS = (16, 24, 32, 64, 128, 250)  # tokens of the texts that are timed: short ones mostly, as they come
ROUNDS = 3
BATCH_S = 0.15  # how long one process should take for one batch: with it, measuring takes seconds for any model
GAIN = 1.05  # several processes hold the weights several times: they must be worth it


def candidates(cores: int) -> list[int]:
    """Numbers of processes worth trying on so many cores. Pure.

    >>> candidates(2), candidates(16), candidates(96)
    ([1, 2], [1, 2, 4], [1, 2, 4, 8, 16])
    """
    return [1] + [count for count in (2, 4, 8, 16) if count * 4 <= cores or (count == 2 and cores >= 2)]


def choose(rates: dict[int, float]) -> int:
    """The number of processes to use, given batches per second of each. Pure."""
    chosen = 1
    for count in sorted(rates):
        if rates[count] > rates[chosen] * GAIN:
            chosen = count
    return chosen


def best_processes(jobs: Callable[[int], Sequence[Job]], *, spec: str) -> tuple[int, str]:
    """How many worker processes are fastest here, and why. `spec` is what the answer depends on beside the machine."""
    cpu = snapshot().cpu
    cores = cpu.usable
    if cores < 2:
        return 1, "one core: one process"
    key = hashlib.sha256(repr((spec, repr(cpu))).encode()).hexdigest()[:24]
    store = Store("embed-processes")
    try:
        known = store.get(key)
    except CacheError as exc:
        log.warning("%s", exc.message)
        known = None
    if isinstance(known, int) and known >= 1:
        return known, f"{known} process(es) were the fastest when this was measured on this CPU"
    rates = measure(jobs, candidates(cores))
    chosen = choose(rates)
    told = ", ".join(f"{count}: {rate / rates[1]:.2f}" for count, rate in rates.items())
    log.info("processes and their speed: %s", told)
    try:
        store.put(key, chosen)
    except CacheError as exc:
        log.warning("%s", exc.message)
    return chosen, f"measured on this CPU, processes and their speed: {told}"


def measure(jobs: Callable[[int], Sequence[Job]], counts: Sequence[int]) -> dict[int, float]:
    """Batches per second with each number of processes, the best of interleaved rounds."""
    best: dict[int, float] = {}
    pools: dict[int, PoolEncoder] = {}
    try:
        for count in counts:
            pools[count] = PoolEncoder(jobs(count))
            _time(pools[count], 2 * count, 1)  # a first time for everything
        once = _time(pools[counts[0]], 1, 1)
        repeats = max(1, min(8, round(BATCH_S / once)))
        for _ in range(ROUNDS):
            for count, pool in pools.items():
                work = 2 * max(counts)
                best[count] = max(best.get(count, 0.0), work / _time(pool, work, repeats))
    finally:
        for pool in pools.values():
            pool.close()
    return best


def _time(pool: PoolEncoder, batches: int, repeats: int) -> float:
    ids, starts = _batch(repeats)
    began = time.perf_counter()
    for pending in [pool.submit(ids, starts) for _ in range(batches)]:
        pending.result()
    return time.perf_counter() - began


def _batch(repeats: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    import numpy as np

    lengths: Any = np.tile(np.array(LENGTHS, np.int32), repeats)
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return (np.arange(int(starts[-1])) % 900 + 100).astype(np.int32), starts
