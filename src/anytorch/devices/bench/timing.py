"""Timing one function on one device: warm up, wait for the device, repeat within a budget, keep median and spread.

On a busy machine the system takes the processor away in the middle of a run; the other threads then wait for a whole
scheduling turn, and a product of 0.1 ms takes 8 ms. The kernel counts these interruptions, so samples that had one are
left out where at least LEAST_SAMPLES quiet ones remain. Where they do not, samples of a millisecond see either a whole turn
or none of it, and can agree with each other at a tenth of the rate: then windows of several turns are timed instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median, quantiles
from time import perf_counter, process_time

from anytorch.devices.bench.results import Timing
from anytorch.measured.stopwatch import count_interruptions

SAMPLE_S = 1e-3  # a sample shorter than this measures the clock and the wait, not the work
WINDOW_S = 0.1  # several turns of any scheduler (Linux: 3 to 24 ms, Windows: up to 30)
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
    quiet: list[float] = []
    cpu_started = process_time()
    while True:
        interruptions = count_interruptions()
        begun = clock()
        for _ in range(inner):
            run()
        synchronize()
        now = clock()
        samples.append((now - begun) / inner)
        if count_interruptions() == interruptions:
            quiet.append(samples[-1])
        if iterations is not None:
            if len(samples) >= iterations:
                break
            continue
        least = LEAST_SAMPLES if samples[0] * inner * LEAST_SAMPLES < 4 * budget_s else 1
        if len(samples) >= MOST_SAMPLES or (len(samples) >= least and now - started >= budget_s):
            break
    cpu_s = (process_time() - cpu_started) / (len(samples) * inner)
    found = summarise(samples, quiet, inner=inner, cpu_s=cpu_s)
    if iterations is None and len(quiet) < LEAST_SAMPLES <= len(samples) and found.median_s * inner < WINDOW_S:
        return _in_windows(run, synchronize, found, clock)
    return found


def _in_windows(
    run: Callable[[], object], synchronize: Callable[[], object], disturbed: Timing, clock: Callable[[], float]
) -> Timing:
    """The time of a run on a machine that is never left alone for long: whole windows, in which its share evens out."""
    windows: list[float] = []
    inner = 0
    cpu_started = process_time()
    for _ in range(LEAST_SAMPLES):
        runs, begun = 0, clock()
        while (now := clock()) - begun < WINDOW_S or not runs:
            for _ in range(disturbed.inner):
                run()
            synchronize()
            runs += disturbed.inner
        windows.append((now - begun) / runs)
        inner += runs
    cpu_s = (process_time() - cpu_started) / inner
    found = summarise(windows, [], inner=inner // len(windows), cpu_s=cpu_s)
    return replace(found, disturbed=len(windows))


def summarise(samples: Sequence[float], quiet: Sequence[float], *, inner: int = 1, cpu_s: float = 0.0) -> Timing:
    """Median and quartiles of the quiet samples, or of all of them if too few were quiet. Pure."""
    kept = quiet if len(quiet) >= LEAST_SAMPLES else samples
    spread = 0.0
    if len(kept) > 1:
        low, _, high = quantiles(kept, n=4, method="inclusive")
        spread = high - low
    return Timing(median(kept), spread, min(kept), cpu_s, len(kept), inner, len(samples) - len(quiet))


def quickest(run: Callable[[], object], synchronize: Callable[[], object], *, patience_s: float = 0.05) -> float:
    """A rough time for choosing a size, warm: the best of three quiet tries, or of as many as `patience_s` allows."""
    run()
    synchronize()
    started = perf_counter()
    best, quiet = float("inf"), 0
    while quiet < LEAST_SAMPLES:
        interruptions = count_interruptions()
        begun = perf_counter()
        run()
        synchronize()
        now = perf_counter()
        best = min(best, now - begun)
        quiet += count_interruptions() == interruptions
        if now - started > patience_s:
            break
    return best
