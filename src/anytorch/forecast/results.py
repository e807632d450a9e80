"""From generated ids to a forecast: decoded paths, their mean, and on request samples and quantiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from anytorch.forecast.candles.tables import FIELDS
from anytorch.forecast.candles.tables import pandas as pd
from anytorch.forecast.decoding.decoder import Codec
from anytorch.forecast.generation.generate import GenerationPlan, Prompts
from anytorch.forecast.inputs import Series


@dataclass(frozen=True)
class Paths:
    """What the model generated for one series: ids [samples, steps] and normalised values [samples, steps, 6]."""

    s1: np.ndarray
    s2: np.ndarray
    normal: np.ndarray


def values_of(codec: Codec, prompts: Prompts, s1: Tensor, s2: Tensor, plan: GenerationPlan) -> list[Paths]:
    """Decode what was generated, behind as much of its history as the window holds."""
    lengths, samples = prompts.lengths, plan.samples
    before = [max(0, min(length, plan.max_context - plan.pred_len)) for length in lengths]
    normal: list[Tensor] = []
    for kept, group in groupby(range(len(lengths)), before.__getitem__):
        places = list(group)
        shared = tuple(
            torch.stack([part[place, lengths[place] - kept : lengths[place]] for place in places])
            for part in (prompts.s1, prompts.s2)
        )
        own = [part[places[0] * samples : (places[-1] + 1) * samples] for part in (s1, s2)]
        windows = []  # as many as the rows need
        for start, end, skipped in decode_windows(plan.pred_len, plan.max_context):
            before_it = (shared[0], shared[1]) if start == 0 else None
            generated = codec.decode(before_it, (own[0][:, start:end], own[1][:, start:end]), plan.limit_rows)
            windows.append(generated[:, skipped:])
        normal.append(torch.cat(windows, dim=1))
    values, ids_1, ids_2 = (part.cpu().numpy() for part in (torch.cat(normal), s1, s2))
    cuts = [slice(place * samples, (place + 1) * samples) for place in range(len(lengths))]
    return [Paths(ids_1[cut], ids_2[cut], values[cut]) for cut in cuts]


def decode_windows(pred_len: int, max_context: int) -> list[tuple[int, int, int]]:
    """Which generated rows are decoded together: (start, end, how many of them only serve as context).

    Up to `max_context` rows one window holds them all, as published (which cannot go further). Beyond that windows
    overlap by half, so that no row but the very first stands without history.
    """
    if pred_len <= max_context:
        return [(0, pred_len, 0)]
    step = max(1, max_context // 2)
    windows = [(0, max_context, 0)]
    while (done := windows[-1][1]) < pred_len:
        end = min(done + step, pred_len)
        windows.append((end - max_context, end, max_context - (end - done)))
    return windows


def joined(parts: Sequence[Paths]) -> Paths:
    if len(parts) == 1:
        return parts[0]
    return Paths(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("s1", "s2", "normal")))


VOLUMES = (FIELDS.index("volume"), FIELDS.index("amount"))


@dataclass(frozen=True)
class Forecast:
    """The answer of `KronosPredictor.forecast`."""

    mean: pd.DataFrame  # what `predict` gives
    samples: np.ndarray  # float32 [samples, steps, 6]: every path
    quantiles: Mapping[float, pd.DataFrame] = field(default_factory=dict)  # per level, each column by itself
    warnings: tuple[str, ...] = ()  # why it may be wrong; also in the log


def make_forecast(
    series: Series, normal: np.ndarray, *, levels: Sequence[float], non_negative_volume: bool
) -> Forecast:
    """From the decoded paths of one series, float32 [samples, steps, 6] in the normalised domain.

    The mean is taken of the normalised values, as published. Volume and amount can come out negative, since nothing in
    the model knows better; `non_negative_volume` cuts every path at 0 first.
    """

    def frame(values: np.ndarray) -> pd.DataFrame:
        return pd.DataFrame(values, columns=list(FIELDS), index=series.future)

    paths = series.restored(normal)
    if non_negative_volume:
        paths[..., VOLUMES] = np.maximum(paths[..., VOLUMES], 0.0)
        mean = paths.mean(axis=0)
    else:
        mean = series.restored(np.mean(normal, axis=0))
    cuts = np.quantile(paths, levels, axis=0).astype(np.float32) if levels else ()
    of_levels = {level: frame(cut) for level, cut in zip(levels, cuts, strict=True)}
    return Forecast(frame(mean), paths, of_levels, series.warnings)
