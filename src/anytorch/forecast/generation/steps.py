"""Steps of fixed shapes: recorded once on devices that can, then replayed without Python, launches or waiting.

A step of one row per window is a few hundred tiny kernels; on a fast accelerator starting them takes several times as long
as running them. In `StaticSteps` the step's place is a tensor, ids go from one step to the next on the device, and the
random numbers lie ready, so that a recording of one step is every step. Where our own kernels can be used (`KernelStep`),
the second forecast of a shape begins to have them compiled. The first forecast after that measures which are the fastest
(`choice`) and compares them with torch's on its first row; if they agree, they take over.

`RolledSteps` are those of full windows. A rolled step computes its window anew (see `generate`). The history's part of it
does not depend on what is drawn, so that of many coming steps is known and goes through the model in one pass, which leaves
its keys and values. A step then has only the own rows to compute. They are given fixed shapes: rows that are not there yet
stand at the end, where causal attention does not look, and what is missing of the history is hidden by a bias; so one
recording serves all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anytorch import logs
from anytorch.devices.oom import is_out_of_memory
from anytorch.forecast.decoding.decoder import Cache, Decoder, Replayed, hidden
from anytorch.forecast.decoding.sampling import Ahead, Sampler
from anytorch.forecast.kernels.attention import WindowAttention, WindowCut, window_part
from anytorch.forecast.kernels.choice import Chooser
from anytorch.forecast.kernels.products import ChosenBlock, Layer, Products, power_of_two, take
from anytorch.forecast.kernels.row_step import SAME_VALUES, KernelStep, why_not
from anytorch.forecast.model.fused import (
    FusedBlock,
    Tables,
    attend_masked,
    attend_products,
    attend_whole,
    make_tables,
    per_sample,
    window_mask,
)
from anytorch.measured.verdict import Verdict
from anytorch.recorded.graphs import Recorder
from anytorch.recorded.staging import can_stage

log = logs.logger(__name__)


class FixedSteps:
    """What both kinds have: counters and random numbers where a recording finds them, and kernels of ours to be tried."""

    def __init__(
        self, decoder: Decoder, sampler: Sampler, rows: int, noise_steps: int, no_kernels: str, record: bool
    ) -> None:
        """`no_kernels` says why ours cannot be used; "" if they may be."""
        self.decoder, device = decoder, decoder.device
        self.counters = torch.zeros(2, dtype=torch.long, device=device)
        self.noise: tuple[Tensor, Tensor] | None = None
        if not sampler.greedy:
            first, second = (torch.ones(noise_steps, rows, size, device=device) for size in decoder.sizes)
            self.noise = (first, second)
        self.recorder = Recorder(device) if record else None
        self.replayed = Replayed(device, record)
        self.no_kernels, self.tried_kernels = no_kernels, bool(no_kernels)
        self.chooser: Chooser | None = None

    def close(self) -> None:
        """Cancel the running compilation."""
        if self.chooser is not None:
            self.chooser.stop()
        self.chooser = None

    def _step(self) -> Tensor:
        """Compute the step that the counters say. No shape and no address depends on which one it is."""
        raise NotImplementedError

    def _stepping(self, begin: Callable[[], None]) -> Callable[[], object]:
        """What takes a step, from where `begin` puts the counters: a recording, made now if there is none, or `_step`."""
        if self.recorder is not None and not self.recorder.recordings and not self.recorder.failed:
            begin()
            self.recorder.record("step", self._step)  # runs it, too: what that wrote is written again
        begin()
        recording = None if self.recorder is None else self.recorder.recordings.get("step")
        return self._step if recording is None else recording.replay

    def _noise_at(self, place: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if self.noise is None:
            return None, None
        first, second = (part.index_select(0, place)[0] for part in self.noise)
        return first, second


def differences(ours: Iterable[Tensor], wanted: Iterable[Tensor]) -> str:
    """Why our kernels' values are wrong; "" if they are right."""
    apart = max(float((a - b).abs().max()) for a, b in zip(ours, wanted, strict=True))
    return "" if apart <= SAME_VALUES else f"they differ from torch's by {apart:.2g}"


