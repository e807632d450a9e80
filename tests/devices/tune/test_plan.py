"""The rules by which tuning decides, as tables."""

from __future__ import annotations

import pytest

from anytorch.devices.tune.store import decide, decide_batch
from anytorch.measured.verdict import Trial


def option(value: str | int, seconds: float | None, spread_s: float = 0.0, **more: object) -> Trial:
    return Trial(str(value), seconds, spread_s, repeats=10, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "chosen", "words"),
    [
        # A clear gain is taken.
        ([option("a", 1.0), option("b", 0.5)], "b", "2.00 times as fast"),
        # The default is the fastest.
        ([option("a", 1.0), option("b", 1.5)], "a", "the default is the fastest"),
        ([option("b", 0.9705), option("a", 1.0)], "a", "within the noise"),
        # Equally fast: the first, which is the more careful one (tf32 and bf16 inside float32 products on an H200).
        ([option("a", 2.554), option("b", 0.5905), option("c", 0.5874)], "b", "4.33 times"),
        # 2 % is noise, 4 % is not.
        ([option("a", 1.0), option("b", 0.98)], "a", "the default is the fastest, or as fast"),
        ([option("a", 1.0), option("b", 0.96)], "b", "1.04 times"),
        # 10 % within a spread of 20 % proves nothing, whichever of the two spreads.
        ([option("a", 1.0, 0.2), option("b", 0.9)], "a", "within the spread"),
        ([option("a", 1.0), option("b", 0.9, 0.2)], "a", "within the spread"),
        ([option("a", 1.0, 0.05), option("b", 0.9, 0.05)], "b", "1.11 times"),
        # Fast and inaccurate is no candidate; the next one is.
        ([option("a", 1.0), option("b", 0.1, error=0.5), option("c", 0.5, error=1e-4)], "c", "2.00 times"),
        ([option("a", 1.0), option("b", 0.1, error=0.5)], "a", "nothing else"),
        # What could not be run is no candidate.
        ([option("a", 1.0), option("b", None, refused="out of memory")], "a", "nothing else"),
        # A default that cannot be used gives way.
        ([option("a", None, refused="RuntimeError: no"), option("b", 2.0)], "b", "RuntimeError: no"),
        # Nothing can be used: the default stays.
        ([option("a", None), option("b", None)], "a", "nothing else"),
        # Other work in the way: no change is based on such times.
        ([option("a", 5.0, disturbed=10), option("b", 1.0)], "a", "too busy"),
        ([option("a", 5.0), option("b", 1.0, disturbed=12)], "a", "too busy"),
        ([option("a", 5.0, disturbed=3), option("b", 1.0, disturbed=9)], "b", "5.00 times"),
    ],
)
def test_decide(options: list[Trial], chosen: str, words: str) -> None:
    item = decide("setting", "work", "a", options, most_error=0.01)
    assert item.chosen == chosen
    assert words in item.why
    assert item.changed == (chosen != "a")
    assert item.options == tuple(options)
    timed = {o.name: o.seconds for o in options}
    if item.changed and timed["a"] and timed[chosen]:
        assert item.gain == timed["a"] / timed[chosen]
    else:
        assert item.gain == 1.0


@pytest.mark.parametrize(
    ("times", "chosen", "gain"),
    [
        ([(1, 1.0), (2, 0.6), (4, 0.5), (8, 0.49), (16, 0.48)], 4, 2.0),  # the knee, not the very best
        ([(1, 1.0), (2, 1.1), (4, 1.2)], 1, 1.0),
        ([(1, 1.0), (2, 0.5), (4, None)], 2, 2.0),  # 4 did not fit
        ([(1, None)], 1, 1.0),
    ],
)
def test_decide_batch(times: list[tuple[int, float | None]], chosen: int, gain: float) -> None:
    item = decide_batch("work", 1, [option(batch, seconds) for batch, seconds in times])
    assert item.chosen == chosen and item.gain == pytest.approx(gain)
