"""A forecast as a picture: the history's candles, the forecast's fan of quantiles, and the volume of both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytorch.pictures import figure_for, write_figure

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

UP, DOWN = "#009E73", "#D55E00"  # Okabe and Ito's palette: told apart by colour-blind readers and in print
AHEAD, TRUTH = "#0072B2", "#000000"
SHOWN = 160  # bars of history at most
TICKS = 9


def draw_forecast(
    history: pd.DataFrame,
    mean: pd.DataFrame,
    path: str | Path,
    *,
    quantiles: Mapping[float, pd.DataFrame] | None = None,
    actual: pd.DataFrame | None = None,
    title: str = "",
) -> Path:
    """Draw to a .png or .svg file and return its path. Needs matplotlib.

    `history` has a column `timestamps`; `mean` and the quantiles are indexed by time, as `KronosPredictor` gives them;
    `actual` (with `timestamps`) is what really came, where it is known. Bars stand side by side, so that nights and
    weekends leave no holes.
    """
    path = Path(path)
    figure = figure_for(path, (12, 6.4))
    shown = history.iloc[-min(len(history), max(SHOWN, len(mean))) :]
    panel, below = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 1])
    ahead = range(len(shown), len(shown) + len(mean))
    _candles(panel, range(len(shown)), shown)
    _fan(panel, ahead, quantiles or {}, "close", last=float(shown["close"].iloc[-1]))
    label = "forecast (mean of the close)"
    panel.plot([len(shown) - 1, *ahead], [shown["close"].iloc[-1], *mean["close"]], color=AHEAD, lw=1.6, label=label)
    if len(mean) <= 60:  # beyond that they would only hide the fan
        _candles(panel, ahead, mean, faint=True)
    if actual is not None:
        places = range(len(shown), len(shown) + len(actual))
        panel.plot(places, actual["close"], color=TRUTH, lw=1, ls="--", label="actual")
    _volume(below, shown, mean, ahead, quantiles or {})
    for one in (panel, below):
        one.axvline(len(shown) - 0.5, color="#888888", lw=0.8, ls=":")
        one.grid(alpha=0.2)
        one.spines[["top", "right"]].set_visible(False)
    _times(below, [*shown["timestamps"], *mean.index])
    panel.set_ylabel("price")
    panel.set_title(title, loc="left", fontsize=11)
    panel.legend(loc="upper left", frameon=False, fontsize=8)
    return write_figure(figure, path, dpi=140)


def _candles(panel: Any, places: range, frame: Any, *, faint: bool = False) -> None:
    """Wicks from low to high, bodies from open to close; hollow and blue where they are only forecast."""
    opened, closed = frame["open"].to_numpy(), frame["close"].to_numpy()
    colours = [AHEAD if faint else UP if rises else DOWN for rises in closed >= opened]
    style = {"alpha": 0.45 if faint else 1.0, "zorder": 2}
    panel.vlines(places, frame["low"], frame["high"], color=colours, lw=0.7, **style)
    faces = ["none" if faint else colour for colour in colours]
    height = closed - opened
    panel.bar(places, height, bottom=opened, width=0.7, color=faces, edgecolor=colours, linewidth=0.7, **style)


def _fan(panel: Any, ahead: range, quantiles: Mapping[float, Any], column: str, last: float | None = None) -> None:
    """Bands between the lowest and highest quantile, the second ones, and so on inwards; an odd one is a line."""
    levels = sorted(quantiles)
    start = [] if last is None else [ahead[0] - 1]
    first = [] if last is None else [last]
    pairs = list(zip(levels[: len(levels) // 2], reversed(levels[(len(levels) + 1) // 2 :]), strict=True))
    for number, (low, high) in enumerate(pairs):
        panel.fill_between(
            [*start, *ahead],
            [*first, *quantiles[low][column]],
            [*first, *quantiles[high][column]],
            color=AHEAD,
            alpha=0.14 + 0.12 * number,
            lw=0,
            label=f"{low:.0%} to {high:.0%} of the paths",
            zorder=1,
        )
    if len(levels) % 2:
        middle = levels[len(levels) // 2]
        values = [*first, *quantiles[middle][column]]
        panel.plot([*start, *ahead], values, color=AHEAD, lw=1, ls="--", label=f"{middle:.0%} quantile", zorder=3)


def _volume(below: Any, shown: Any, mean: Any, ahead: range, quantiles: Mapping[float, Any]) -> None:
    if "volume" not in shown or not shown["volume"].any():
        below.text(0.5, 0.5, "no volume", transform=below.transAxes, ha="center", color="#666666")
        below.set_yticks([])
        return
    below.bar(range(len(shown)), shown["volume"], width=0.8, color="#999999")
    below.bar(ahead, mean["volume"].clip(lower=0.0), width=0.8, color=AHEAD, alpha=0.55)
    _fan(below, ahead, {level: frame.clip(lower=0.0) for level, frame in quantiles.items()}, "volume")
    below.set_ylabel("volume")
    below.set_ylim(bottom=0)


def _times(panel: Any, times: list[Any]) -> None:
    """A few times below the bars: days, with the clock's time where bars are shorter than a day."""
    places = sorted({round(n * (len(times) - 1) / (TICKS - 1)) for n in range(TICKS)})
    within_day = len(times) > 1 and (times[1] - times[0]).total_seconds() < 86400
    layout = "%d %b\n%H:%M" if within_day else "%d %b\n%Y"
    panel.set_xticks(places, [times[place].strftime(layout) for place in places], fontsize=8)
    panel.set_xlim(-1, len(times))
