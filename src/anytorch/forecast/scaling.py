"""Scale columns to the range the model was trained on, and report those that do not fit.

The published scaling is (x - mean) / (standard deviation + 1e-5), in float32. The 1e-5 gives a constant column a forecast
(itself), but drowns a column whose values lie close together: of prices around 1e-6 the model sees a flat line, and the
forecast moves by 1e-5, ten times the price. That is said; `rescale` counts such a column in units of its own spread.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import numpy as np

from anytorch.errors import InputError
from anytorch.values import dataclass

SCALE_FLOOR = 1e-5  # added to the standard deviation
DROWNED = 10 * SCALE_FLOOR  # a smaller deviation loses more than a tenth of itself to the floor
FLOAT32 = np.finfo(np.float32)
HEADROOM = 1e4  # a forecast goes beyond the history, and paths are summed for their mean


@dataclass(frozen=True)
class Scaled:
    """normal · scale + mean is the data."""

    normal: np.ndarray  # float32 [rows, columns]
    mean: np.ndarray  # float32 [columns]
    scale: np.ndarray  # float32 [columns]
    warnings: tuple[str, ...]  # what the published scaling does to some column


def scale_columns(values: np.ndarray, names: Sequence[str], *, rescale: bool, where: str) -> Scaled:
    """float64 [rows, columns] of finite values. Raises InputError for a column whose size float32 cannot hold.

    Values that differ by less than float32 can tell apart are constant here: what is left is the noise of a computation.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        x = values.astype(np.float32)
        mean, scale = np.mean(x, axis=0), np.std(x, axis=0) + SCALE_FLOOR
        normal = (x - mean) / scale
        deviation, largest = np.std(values, axis=0), np.abs(values).max(axis=0)
        drowned = (np.ptp(values, axis=0) > FLOAT32.eps * largest) & (deviation < DROWNED)
        lost = ~(np.isfinite(mean) & np.isfinite(scale))
        if rescale:
            for column in np.flatnonzero(drowned | lost):
                # As if it were given in another unit: what the published code computes for prices per million coins.
                unit = unit_of(deviation[column], largest[column])
                own = (values[:, column] / unit).astype(np.float32)
                own_mean, own_scale = np.mean(own), np.std(own) + SCALE_FLOOR
                normal[:, column] = (own - own_mean) / own_scale
                mean[column], scale[column] = np.float64(own_mean) * unit, np.float64(own_scale) * unit
                fits = np.abs(mean[column]) + scale[column] <= FLOAT32.max / HEADROOM
                lost[column] = not (fits and scale[column] >= FLOAT32.tiny)
    if lost.any():
        first = int(np.flatnonzero(lost)[0])
        much, other = ("large", "larger") if largest[first] > 1 else ("small", "smaller")
        raise InputError(
            f"{where}, column {names[first]!r}: values up to {largest[first]:.3g} are too {much} to compute with in float32",
            hint=f"give the column in a {other} unit" + ("" if rescale else ", or pass rescale=True"),
        )
    warnings = []
    if drowned.any() and not rescale:
        so = "cannot be trusted" if seen_share(deviation[drowned].min()) < 0.5 else "may be a little worse for it"
        warnings = [
            f"{where}, {drowning(deviation, drowned, names)}, and the forecast {so} (rescale=True counts such columns in a "
            "smaller unit, which is not what the published code does)"
        ]
    return Scaled(normal, mean, scale, tuple(warnings))


def unit_of(deviation: float, largest: float) -> float:
    """The power of ten to count a column in. Where the deviation went out of float64's range, the values' size says it."""
    size = deviation if 0 < deviation < math.inf else largest
    return float(10.0 ** max(math.floor(math.log10(size)), math.ceil(math.log10(sys.float_info.min))))


def seen_share(deviation: float) -> float:
    """How much of a column's movement the floor leaves."""
    return float(deviation / (deviation + SCALE_FLOOR))


def drowning(deviation: np.ndarray, drowned: np.ndarray, names: Sequence[str]) -> str:
    """What the floor does to the columns that are `drowned` (bool [columns])."""
    which = [name for name, found in zip(names, drowned, strict=True) if found]
    least = float(deviation[drowned].min())
    return (
        f"column{'s' if len(which) > 1 else ''} {', '.join(which)}: the values vary by only {least:.2g}, and the published "
        f"scaling adds {SCALE_FLOOR:g} to that: the model sees {seen_share(least):.2%} of their movement"
    )
