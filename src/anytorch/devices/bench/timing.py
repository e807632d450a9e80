"""Timing one function on one device: warm up, wait for the device, repeat within a budget, keep median and spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median, quantiles
from time import perf_counter, process_time

from anytorch.devices.bench.results import Timing

SAMPLE_S = 1e-3  # a sample shorter than this measures the clock and the wait, not the work
LEAST_SAMPLES = 3
MOST_SAMPLES = 1000


def measure(
    run: Callable[[], object],
    synchronize: Callable[[], object],
    *,
    budget_s: float,
    iterations: int | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Timing:
    """Time `run` for about `budget_s` seconds, warm-up included; with `iterations`, exactly that many runs instead.

    Short runs are timed several at a time. A run longer than the whole budget is still timed once, warm.
    """
    started = clock()
    synchronize()
    begun = clock()
    run()
    synchronize()
    once = max(clock() - begun, 1e-9)  # the first run, cold: an upper bound
    inner = 1
    if iterations is None and once < SAMPLE_S:
        begun = clock()
        run()
        synchronize()
        once = max(clock() - begun, 1e-9)
        inner = max(1, min(10_000, round(SAMPLE_S / once)))
    samples: list[float] = []
    cpu_started = process_time()
    while True:
        begun = clock()
        for _ in range(inner):
            run()
        synchronize()
        now = clock()
        samples.append((now - begun) / inner)
        if iterations is not None:
            if len(samples) >= iterations:
                break
            continue
        least = LEAST_SAMPLES if samples[0] * inner * LEAST_SAMPLES < 4 * budget_s else 1
        if len(samples) >= MOST_SAMPLES or (len(samples) >= least and now - started >= budget_s):
            break
    cpu_s = (process_time() - cpu_started) / (len(samples) * inner)
    return summarise(samples, inner=inner, cpu_s=cpu_s)


def summarise(samples: Sequence[float], *, inner: int = 1, cpu_s: float = 0.0) -> Timing:
    spread = 0.0
    if len(samples) > 1:
        low, _, high = quantiles(samples, n=4, method="inclusive")
        spread = high - low
    return Timing(median(samples), spread, min(samples), cpu_s, len(samples), inner)
