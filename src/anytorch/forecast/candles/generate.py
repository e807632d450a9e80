"""Synthetic candles that behave like a market's, generated from a seed, for training and tests without a download.

The price is a random walk with Student-t shocks, GARCH volatility, three regimes and gaps between sessions, plus a
component that returns to its mean; volume has a daily and a weekly shape, persistence, and grows with the size of the
move. What can be predicted is therefore known: volume's shape, volatility, and the share of every move that is undone
again (`reversion`). Real prices offer far less of the last one; a model that beats the last value here has learned what
was put there, not how to trade.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from anytorch import limits
from anytorch.errors import InputError
from anytorch.forecast.candles.tables import pandas as pd
from anytorch.values import dataclass

OPENS_MINUTE, SESSION_MINUTES = 9 * 60 + 30, 390  # an exchange's day: 09:30 to 16:00
DAY_MINUTES = 24 * 60
MOST_ROWS = 5_000_000

# Kept from the published GARCH(1,1) fits to equity indices: α + β just below 1, so that volatility comes in clusters.
GARCH_SHOCK, GARCH_MEMORY = 0.08, 0.90
FREEDOM = 5.0  # of the Student-t shocks: fat tails with a finite fourth moment
# Per regime: volatility against the average, drift per bar in units of its volatility, mean length in bars.
REGIMES = ((0.7, 0.010, 600.0), (1.0, 0.0, 900.0), (1.9, -0.015, 200.0))
STEPS_INSIDE = 12  # of the path inside a bar, from which its high and low are taken


@dataclass(frozen=True)
class Recipe:
    """What the generator puts into a series. `reversion` is the share of a bar's variance that is undone again."""

    volatility: float = 0.35  # a year's, as a fraction
    reversion: float = 0.7
    half_life: float = 8.0  # of the part that returns to its mean, in bars
    volume: float = 2e6  # a day's average
    volume_shape: float = 0.6  # height of the daily and weekly pattern, in units of log volume
    gap: float = 4.0  # the night's standard deviation against a bar's
    missing: float = 0.0  # share of bars that are not there


LIMITS = {
    "volatility": (0.0, 10.0),
    "reversion": (0.0, 0.99),
    "half_life": (0.1, 1e6),
    "volume": (0.0, 1e15),
    "volume_shape": (0.0, 5.0),
    "gap": (0.0, 100.0),
    "missing": (0.0, 0.9),
}


def sample_candles(
    rows: int = 2000,
    *,
    freq: str = "5min",
    start: str = "2024-01-02",
    seed: int = 0,
    session: str | None = None,
    price: float = 100.0,
    recipe: Recipe | None = None,
) -> pd.DataFrame:
    """`rows` candles as a DataFrame with the columns timestamps, open, high, low, close, volume and amount.

    `freq` is any pandas frequency ("1min", "1h", "1D", "W-FRI"); `session` is "exchange" (weekdays, 09:30 to 16:00),
    "always" (no closing hours), or None: an exchange's up to a day, else the frequency's own dates. The same arguments
    give the same candles.

    >>> sample_candles(3, seed=1)["timestamps"].iloc[0]
    Timestamp('2024-01-02 09:30:00')
    """
    if not 1 <= rows <= MOST_ROWS:
        raise InputError(f"rows={rows}: use 1 to {MOST_ROWS}")
    price, seed = limits.PRICE.check("price", price), limits.SEED.check("seed", seed)
    recipe = Recipe() if recipe is None else recipe
    for name, (low, high) in LIMITS.items():
        if not low <= (value := getattr(recipe, name)) <= high:
            raise InputError(f"recipe: {name}={value} is not between {low:g} and {high:g}")
    random = np.random.Generator(np.random.PCG64(seed))
    spare = round(rows * recipe.missing / (1.0 - recipe.missing) * 1.5) + 16 if recipe.missing else 0
    calendar = Calendar.of(rows + spare, freq, start, session)
    frame = _candles(calendar, price, recipe, random)
    if recipe.missing:
        there = random.random(len(frame)) >= recipe.missing
        there[0] = True
        frame = frame[there]
    return frame.iloc[:rows].reset_index(drop=True)


