"""Timing several variants of the same work side by side: interleaved, so that a drift of the machine hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from anytorch.devices.bench.timing import SAMPLE_S, count_interruptions, summarise
from anytorch.devices.bench.workloads import difference
from anytorch.devices.oom import is_out_of_memory
from anytorch.devices.tune.plan import Option

if TYPE_CHECKING:
    import torch

HOPELESS = 2.0  # a variant this many times slower than the best is not timed again
ENOUGH_DISTURBED = 6  # disturbed samples after which a slow variant is believed to be slow
MOST_ROUNDS = 200


@dataclass
class Variant:
    """A value of the setting, the context that puts it in force, and the work under it."""

    value: str | int
    run: Callable[[], torch.Tensor]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    inner: int = 1
    error: float | None = None
    note: str = ""
    samples: list[float] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)

    def option(self) -> Option:
        if not self.samples:
            return Option(self.value, error=self.error, note=self.note)
        timing = summarise(self.samples, self.quiet)
        return Option(
            self.value, timing.median_s, timing.spread_s, timing.repeats, self.error, timing.disturbed, self.note
        )

    def hopeless(self, best: float) -> bool:
        """Slower than the best by far, and not merely because other work got in its way."""
        known = bool(self.quiet) or len(self.samples) >= ENOUGH_DISTURBED or min(self.samples) > 10 * HOPELESS * best
        return min(self.samples) > HOPELESS * best and known


def compare(
    variants: Sequence[Variant],
    reference: torch.Tensor,
    synchronize: Callable[[], object],
    *,
    budget_s: float,
    tolerance: Callable[[Variant], float],
    select: Callable[[torch.Tensor], torch.Tensor] = lambda answer: answer,
    clock: Callable[[], float] = perf_counter,
) -> list[Option]:
    """Check every variant against `reference`, then time them in turns for about `budget_s` seconds.

    A variant that raises or is off by more than its `tolerance` gets a note and no time. A hopeless one gets few
    samples. `select` picks the part of an answer that the reference holds.
    """
    started = clock()
    alive = [v for v in variants if _first(v, reference, synchronize, tolerance(v), select, clock)]
    for _ in range(MOST_ROUNDS):
        if not alive:
            break
        best = min(min(v.samples) for v in alive)
        alive = [v for v in alive if not v.hopeless(best)]
        for variant in alive:
            with variant.context():
                if variant.samples[0] < SAMPLE_S * 5:
                    variant.run()  # the switch itself is not free: threads start, caches change
                    synchronize()
                _sample(variant, synchronize, clock)
        if clock() - started >= budget_s:
            break
    return [variant.option() for variant in variants]


def _first(
    variant: Variant,
    reference: torch.Tensor,
    synchronize: Callable[[], object],
    tolerance: float,
    select: Callable[[torch.Tensor], torch.Tensor],
    clock: Callable[[], float],
) -> bool:
    """The answer, which is the warm-up too, then one sample. False if the variant is out."""
    try:
        with ExitStack() as stack:
            stack.enter_context(variant.context())
            got = select(variant.run()).detach().cpu().double()
            variant.error = difference(got, reference)
            if not variant.error <= tolerance:
                variant.note = f"wrong: off by {variant.error:.1e} of the largest value; {tolerance:.0e} is allowed"
                variant.error = variant.error if variant.error == variant.error else None  # NaN is no number in JSON
                return False
            synchronize()
            begun = clock()
            variant.run()
            synchronize()
            variant.inner = max(1, min(1000, round(SAMPLE_S / max(clock() - begun, 1e-9))))
            _sample(variant, synchronize, clock)
    except Exception as exc:  # noqa: BLE001  (devices raise anything; the words are kept)
        words = "out of memory" if is_out_of_memory(exc) else type(exc).__name__
        variant.note = f"{words}: {str(exc).strip().splitlines()[0][:200] if str(exc).strip() else 'no message'}"
        return False
    return True


def _sample(variant: Variant, synchronize: Callable[[], object], clock: Callable[[], float]) -> None:
    interruptions = count_interruptions()
    begun = clock()
    for _ in range(variant.inner):
        variant.run()
    synchronize()
    variant.samples.append((clock() - begun) / variant.inner)
    if count_interruptions() == interruptions:
        variant.quiet.append(variant.samples[-1])
