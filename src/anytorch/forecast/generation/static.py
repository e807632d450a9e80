"""Steps of fixed shapes: recorded once on devices that can, then replayed without Python, launches or waiting.

A step of one row per window is a few hundred tiny kernels; on a fast accelerator starting them takes several times as long
as running them. Here the step's place is a tensor, ids go from one step to the next on the device, and the random numbers
lie ready, so that a recording of one step is every step. Where our own kernels can be used (`kernel_step`), the second
forecast of a shape begins to have them compiled. The first forecast after that measures which are the fastest (`choice`) and
compares them with torch's on its first row; if they agree, they take over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anytorch import logs
from anytorch.devices.oom import is_out_of_memory
from anytorch.forecast.decoding.cache import Cache
from anytorch.forecast.decoding.decoder import Replayed
from anytorch.forecast.decoding.sampling import Ahead, Sampler
from anytorch.forecast.kernels.choice import Chooser
from anytorch.forecast.kernels.row_step import SAME_VALUES, KernelStep, why_not
from anytorch.forecast.model.fused import per_sample
from anytorch.measured.verdict import Verdict
from anytorch.recorded.graphs import Recorder
from anytorch.recorded.staging import can_stage

log = logs.logger(__name__)

FEWEST_STEPS = 16  # a recording costs about four steps
# The next steps' random numbers are made while the device computes these: few, so that the first ones are soon there.
NOISE_STEPS = 8


@dataclass(frozen=True)
class Shape:
    """The shape a recording is valid for."""

    series: int
    samples: int
    longest: int
    mixed: bool
    steps: int
    capacity: int
    evict: bool
    max_context: int
    sampler: Sampler
    kernels: bool = False  # our own may be used


class StaticSteps:
    """The steps after the first, for windows that all still grow (or evict)."""

    def __init__(self, cache: Cache, shape: Shape, record: bool) -> None:
        self.cache, self.shape, self.sampler = cache, shape, shape.sampler
        decoder = cache.decoder
        rows, device = shape.series * shape.samples, decoder.device
        self.counters = torch.zeros(2, dtype=torch.long, device=device)
        self.at, self.slot = self.counters[:1], self.counters[1:]
        self.s1 = torch.zeros(rows, shape.steps + 1, dtype=torch.long, device=device)
        self.s2 = torch.zeros_like(self.s1)
        self.future = torch.zeros(shape.series, shape.steps, decoder.width, device=device, dtype=decoder.dtype)
        self.noise: tuple[Tensor, Tensor] | None = None
        if not shape.sampler.greedy:
            first, second = (torch.ones(NOISE_STEPS, rows, size, device=device) for size in decoder.sizes)
            self.noise = (first, second)
        self.recorder = Recorder(device) if record else None
        self.replayed = Replayed(device, record)
        self.pinned = can_stage(device)
        self.kernel_step: KernelStep | None = None  # what computes the steps, if it is not torch
        self.trial: KernelStep | None = None  # what may become it
        self.no_kernels = why_not(decoder, rows) if shape.kernels else "not asked for"
        self.tried_kernels = bool(self.no_kernels)
        self.chooser: Chooser | None = None
        self.runs = 0

    @property
    def choices(self) -> dict[str, Verdict]:
        """What was measured or remembered for our kernels."""
        return {} if self.kernel_step is None else self.kernel_step.choices

    def run(
        self, s1: Tensor, s2: Tensor, future: Tensor, ahead: Ahead | None, tick: Callable[[int], None]
    ) -> tuple[Tensor, Tensor]:
        """From the first step's ids [rows] to those of all steps, [rows, steps + 1]. The cache has its prompts.

        `ahead` gives the draws in the blocks of `blocks(steps)`; None for the greedy choice.
        """
        # Compiling takes longer than a forecast: it pays where forecasts of this shape are made again.
        if self.runs and not self.tried_kernels and (self.chooser is None or self.chooser.ready):
            self._try_kernels(s1, s2, future)
        self.runs += 1
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
        if self.kernel_step is not None:
            self.kernel_step.start(s1, s2, per_sample(self.future[:, :1], self.shape.samples)[:, 0])

    def _try_kernels(self, s1: Tensor, s2: Tensor, future: Tensor) -> None:
        """Let our kernels compute the first row after torch has: they are used if they agree."""
        if self.chooser is None:
            self.chooser = Chooser(self.cache.decoder.device, self.recorder is not None)
        self._start(s1, s2, future)
        try:
            if self.trial is None:
                ids = (self.s1, self.s2)
                self.trial = KernelStep(self.cache, self.sampler, self.counters, ids, self.future, self.noise)
            step = self.trial
            if not self._choose(step, self.chooser):
                return  # they are being compiled
            self.tried_kernels = True
            self._start(s1, s2, future)
            wanted = [part.clone() for part in self._step_by_torch()]
            self.kernel_step = step
            self.no_kernels = self._differences(step, wanted, (s1, s2, future))
            if self.no_kernels and step.forget():
                log.warning("%s: built-in kernels instead of measured ones: %s", step.decoder.device, self.no_kernels)
                self.no_kernels = self._differences(step, wanted, (s1, s2, future))
        except Exception as exc:  # noqa: BLE001  (a compiler or a driver may raise anything; torch's kernels are always there)
            self.tried_kernels = True
            self.no_kernels = "not enough memory" if is_out_of_memory(exc) else f"{type(exc).__name__}: {exc}"
        self.close()
        if self.no_kernels:
            self.kernel_step = None
            log.warning("%s: torch's kernels instead of ours: %s", self.cache.decoder.device, self.no_kernels)
        elif self.recorder is not None:
            self.recorder.clear()  # of torch's kernels

    def close(self) -> None:
        """Cancel the running compilation."""
        if self.chooser is not None:
            self.chooser.stop()
        self.chooser = self.trial = None

    def _choose(self, step: KernelStep, chooser: Chooser) -> bool:
        """Let the step use the fastest measured kernels; on any error it keeps its built-in ones."""
        try:
            return step.choose(chooser)
        except Exception as exc:  # noqa: BLE001  (a driver may raise anything)
            step.forget()
            log.warning("%s: kernels are not measured: %s: %s", step.decoder.device, type(exc).__name__, exc)
            return True

    def _differences(self, step: KernelStep, wanted: Sequence[Tensor], given: tuple[Tensor, Tensor, Tensor]) -> str:
        """Why our kernels' first row is wrong; "" if it is right."""
        self._start(*given)
        step()
        apart = max(float((a - b).abs().max()) for a, b in zip((step.last, step.logits[1]), wanted, strict=True))
        return "" if apart <= SAME_VALUES else f"they differ from torch's by {apart:.2g}"

    def _step(self) -> Tensor:
        """Add row `at`, generate row `at` + 1. No shape and no address depends on which step it is."""
        if self.kernel_step is not None:
            self.kernel_step()
        else:
            self._step_by_torch()
        return self.counters

    def _step_by_torch(self) -> tuple[Tensor, Tensor]:
        """→ the row's context and its logits of s2."""
        decoder, cache = self.cache.decoder, self.cache
        time = self.future.index_select(1, self.at)
        time = per_sample(time, self.shape.samples)
        x = decoder.embed(self.s1.index_select(1, self.at), self.s2.index_select(1, self.at), time)
        last = cache.advance(x, self.at)
        noise_1, noise_2 = (
            (None, None) if self.noise is None else (part.index_select(0, self.slot)[0] for part in self.noise)
        )
        s1 = self.sampler.draw(decoder.s1_logits(last), noise_1)
        s2_logits = cache.s2_logits(last, s1, self.at)
        s2 = self.sampler.draw(s2_logits, noise_2)
        self.counters += 1
        self.s1.index_copy_(1, self.at, s1[:, None])
        self.s2.index_copy_(1, self.at, s2[:, None])
        return last, s2_logits


def blocks(steps: int) -> list[int]:
    """Steps in the portions in which their random numbers come."""
    whole, rest = divmod(steps, NOISE_STEPS)
    return [NOISE_STEPS] * whole + ([rest] if rest else [])