# --- windows that grow ------------------------------------------------------------------------------------------------

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


class StaticSteps(FixedSteps):
    """The steps after the first, for windows that all still grow (or evict)."""

    def __init__(self, cache: Cache, shape: Shape, record: bool) -> None:
        self.cache, self.shape, self.sampler = cache, shape, shape.sampler
        decoder, rows, device = cache.decoder, shape.series * shape.samples, cache.decoder.device
        no_kernels = why_not(decoder, rows) if shape.kernels else "not requested"
        super().__init__(decoder, shape.sampler, rows, NOISE_STEPS, no_kernels, record)
        self.at, self.slot = self.counters[:1], self.counters[1:]
        self.s1 = torch.zeros(rows, shape.steps + 1, dtype=torch.long, device=device)
        self.s2 = torch.zeros_like(self.s1)
        self.future = torch.zeros(shape.series, shape.steps, decoder.width, device=device, dtype=decoder.dtype)
        self.pinned = can_stage(device)
        self.kernel_step: KernelStep | None = None  # what computes the steps, if it is not torch
        self.trial: KernelStep | None = None  # what may become it
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
        take_step = self._stepping(partial(self._start, s1, s2, future))
        done = 0
        for block in blocks(self.shape.steps):
            if ahead is not None and self.noise is not None:
                for buffer, numbers in zip(self.noise, ahead.take(), strict=True):
                    buffer[:block].copy_(numbers)
                self.slot.zero_()
            for _ in range(block):
                take_step()
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
            self.chooser = Chooser(self.decoder.device, self.recorder is not None)
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
                log.warning("%s: built-in kernels instead of measured ones: %s", self.decoder.device, self.no_kernels)
                self.no_kernels = self._differences(step, wanted, (s1, s2, future))
        except Exception as exc:  # noqa: BLE001  (a compiler or a driver may raise anything; torch's kernels are always there)
            self.tried_kernels = True
            self.no_kernels = "not enough memory" if is_out_of_memory(exc) else f"{type(exc).__name__}: {exc}"
        self.close()
        if self.no_kernels:
            self.kernel_step = None
            log.warning("%s: torch's kernels instead of ours: %s", self.decoder.device, self.no_kernels)
        elif self.recorder is not None:
            self.recorder.clear()  # of torch's kernels

    def close(self) -> None:
        super().close()
        self.trial = None

    def _choose(self, step: KernelStep, chooser: Chooser) -> bool:
        """Let the step use the fastest measured kernels; on any error it keeps its built-in ones."""
        try:
            return step.choose(chooser)
        except Exception as exc:  # noqa: BLE001  (a driver may raise anything)
            step.forget()
            log.warning("%s: kernels are not measured: %s: %s", self.decoder.device, type(exc).__name__, exc)
            return True

    def _differences(self, step: KernelStep, wanted: Sequence[Tensor], given: tuple[Tensor, Tensor, Tensor]) -> str:
        """Why our kernels' first row is wrong; "" if it is right."""
        self._start(*given)
        step()
        return differences((step.last, step.logits[1]), wanted)

    def _step(self) -> Tensor:
        """Add row `at`, generate row `at` + 1."""
        if self.kernel_step is not None:
            self.kernel_step()
        else:
            self._step_by_torch()
        return self.counters

    def _step_by_torch(self) -> tuple[Tensor, Tensor]:
        """→ the row's context and its logits of s2."""
        decoder, cache = self.decoder, self.cache
        time = self.future.index_select(1, self.at)
        time = per_sample(time, self.shape.samples)
        x = decoder.embed(self.s1.index_select(1, self.at), self.s2.index_select(1, self.at), time)
        last = cache.advance(x, self.at)
        noise_1, noise_2 = self._noise_at(self.slot)
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


# --- windows that are full --------------------------------------------------------------------------------------------

Draws = Callable[[], tuple[Any, Any]]  # the next step's noise for s1 and s2, if there is any

