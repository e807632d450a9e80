"""Steps of fixed shapes: recorded once on devices that can, then replayed without Python, launches or waiting.

A step of one row per window is a few hundred tiny kernels; on a fast accelerator starting them takes several times as long
as running them. Here the step's place is a tensor, ids go from one step to the next on the device, and the random numbers
lie ready, so that a recording of one step is every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from anytorch.engines.forecast.ahead import Ahead
from anytorch.engines.forecast.cache import Cache
from anytorch.engines.forecast.sampling import Sampler
from anytorch.models.encoders.graphs import Recorder
from anytorch.models.encoders.staging import can_stage
from anytorch.models.kronos.fused import per_sample

FEWEST_STEPS = 16  # a recording costs about four steps
# The next steps' random numbers are made while the device computes these: few, so that the first ones are soon there.
NOISE_STEPS = 8


@dataclass(frozen=True)
class Shape:
    """What a recording is good for."""

    series: int
    samples: int
    longest: int
    mixed: bool
    steps: int
    capacity: int
    evict: bool
    max_context: int
    sampler: Sampler


class StaticSteps:
    """The steps after the first, for windows that all still grow (or evict)."""

    def __init__(self, cache: Cache, shape: Shape, record: bool) -> None:
        self.cache, self.shape, self.sampler = cache, shape, shape.sampler
        decoder = cache.decoder
        rows, device = shape.series * shape.samples, decoder.device
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.slot = torch.zeros(1, dtype=torch.long, device=device)
        self.s1 = torch.zeros(rows, shape.steps + 1, dtype=torch.long, device=device)
        self.s2 = torch.zeros_like(self.s1)
        self.future = torch.zeros(shape.series, shape.steps, decoder.width, device=device, dtype=decoder.dtype)
        self.noise: tuple[Tensor, Tensor] | None = None
        if not shape.sampler.greedy:
            first, second = (torch.ones(NOISE_STEPS, rows, size, device=device) for size in decoder.sizes)
            self.noise = (first, second)
        self.recorder = Recorder(device) if record else None
        self.pinned = can_stage(device)

    def run(
        self, s1: Tensor, s2: Tensor, future: Tensor, ahead: Ahead | None, tick: Callable[[int], None]
    ) -> tuple[Tensor, Tensor]:
        """From the first step's ids [rows] to those of all steps, [rows, steps + 1]. The cache has its prompts.

        `ahead` gives the draws in the blocks of `blocks(steps)`; None for the greedy choice.
        """
        if self.recorder is not None and not self.recorder.recordings and not self.recorder.failed:
            self._start(s1, s2, future)
            self.recorder.record("step", self._step)  # runs it, too: what that wrote is written again
        self._start(s1, s2, future)
        recording = None if self.recorder is None else self.recorder.recordings.get("step")
        done = 0
        for block in blocks(self.shape.steps):
            if ahead is not None and self.noise is not None:
                for buffer, numbers in zip(self.noise, ahead.take(), strict=True):
                    buffer[:block].copy_(numbers)
                self.slot.zero_()
            for _ in range(block):
                if recording is not None:
                    recording.replay()
                else:
                    self._step()
            done += block
            tick(done + 1)
        return self.s1, self.s2

    def _start(self, s1: Tensor, s2: Tensor, future: Tensor) -> None:
        self.at.zero_()
        self.slot.zero_()
        self.s1[:, 0], self.s2[:, 0] = s1, s2
        self.future.copy_(future)

    def _step(self) -> Tensor:
        """Add row `at`, generate row `at` + 1. No shape and no address depends on which step it is."""
        decoder, cache = self.cache.decoder, self.cache
        time = self.future.index_select(1, self.at)
        time = per_sample(time, self.shape.samples)
        x = decoder.embed(self.s1.index_select(1, self.at), self.s2.index_select(1, self.at), time)
        last = cache.advance(x, self.at)
        noise_1, noise_2 = (
            (None, None) if self.noise is None else (part.index_select(0, self.slot)[0] for part in self.noise)
        )
        s1 = self.sampler.draw(decoder.s1_logits(last), noise_1)
        s2 = self.sampler.draw(cache.s2_logits(last, s1, self.at), noise_2)
        self.at += 1
        self.slot += 1
        self.s1.index_copy_(1, self.at, s1[:, None])
        self.s2.index_copy_(1, self.at, s2[:, None])
        return self.at


def blocks(steps: int) -> list[int]:
    """Steps in the portions in which their random numbers come."""
    whole, rest = divmod(steps, NOISE_STEPS)
    return [NOISE_STEPS] * whole + ([rest] if rest else [])
