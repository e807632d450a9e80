"""Columns to the size that the model knows, and what cannot be brought there.

The published scaling is (x - mean) / (standard deviation + 1e-5), in float32. The 1e-5 gives a constant column a forecast
(itself), but drowns a column whose values lie close together: of prices around 1e-6 the model sees a flat line, and the
forecast moves by 1e-5, ten times the price. That is said; `rescale` counts such a column in units of its own spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from anytorch.errors import InputError
from anytorch.values import dataclass

SCALE_FLOOR = 1e-5  # added to the standard deviation
DROWNED = 10 * SCALE_FLOOR  # a smaller deviation loses more than a tenth of itself to the floor


@dataclass(frozen=True)
class Scaled:
    """normal · scale + mean is the data."""

    normal: np.ndarray  # float32 [rows, columns]
    mean: np.ndarray  # float32 [columns]
    scale: np.ndarray  # float32 [columns]
    warnings: tuple[str, ...]  # what the published scaling does to some column


def scale_columns(values: np.ndarray, names: Sequence[str], *, rescale: bool, where: str) -> Scaled:
    """float64 [rows, columns] of finite values. Raises InputError for a column whose size float32 cannot hold."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        x = values.astype(np.float32)
        mean, scale = np.mean(x, axis=0), np.std(x, axis=0) + SCALE_FLOOR
        normal = (x - mean) / scale
        deviation = np.std(values, axis=0)
        drowned = (np.ptp(values, axis=0) > 0) & (deviation < DROWNED)
        too_large = ~(np.isfinite(mean) & np.isfinite(scale))
        if rescale:
            for column in np.flatnonzero(drowned | too_large):
                # As if it were given in another unit: what the published code computes for prices per million coins.
                unit = 10.0 ** math.floor(math.log10(deviation[column]))
                own = (values[:, column] / unit).astype(np.float32)
                own_mean, own_scale = np.mean(own), np.std(own) + SCALE_FLOOR
                normal[:, column] = (own - own_mean) / own_scale
                mean[column], scale[column] = np.float64(own_mean) * unit, np.float64(own_scale) * unit
            too_large = ~(np.isfinite(mean) & np.isfinite(scale))
    if too_large.any():
        first = int(np.flatnonzero(too_large)[0])
        largest = float(np.abs(values[:, first]).max())
        raise InputError(
            f"{where}, column {names[first]!r}: values up to {largest:.3g} are too large to compute with in float32",
            hint="give the column in a larger unit" + ("" if rescale else ", or pass rescale=True"),
        )
    warnings = []
    if drowned.any() and not rescale:
        advice = (
            "the forecast cannot be trusted (rescale=True counts such columns in a smaller unit, which is not what the "
            "published code does)"
        )
        warnings = [f"{where}, {drowning(deviation, drowned, names)}, and {advice}"]
    return Scaled(normal, mean, scale, tuple(warnings))


def drowning(deviation: np.ndarray, drowned: np.ndarray, names: Sequence[str]) -> str:
    """What the floor does to the columns that are `drowned` (bool [columns])."""
    which = [name for name, found in zip(names, drowned, strict=True) if found]
    least = float(deviation[drowned].min())
    seen = least / (least + SCALE_FLOOR)
    return (
        f"column{'s' if len(which) > 1 else ''} {', '.join(which)}: the values vary by only {least:.2g}, and the published "
        f"scaling adds {SCALE_FLOOR:g} to that: the model sees {seen:.2%} of their movement"
    )