def sample_market(instruments: int = 8, rows: int = 2000, *, seed: int = 0, **options: Any) -> dict[str, pd.DataFrame]:
    """Several independent instruments by name, each with a price, activity, volatility and memory of its own."""
    if not 1 <= instruments <= 10_000:
        raise InputError(f"instruments={instruments}: use 1 to 10000")
    given: Recipe = options.pop("recipe", None) or Recipe()
    market = {}
    for number in range(instruments):
        random = np.random.Generator(np.random.PCG64([seed, number]))
        recipe = replace(
            given,
            volatility=given.volatility * float(np.exp(random.normal(0, 0.3))),
            reversion=float(np.clip(given.reversion + random.normal(0, 0.05), 0.0, 0.95)),
            half_life=given.half_life * float(np.exp(random.normal(0, 0.2))),
            volume=given.volume * float(np.exp(random.normal(0, 1.0))),
            volume_shape=given.volume_shape * float(np.exp(random.normal(0, 0.15))),
        )
        own = {"price": float(np.exp(random.normal(np.log(80.0), 0.8))), **options}
        market[f"SYM{number:03d}"] = sample_candles(rows, seed=int(random.integers(2**62)), recipe=recipe, **own)
    return market


@dataclass(frozen=True)
class Calendar:
    """When bars are: their times, which ones open a session, and where in the day each stands (0 to 1; None: no day)."""

    times: Any  # DatetimeIndex
    opens: Any  # bool [rows]: a night or a weekend lies before it
    phase: Any  # float [rows]
    per_year: float
    per_day: float

    @classmethod
    def of(cls, rows: int, freq: str, start: str, session: str | None) -> Calendar:
        try:
            offset = pd.tseries.frequencies.to_offset(freq)
            first = pd.Timestamp(start)
        except (ValueError, TypeError) as exc:
            raise InputError(f"freq={freq!r}, start={start!r}: {exc}", hint="write 5min, 1h, 1D; 2024-01-02") from exc
        if session not in (None, "exchange", "always"):
            raise InputError(f"session={session!r}: use 'exchange' or 'always'")
        try:
            minutes = pd.Timedelta(offset).total_seconds() / 60
        except (ValueError, TypeError):  # a week or month that begins on a named day has no fixed length
            minutes = None
        if minutes is not None and minutes < DAY_MINUTES and session != "always":
            if minutes > SESSION_MINUTES:
                raise InputError(
                    f"freq={freq!r} is longer than an exchange's day of {SESSION_MINUTES} minutes",
                    hint="use session='always' or a frequency of a day",
                )
            daily = int(SESSION_MINUTES // minutes)
            dates = pd.bdate_range(first.normalize(), periods=-(-rows // daily))
            inside = np.arange(daily)
            # In whole nanoseconds: fractions of a minute do not add up to seconds.
            ahead = pd.Timedelta(minutes=OPENS_MINUTE).to_timedelta64() + inside * pd.Timedelta(offset).to_timedelta64()
            times = pd.DatetimeIndex((dates.to_numpy()[:, None] + ahead[None, :]).reshape(-1)[:rows])
            phase = np.tile((inside + 0.5) / daily, len(dates))[:rows]
            opens = np.tile(inside == 0, len(dates))[:rows]
            return cls(times, opens, phase, per_year=252.0 * daily, per_day=float(daily))
        if minutes is not None and minutes < DAY_MINUTES:
            times = pd.date_range(first, periods=rows, freq=offset)
            phase = ((times.hour * 60 + times.minute) / DAY_MINUTES).to_numpy()
            per_day = DAY_MINUTES / minutes
            return cls(times, np.zeros(rows, bool), phase, per_year=365.0 * per_day, per_day=per_day)
        if minutes == DAY_MINUTES and session != "always":
            offset = pd.tseries.offsets.BusinessDay()
        times = pd.date_range(first, periods=rows, freq=offset)
        days = max((times[-1] - times[0]).days / max(rows - 1, 1), 1.0)
        gaps = np.r_[False, np.diff(times.to_numpy()) > 1.5 * np.timedelta64(int(days * 86400), "s")]
        return cls(times, gaps, np.full(rows, 0.5), per_year=365.25 / days, per_day=1.0 / days)


def _candles(calendar: Calendar, price: float, recipe: Recipe, random: np.random.Generator) -> pd.DataFrame:
    rows = len(calendar.times)
    # The bell of trading at both ends of the day, with mean 0: for volatility and for volume.
    shape = 6.0 * (calendar.phase - 0.5) ** 2 - 0.5 if calendar.per_day > 1 else np.zeros(rows)
    spread, drift = _regimes(rows, random)
    shocks, sigma = _garch(rows, random)
    bar = recipe.volatility / np.sqrt(calendar.per_year)
    sigma = bar * sigma * spread * np.exp(0.4 * shape)
    # Two shocks per bar of the same volatility: one stays, the other is undone.
    others = random.standard_t(FREEDOM, rows) * np.sqrt((FREEDOM - 2) / FREEDOM)
    walk = sigma * (np.sqrt(1.0 - recipe.reversion) * shocks + drift)
    returning = _reverting(np.sqrt(recipe.reversion) * sigma * others, recipe.half_life)
    night = np.where(calendar.opens, recipe.gap * bar * random.standard_t(FREEDOM, rows), 0.0)
    night[0] = 0.0
    close = np.log(price) + np.cumsum(walk + night) + returning
    start = np.r_[np.log(price), close[:-1]] + night  # the open: the last close, and the night's gap
    # Inside the bar: a bridge from open to close; its highest and lowest points are the bar's.
    path = np.cumsum(random.standard_normal((rows, STEPS_INSIDE)), axis=1) / np.sqrt(STEPS_INSIDE)
    along = np.arange(1, STEPS_INSIDE + 1) / STEPS_INSIDE
    path = start[:, None] + (close - start)[:, None] * along + sigma[:, None] * (path - path[:, -1:] * along)
    high = np.maximum(path.max(axis=1), start)
    low = np.minimum(path.min(axis=1), start)
    volume = _volume(calendar, shape, close - start, sigma, recipe, random)
    tick = 10.0 ** (np.floor(np.log10(price)) - 4)

    def rounded(log_price: Any) -> Any:  # rounding keeps the order, so high stays highest
        return np.maximum(np.round(np.exp(log_price) / tick), 1.0) * tick

    prices = {"open": rounded(start), "high": rounded(high), "low": rounded(low), "close": rounded(close)}
    amount = volume * sum(prices.values()) / 4
    frame = pd.DataFrame({"timestamps": calendar.times, **prices, "volume": volume, "amount": np.round(amount, 2)})
    digits = max(0, round(-np.log10(tick)))
    return frame.round(dict.fromkeys(prices, digits))


def _regimes(rows: int, random: np.random.Generator) -> tuple[Any, Any]:
    """Volatility's factor and the drift of every bar: three states that last for hundreds of bars."""
    spread, drift = np.empty(rows), np.empty(rows)
    place, state = 0, int(random.integers(len(REGIMES)))
    while place < rows:
        factor, push, length = REGIMES[state]
        until = min(rows, place + 1 + int(random.exponential(length)))
        spread[place:until], drift[place:until] = factor, push
        place, state = until, (state + int(random.integers(1, len(REGIMES)))) % len(REGIMES)
    return spread, drift


def _garch(rows: int, random: np.random.Generator) -> tuple[Any, Any]:
    """Shocks of variance 1, and the volatility that earlier shocks leave behind (1 on average)."""
    shocks = random.standard_t(FREEDOM, rows) * np.sqrt((FREEDOM - 2) / FREEDOM)
    sigma = np.empty(rows)
    variance = 1.0
    for place in range(rows):  # each depends on the one before
        sigma[place] = variance
        variance = 1.0 - GARCH_SHOCK - GARCH_MEMORY + variance * (GARCH_MEMORY + GARCH_SHOCK * shocks[place] ** 2)
    return shocks, np.sqrt(sigma)


def _reverting(moves: Any, half_life: float) -> Any:
    """The part of the price that returns to 0: half of it is gone after `half_life` bars."""
    keep = 0.5 ** (1.0 / half_life)
    levels = np.empty(len(moves))
    level = 0.0
    for place, move in enumerate(moves):
        level = keep * level + move
        levels[place] = level
    return levels


def _volume(calendar: Calendar, shape: Any, moves: Any, sigma: Any, recipe: Recipe, random: np.random.Generator) -> Any:
    """Whole units: the day's and the week's shape, a slow level of its own, and more of it in large moves."""
    rows = len(moves)
    level = _reverting(random.normal(0, 0.08, rows), half_life=60.0)
    week = 0.25 * recipe.volume_shape * np.cos(2 * np.pi * (calendar.times.day_of_week.to_numpy() - 4) / 5)
    excitement = 0.25 * (np.abs(moves) / sigma - 0.8)
    log_volume = recipe.volume_shape * shape + week + level + excitement + random.normal(0, 0.25, rows)
    return np.maximum(np.round(recipe.volume / max(calendar.per_day, 1.0) * np.exp(log_volume)), 1.0)