FEWEST_ROLLED = 3  # fewer are not worth preparing
OWN_ROWS = 64  # own rows are rounded up to a multiple of these: so many steps share a recording
MOST_WINDOWS = 16  # of each series, prepared at once
FEW_QUERIES = 16384  # of all rows and heads: fewer leave a fused attention's device idle
TIMED_LAYERS = 2  # a window's product takes long enough to be timed in few layers
MOST_NBYTES = 2**28  # for their keys and values


@dataclass(frozen=True)
class RolledShape:
    """The shape a recording is valid for."""

    series: int
    samples: int
    max_context: int
    pred_len: int
    windows: int  # prepared at once
    shared_rows: int  # of history, at most
    own_rows: int
    sampler: Sampler
    kernels: bool = False  # our own may be used


def plan_rolled(
    decoder: Decoder, lengths: Sequence[int], samples: int, max_context: int, pred_len: int, step: int, limit_rows: int,
    sampler: Sampler, kernels: bool = False,
) -> RolledShape | None:  # fmt: skip
    """How the steps around `step` are prepared; None where that does not pay or does not fit.

    The answer is the same for all steps that share a recording.
    """
    series, whole = len(lengths), step // OWN_ROWS * OWN_ROWS
    own_rows = min(pred_len - 1, whole + OWN_ROWS - 1)
    first = max(whole, max_context - min(lengths) + 1)  # the first of these steps at which all windows are full
    last = min(own_rows, max_context - 1)  # the last at which there is a row of history
    shared_rows = max_context - first
    if last - step + 1 < FEWEST_ROLLED or series * samples * own_rows > limit_rows:
        return None
    nbytes = series * shared_rows * decoder.width * (2 * len(decoder.blocks) + 1) * decoder.norm.element_size()
    windows = min(MOST_WINDOWS, last - first + 1, limit_rows // (series * shared_rows), MOST_NBYTES // nbytes)
    if windows < 2:
        return None
    return RolledShape(series, samples, max_context, pred_len, windows, shared_rows, own_rows, sampler, kernels)


class RolledSteps(FixedSteps):
    """Prepared windows of all series, and the step over their own rows."""

    def __init__(self, decoder: Decoder, shape: RolledShape, record: bool) -> None:
        rows, device = shape.series * shape.samples, decoder.device
        no_kernels = why_not(decoder, 1) if shape.kernels else "not requested"
        super().__init__(decoder, shape.sampler, rows, shape.windows, no_kernels, record)
        self.shape, self.record = shape, record
        kind: Any = {"device": device, "dtype": decoder.dtype}
        layers, heads, head_width, width = len(decoder.blocks), decoder.heads, decoder.head_width, decoder.width
        places = (shape.windows, shape.series, heads, shape.shared_rows, head_width)
        # Zeros, not rubbish: what is hidden is multiplied by a weight of zero.
        self.keys, self.values = torch.zeros(2, layers, *places, **kind)
        self.context = torch.zeros(shape.windows, shape.series, shape.shared_rows, width, **kind)
        # One row more than is computed: the last step writes there.
        self.own = torch.zeros(rows, shape.own_rows + 1, width, **kind)
        self.future = torch.zeros(shape.series, shape.pred_len, width, **kind)
        self.window, self.step = self.counters[:1], self.counters[1:]
        self.ids = torch.zeros(2, rows, shape.windows, dtype=torch.long, device=device)
        every = torch.arange(shape.max_context + shape.own_rows, device=device)
        self.tables = make_tables(every[None], head_width, decoder.dtype)
        sizes = (shape.samples, shape.own_rows, shape.max_context)
        self.attention = WindowAttention(self.keys, self.values, self.tables, self.counters, *sizes)
        self.own_places, self.shared_places = every[: shape.own_rows], every[: shape.shared_rows]
        self.causal = window_mask(0, shape.own_rows, self.own)
        self.blocks: Sequence[FusedBlock] = decoder.blocks
        self.cut: WindowCut | None = None  # of our attention; None: torch's
        self.choices: dict[str, Verdict] = {}
        self.tried_at = (0, 0)  # the steps whose products it chooses for
        self.forecast: object = None  # whose steps these are
        self.forecasts = 0

    def count(self, step: int) -> int:
        """How many steps from `step` on can be prepared together."""
        last = min(self.shape.own_rows, self.shape.pred_len - 1, self.shape.max_context - 1)
        return min(self.shape.windows, last - step + 1)

    def start(self, forecast: object, generated: Tensor, step: int, future: Tensor) -> None:
        """The own rows so far, [rows, at least `step`, width], and the embedded times of all steps of a `forecast`."""
        if forecast is not self.forecast:
            self.forecast = forecast
            self.forecasts += 1
        self.own[:, :step] = generated[:, :step]
        self.future.copy_(future)

    def run(self, history: Tensor, lengths: Sequence[int], step: int, count: int, draws: Draws) -> Tensor:
        """`count` steps from `step` on; → ids of s1 and s2, [2, rows, count]. `history` are the first block's inputs."""
        # As in `StaticSteps`: compiling pays where forecasts of this shape are made again.
        if self.forecasts > 1 and not self.tried_kernels and self._may_try((step, count)):
            self._try_kernels(history, lengths, step, count)
        self.replayed(("prepare", tuple(lengths), step, count), partial(self.prepare, lengths, step, count), history)
        take_step = self._stepping(partial(self._go_to, step))
        for place in range(count):
            numbers = draws()
            if self.noise is not None:
                for buffer, drawn in zip(self.noise, numbers, strict=True):
                    buffer[place].copy_(drawn)
            take_step()
        return self.ids[:, :, :count]

    def _may_try(self, place: tuple[int, int]) -> bool:
        """True if kernels may be tried at these steps, whose shapes they were compiled for."""
        return self.chooser is None or (self.chooser.ready and self.tried_at == place)

    def _try_kernels(self, history: Tensor, lengths: Sequence[int], step: int, count: int) -> None:
        """Choose how the products are computed (torch's way is built in), and compare one step with torch's."""
        decoder = self.decoder
        if self.chooser is None:
            self.chooser, self.tried_at = Chooser(decoder.device, self.record), (step, count)
        history = history.to(decoder.device)
        wanted = self._values_of(history, lengths, step, count)
        products = Products(decoder.device, lambda product: None)
        blocks = [
            ChosenBlock(**vars(block), layer=Layer(module), products=products)
            for block, module in zip(decoder.blocks, decoder.model.transformer, strict=True)
        ]
        try:
            shape, works = self.shape, []
            prepared = count * shape.series * (shape.max_context - step)
            for rows in {
                power_of_two(number): number for number in (prepared, len(self.own) * shape.own_rows)
            }.values():
                like = torch.empty(rows, decoder.width, device="meta")  # its shape is what counts
                works += [work for block in blocks[:TIMED_LAYERS] for work in block.works(like)]
            self._go_to(step)
            by_torch = partial(self._attend_by_torch, self._around())
            attending, cuts = window_part(self.attention, by_torch, min(TIMED_LAYERS, len(blocks)))
            found = take(products, works, self.chooser, attending)
            if found is None:
                return  # they are being compiled
            self.choices = found
            self._use(blocks, cuts[found[attending.name].chosen] if attending.name in found else None)
            if self.cut is None and not any(products.chosen.values()):
                self.no_kernels = "torch's are the fastest here"
            else:
                self.no_kernels = differences(self._values_of(history, lengths, step, count), wanted)
        except Exception as exc:  # noqa: BLE001  (a compiler or a driver may raise anything; torch's products have just worked)
            self.no_kernels = f"{type(exc).__name__}: {exc}"
        self.tried_kernels = True
        self.close()
        if self.no_kernels:
            self._use(decoder.blocks, None)
            log.info("%s: torch's products in full windows: %s", decoder.device, self.no_kernels)

    def _use(self, blocks: Sequence[FusedBlock], cut: WindowCut | None) -> None:
        self.blocks, self.cut = blocks, cut
        if self.recorder is not None:
            self.recorder.clear()  # what is recorded goes the old way
        self.replayed = Replayed(self.decoder.device, self.record)

    def _values_of(self, history: Tensor, lengths: Sequence[int], step: int, count: int) -> list[Tensor]:
        """The context of the first of these steps, and its logits of s2. What is written is written again."""
        self.prepare(lengths, step, count, history)
        self._go_to(step)
        return [part.clone() for part in self._compute()]

    def _go_to(self, step: int) -> None:
        self.window.zero_()
        self.step.fill_(step)

    def prepare(self, lengths: Sequence[int], step: int, count: int, history: Tensor) -> Tensor:
        """The history's part of the windows of `count` steps through all blocks: keys, values and context."""
        most = self.shape.max_context - step  # rows of history that the first of these windows has
        windows = history.new_zeros(count, self.shape.series, most, history.shape[-1])
        for place in range(count):
            rows = most - place
            for series, length in enumerate(lengths):
                windows[place, series, :rows] = history[series, length - rows : length]
        x = windows.flatten(0, 1)
        tables = (self.tables[0][:, :, :most], self.tables[1][:, :, :most])
        for layer, block in enumerate(self.blocks):
            q, k, v = block.project(x, tables)
            self.keys[layer, :count, :, :, :most] = k.unflatten(0, (count, -1))
            self.values[layer, :count, :, :, :most] = v.unflatten(0, (count, -1))
            x = block.finish(x, attend_whole(q, k, v))
        self.context[:count, :, :most] = self.decoder.context(x).unflatten(0, (count, -1))
        return self.counters

    def _around(self) -> tuple[Tables, Tensor, Tensor]:
        """Of this step's windows: the own rows' positions, what is not there of the history, and what each row may see."""
        shape, decoder = self.shape, self.decoder
        before = shape.max_context - self.step  # rows of history in this window
        cos, sin = (table.index_select(2, self.own_places + before) for table in self.tables)
        shared_bias = hidden(self.shared_places >= before, decoder.dtype)
        mask = torch.cat((shared_bias.expand(shape.own_rows, -1), self.causal), dim=1)
        return (cos, sin), shared_bias, mask

    def _attend_by_torch(self, around: tuple[Tables, Tensor, Tensor], layer: int, qkv: Tensor) -> Tensor:
        """From q, k and v side by side, [rows, 3 × width], to [rows, width]."""
        width = qkv.shape[1] // 3
        shape = (len(self.own), self.shape.own_rows, width)
        q, k, v = self.decoder.blocks[layer].turned(qkv, shape, around[0])
        few = q.shape[0] * q.shape[1] * q.shape[2] <= FEW_QUERIES
        attend = attend_products if few else attend_masked
        prefix = (self.keys[layer].index_select(0, self.window)[0], self.values[layer].index_select(0, self.window)[0])
        return attend(q, prefix, (k, v), around[2]).transpose(1, 2).reshape(-1, width)

    def _step(self) -> Tensor:
        """Generate the pair of ids of `step`."""
        self._compute()
        return self.counters

    def _compute(self) -> tuple[Tensor, Tensor]:
        """The step; → its row's context and logits of s2."""
        decoder, shape = self.decoder, self.shape
        around = self._around()
        shared_bias = around[1]
        x = self.own[:, : shape.own_rows]
        by_torch = partial(self._attend_by_torch, around)
        attend = by_torch if self.cut is None else partial(self.attention.attend, self.cut)
        for layer, block in enumerate(self.blocks):
            x = block.through(x, partial(attend, layer))
        context = decoder.context(x)
        last = context.index_select(1, self.step - 1)[:, 0]
        noise_1, noise_2 = self._noise_at(self.window)
        s1 = shape.sampler.draw(decoder.s1_logits(last), noise_1)
        shared = self.context.index_select(0, self.window)[0]
        own_bias = hidden(self.own_places >= self.step, decoder.dtype)
        s2_logits = decoder.s2_logits(last, s1, shared, context, shared_bias, own_bias)
        s2 = shape.sampler.draw(s2_logits, noise_2)
        self.ids.index_copy_(2, self.window, torch.stack((s1, s2))[:, :, None])
        time = per_sample(self.future.index_select(1, self.step), shape.samples)
        self.own.index_copy_(1, self.step, decoder.embed(s1[:, None], s2[:, None], time))
        self.counters += 1
        return last, s2_logits
