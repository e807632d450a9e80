"""What a forecast is: its mean, and on request its sample paths and quantiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from anytorch.forecast.inputs.series import COLUMNS, Series

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

VOLUMES = (COLUMNS.index("volume"), COLUMNS.index("amount"))


@dataclass(frozen=True)
class Forecast:
    """The answer to `predict(..., return_samples=True)` or `predict(..., quantiles=(0.1, 0.9))`."""

    mean: pd.DataFrame  # what `predict` gives without these options
    samples: np.ndarray | None = None  # float32 [samples, steps, 6]: every path
    quantiles: Mapping[float, pd.DataFrame] = field(default_factory=dict)  # per level, each column by itself
    warnings: tuple[str, ...] = ()  # why it may be wrong; also in the log


def make_forecast(
    series: Series, normal: np.ndarray, *, levels: Sequence[float], non_negative_volume: bool
) -> Forecast:
    """From the decoded paths of one series, float32 [samples, steps, 6] in the normalised domain.

    The mean is taken of the normalised values, as published. Volume and amount can come out negative, since nothing in
    the model knows better; `non_negative_volume` cuts every path at 0 first.
    """
    import pandas as pd

    def frame(values: np.ndarray) -> pd.DataFrame:
        return pd.DataFrame(values, columns=list(COLUMNS), index=series.future)

    paths = series.restored(normal)
    if non_negative_volume:
        paths[..., VOLUMES] = np.maximum(paths[..., VOLUMES], 0.0)
        mean = paths.mean(axis=0)
    else:
        mean = series.restored(np.mean(normal, axis=0))
    cuts = np.quantile(paths, levels, axis=0).astype(np.float32) if levels else ()
    of_levels = {level: frame(cut) for level, cut in zip(levels, cuts, strict=True)}
    return Forecast(frame(mean), paths, of_levels, series.warnings)
