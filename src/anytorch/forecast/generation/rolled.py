"""Steps of full windows, several prepared at once and recorded, for devices where launching a kernel is the main cost.

A rolled step computes its window anew (see `generate`). The history's part of it does not depend on what is drawn, so
that of many coming steps is known and goes through the model in one pass, which leaves its keys and values. A step then
has only the own rows to compute. They are given fixed shapes: rows that are not there yet stand at the end, where causal
attention does not look, and what is missing of the history is hidden by a bias; so one recording serves all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anytorch import logs
from anytorch.forecast.decoding.cache import hidden
from anytorch.forecast.decoding.decoder import Decoder, Replayed
from anytorch.forecast.decoding.sampling import Sampler
from anytorch.forecast.kernels.attention import WindowAttention, WindowCut, window_part
from anytorch.forecast.kernels.choice import Chooser
from anytorch.forecast.kernels.products import ChosenBlock, Layer, Products, power_of_two, take
from anytorch.forecast.kernels.row_step import SAME_VALUES, why_not
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

log = logs.logger(__name__)

Draws = Callable[[], tuple[Any, Any]]  # the next step's noise for s1 and s2, if there is any

FEWEST_STEPS = 3  # fewer are not worth preparing
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
    if last - step + 1 < FEWEST_STEPS or series * samples * own_rows > limit_rows:
        return None
    nbytes = series * shared_rows * decoder.width * (2 * len(decoder.blocks) + 1) * decoder.norm.element_size()
    windows = min(MOST_WINDOWS, last - first + 1, limit_rows // (series * shared_rows), MOST_NBYTES // nbytes)
    if windows < 2:
        return None
    return RolledShape(series, samples, max_context, pred_len, windows, shared_rows, own_rows, sampler, kernels)


class RolledSteps:
    """Prepared windows of all series, and the step over their own rows."""

    def __init__(self, decoder: Decoder, shape: RolledShape, record: bool) -> None:
        self.decoder, self.shape = decoder, shape
        rows, device = shape.series * shape.samples, decoder.device
        kind: Any = {"device": device, "dtype": decoder.dtype}
        layers, heads, head_width, width = len(decoder.blocks), decoder.heads, decoder.head_width, decoder.width
        places = (shape.windows, shape.series, heads, shape.shared_rows, head_width)
        # Zeros, not rubbish: what is hidden is multiplied by a weight of zero.
        self.keys, self.values = torch.zeros(2, layers, *places, **kind)
        self.context = torch.zeros(shape.windows, shape.series, shape.shared_rows, width, **kind)
        # One row more than is computed: the last step writes there.
        self.own = torch.zeros(rows, shape.own_rows + 1, width, **kind)
        self.future = torch.zeros(shape.series, shape.pred_len, width, **kind)
        self.counters = torch.zeros(2, dtype=torch.long, device=device)
        self.window, self.step = self.counters[:1], self.counters[1:]
        self.ids = torch.zeros(2, rows, shape.windows, dtype=torch.long, device=device)
        self.noise: tuple[Tensor, Tensor] | None = None
        if not shape.sampler.greedy:
            first, second = (torch.ones(shape.windows, rows, size, device=device) for size in decoder.sizes)
            self.noise = (first, second)
        every = torch.arange(shape.max_context + shape.own_rows, device=device)
        self.tables = make_tables(every[None], head_width, decoder.dtype)
        self.own_places, self.shared_places = every[: shape.own_rows], every[: shape.shared_rows]
        self.causal = window_mask(0, shape.own_rows, self.own)
        self.record = record
        self.recorder = Recorder(device) if record else None
        self.preparing = Replayed(device, record)
        self.blocks: Sequence[FusedBlock | ChosenBlock] = decoder.blocks
        self.cut: WindowCut | None = None  # of our attention; None: torch's
        self.choices: dict[str, Verdict] = {}
        self.no_kernels = why_not(decoder, 1) if shape.kernels else "not asked for"
        self.tried_kernels = bool(self.no_kernels)
        self.chooser: Chooser | None = None
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
        self.preparing(("prepare", tuple(lengths), step, count), partial(self.prepare, lengths, step, count), history)
        recording = None
        if self.recorder is not None and not self.recorder.failed:
            if not self.recorder.recordings:
                self._go_to(step)
                self.recorder.record("step", self._step)  # runs it, too: what that wrote is written again
            recording = self.recorder.recordings.get("step")
        self._go_to(step)
        for place in range(count):
            numbers = draws()
            if self.noise is not None:
                for buffer, drawn in zip(self.noise, numbers, strict=True):
                    buffer[place].copy_(drawn)
            if recording is not None:
                recording.replay()
            else:
                self._step()
        return self.ids[:, :, :count]

    def _may_try(self, place: tuple[int, int]) -> bool:
        """True if kernels may be tried at these steps, whose shapes they were compiled for."""
        return self.chooser is None or (self.chooser.ready and self.tried_at == place)

    def close(self) -> None:
        """Cancel the running compilation."""
        if self.chooser is not None:
            self.chooser.stop()
        self.chooser = None

    def _try_kernels(self, history: Tensor, lengths: Sequence[int], step: int, count: int) -> None:
        """Choose how the products are computed (torch's way is built in), and compare one step with torch's."""
        decoder = self.decoder
        if self.chooser is None:
            self.chooser, self.tried_at = Chooser(decoder.device, self.record), (step, count)
        history = history.to(decoder.device)
        wanted = self._values_of(history, lengths, step, count)
        products = Products(decoder.device, lambda product: None)
        blocks = [
            ChosenBlock(block, Layer(module), products)
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
            attending, cuts = window_part(self.windows(), by_torch, min(TIMED_LAYERS, len(blocks)))
            found = take(products, works, self.chooser, attending)
            if found is None:
                return  # they are being compiled
            self.choices = found
            self._use(blocks, cuts[found[attending.name].chosen] if attending.name in found else None)
            if self.cut is None and not any(products.chosen.values()):
                self.no_kernels = "torch's are the fastest here"
            else:
                ours = self._values_of(history, lengths, step, count)
                apart = max(float((a - b).abs().max()) for a, b in zip(ours, wanted, strict=True))
                self.no_kernels = "" if apart <= SAME_VALUES else f"they differ from torch's by {apart:.2g}"
        except Exception as exc:  # noqa: BLE001  (a compiler or a driver may raise anything; torch's products have just worked)
            self.no_kernels = f"{type(exc).__name__}: {exc}"
        self.tried_kernels = True
        self.close()
        if self.no_kernels:
            self._use(decoder.blocks, None)
            log.info("%s: torch's products in full windows: %s", decoder.device, self.no_kernels)

    def _use(self, blocks: Sequence[FusedBlock | ChosenBlock], cut: WindowCut | None) -> None:
        self.blocks, self.cut = blocks, cut
        if self.recorder is not None:
            self.recorder.clear()  # what is recorded goes the old way
        self.preparing = Replayed(self.decoder.device, self.record)

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

    def windows(self) -> WindowAttention:
        """What our attention reads."""
        sizes = (self.shape.samples, self.shape.own_rows, self.shape.max_context)
        return WindowAttention(self.keys, self.values, self.tables, self.counters, *sizes)

    def _around(self) -> tuple[Tables, Tensor, Tensor]:
        """Of this step's windows: the own rows' positions, what is not there of the history, and what each row may see."""
        shape, decoder = self.shape, self.decoder
        before = shape.max_context - self.step  # rows of history in this window
        cos, sin = (table.index_select(2, self.own_places + before) for table in self.tables)
        shared_bias = hidden(self.shared_places >= before, decoder.dtype)
        mask = torch.cat((shared_bias.expand(shape.own_rows, -1), self.causal), dim=1)
        return (cos, sin), shared_bias, mask

    def _attend(self, around: tuple[Tables, Tensor, Tensor], layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        few = q.shape[0] * q.shape[1] * q.shape[2] <= FEW_QUERIES
        attend = attend_products if few else attend_masked
        prefix = (self.keys[layer].index_select(0, self.window)[0], self.values[layer].index_select(0, self.window)[0])
        return attend(q, prefix, (k, v), around[2])

    def _attend_by_torch(self, around: tuple[Tables, Tensor, Tensor], layer: int, qkv: Tensor) -> Tensor:
        """From q, k and v side by side, [rows, 3 × width], to [rows, width]."""
        width = qkv.shape[1] // 3
        shape = torch.Size((len(self.own), self.shape.own_rows, width))
        q, k, v = self.decoder.blocks[layer].turned(qkv, shape, around[0])
        return self._attend(around, layer, q, k, v).transpose(1, 2).reshape(-1, width)

    def _step(self) -> Tensor:
        """Generate the pair of ids of `step`. No shape and no address depends on which step it is."""
        self._compute()
        return self.counters

    def _compute(self) -> tuple[Tensor, Tensor]:
        """The step; → its row's context and logits of s2."""
        decoder, shape = self.decoder, self.shape
        around = self._around()
        shared_bias = around[1]
        windows = self.windows()
        x = self.own[:, : shape.own_rows]
        for layer, block in enumerate(self.blocks):
            if isinstance(block, FusedBlock):
                q, k, v = block.project(x, around[0])
                x = block.finish(x, self._attend(around, layer, q, k, v))
            elif self.cut is None:
                x = block.through(x, partial(self._attend_by_torch, around, layer))
            else:
                x = block.through(x, partial(windows.attend, self.cut, layer))
        context = decoder.context(x)
        last = context.index_select(1, self.step - 1)[:, 0]
        noise_1, noise_2 = (
            (None, None) if self.noise is None else (part.index_select(0, self.window)[0] for part in self.noise)
        )
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
