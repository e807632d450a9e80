"""From generated ids back to values: in as many windows as they need, behind their history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from anytorch.forecast.decoding.tokens import Codec
from anytorch.forecast.generation.generate import Plan, Prompts


@dataclass(frozen=True)
class Paths:
    """What the model generated for one series: ids [samples, steps] and normalised values [samples, steps, 6]."""

    s1: np.ndarray
    s2: np.ndarray
    normal: np.ndarray


def values_of(codec: Codec, prompts: Prompts, s1: Tensor, s2: Tensor, plan: Plan) -> list[Paths]:
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
        rows = slice(places[0] * samples, (places[-1] + 1) * samples)
        normal.append(decode_long(codec, (shared[0], shared[1]), (s1[rows], s2[rows]), plan))
    values, ids_1, ids_2 = (part.cpu().numpy() for part in (torch.cat(normal), s1, s2))
    cuts = [slice(place * samples, (place + 1) * samples) for place in range(len(lengths))]
    return [Paths(ids_1[cut], ids_2[cut], values[cut]) for cut in cuts]


def decode_long(codec: Codec, shared: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], plan: Plan) -> Tensor:
    """Normalised values of all generated rows, in as many windows as they need."""
    parts = [
        codec.decode(shared if start == 0 else None, (own[0][:, start:end], own[1][:, start:end]), plan.limit_rows)[
            :, skipped:
        ]
        for start, end, skipped in decode_windows(plan.pred_len, plan.max_context)
    ]
    return torch.cat(parts, dim=1)


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
