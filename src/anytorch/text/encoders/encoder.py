"""TorchEncoder: packed token ids in, one vector per text out, on any torch device.

A batch is cut into chunks of known shape (`shapes`), each is sent from pinned memory, computed by a recorded graph where
the device can, pooled there, and fetched into the caller's array when it is asked for. `submit` returns before the device
has computed anything: the host prepares the next batch meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from anytorch import logs
from anytorch.devices.choose import resolve
from anytorch.devices.locate import locate
from anytorch.devices.precision import capabilities
from anytorch.devices.types import Caps
from anytorch.errors import InputError, UsageError
from anytorch.recorded.graphs import Recorder
from anytorch.recorded.staging import Part, Ring, can_stage
from anytorch.text.checkpoints.checkpoint import Checkpoint, Floats, Ints
from anytorch.text.checkpoints.spec import EncoderSpec
from anytorch.text.encoders import strategy
from anytorch.text.encoders.layers import EncoderModule
from anytorch.text.encoders.layouts import Layout, OneByOne, Packed, Rows, check_pooling, normalise, pool
from anytorch.text.encoders.loading import load_module
from anytorch.text.encoders.shapes import Chunk, PackedShape, RowShape, largest, plan_packed, plan_rows
from anytorch.text.encoders.strategy import LAYOUTS, EncoderPlan

log = logs.logger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DEVICE_TOKENS = 32768  # of one chunk: enough to fill a large GPU, little enough that the first answer comes soon
HOST_TOKENS = 2048  # of one chunk on the CPU: its activations stay in the cache
IN_FLIGHT = 2
SLOTS = 10  # chunks under way: two batches and more, so that a host that was away for a while finds the device busy


class TorchEncoder(AbstractContextManager["TorchEncoder"]):
    """One model on one torch device; `anytorch.text.embed.protocol.AsyncEncoder`.

    `device` is a torch.device or a name `anytorch.resolve` takes. `dtype`, `layout` and `graphs` are found by measurement
    on first use with "auto" and remembered. `normalize` makes every vector's length 1 on the device. `calibration`, ids and
    starts of a hundred texts or so, is what `quantization` to less than 8 bits looks at (`calibrate`).

    Raises ModelError for a checkpoint that does not fit the spec, UsageError for unknown options.
    """

    padded = False  # a batch is cut by length before anything is padded: it costs the sum of its lengths

    def __init__(
        self,
        spec: EncoderSpec,
        checkpoint: Checkpoint,
        device: str | torch.device | None = None,
        dtype: str = "auto",
        pooling: str | Sequence[str] = "mean",
        quantization: str | None = None,
        *,
        normalize: bool = False,
        layout: str = "auto",
        graphs: bool | None = None,
        chunk_tokens: int | None = None,
        calibration: tuple[Ints, Ints] | None = None,
    ) -> None:
        self.spec, self.poolings, self.normalize = spec, check_pooling(pooling), normalize
        if dtype != "auto" and dtype not in DTYPES:
            raise UsageError(f"unknown dtype {dtype!r}; dtypes: auto, {', '.join(DTYPES)}")
        if layout != "auto" and layout not in LAYOUTS:
            raise UsageError(f"unknown layout {layout!r}; layouts: auto, {', '.join(LAYOUTS)}")
        self.device = device if isinstance(device, torch.device) else resolve(device).device
        backend, index = locate(self.device)
        self.caps: Caps = capabilities(backend.name, index)
        self.device_name = f"{self.device} on {backend.title}"
        self.width = spec.width * len(self.poolings)
        self.staged = can_stage(self.device)
        self.in_flight = IN_FLIGHT if self.staged else 1
        self.chunk_tokens = chunk_tokens or (DEVICE_TOKENS if self.device.type != "cpu" else HOST_TOKENS)
        self.quantization = quantization
        self._calibration = calibration
        self._lock = threading.Lock()
        self._closed = False
        self.recorder: Recorder | None = None
        asked = strategy.question(self, dtype, layout, graphs)
        known = strategy.recalled(asked, self.device)
        if known is not None and known.kernels and not self.caps.triton:
            known = None  # Triton has been uninstalled since
        self.dtype_name = dtype if dtype != "auto" else known.dtype if known else self._accurate_dtype(checkpoint)
        self.module: EncoderModule = self._load(checkpoint, self.dtype_name, quantization)
        self._prepare()
        self.plan = known or strategy.choose(self, layout, graphs, asked)
        self.use(self.plan)

    # --- loading ---------------------------------------------------------------------------------------------------

    def _load(self, checkpoint: Checkpoint, dtype: str, quantization: str | None = None) -> EncoderModule:
        after_layer = None
        if quantization is not None:
            from anytorch.text.encoders.calibrate import LayerQuantizer

            after_layer = LayerQuantizer(self.spec, quantization, self._calibration)
        return load_module(self.spec, checkpoint, self.device, DTYPES[dtype], after_layer)

    def _accurate_dtype(self, checkpoint: Checkpoint) -> str:
        """The fastest dtype that gives the vectors of float32 on this device; float32 where none does."""
        stored = {checkpoint.dtype(name) for name in checkpoint.names()}
        candidates = strategy.half_dtypes(self.caps, self.device.type == "cpu", "BF16" in stored)
        if not candidates:
            return "float32"
        if 4 * self.spec.linear_weights > strategy.LARGEST_CHECKED_NBYTES:
            return candidates[0]  # too large to hold twice, even in turn; it was published to be used this way

        def vectors(dtype: str) -> Floats:
            self.module = self._load(checkpoint, dtype)
            self._prepare()
            self.use(EncoderPlan(dtype, "rows", False))
            try:
                return self.run(*strategy.sample(self.spec, 512))
            finally:
                del self.module

        reference = vectors("float32")
        for dtype in candidates:
            worst = strategy.worst_cosine(reference, vectors(dtype))
            if worst >= strategy.HALF_COSINE:
                return dtype
            log.info("%s: %s gives vectors with a cosine of %.6f to float32: not used", self.device, dtype, worst)
        return "float32"

    def _prepare(self) -> None:
        """Memory for the largest chunk: one buffer of numbers on the device, a ring of slots on the host."""
        tokens, rows = largest(self.chunk_tokens, self.spec.max_positions, fixed=self.device.type != "cpu")
        self.numbers = tokens + rows + 1
        self._input = torch.zeros(self.numbers, dtype=torch.int32, device=self.device)
        self._ring = Ring(SLOTS if self.staged else 2, self.numbers, rows, self.width, self.device, self.staged)

    def use(self, plan: EncoderPlan, recorder: Recorder | None = None) -> None:
        """Compute by this plan from now on, with a recorder of its own or the one given."""
        self.plan = plan
        self.module.fuse(plan.fused)
        self._kernels: Any = None
        self.module.use_add_norm(None)
        if plan.kernels:
            from anytorch.text.encoders import kernels

            self._kernels = kernels
            if not (self.spec.pre_norm or self.spec.rms_norm):
                self.module.use_add_norm(kernels.add_norm)
        self.recorder = (recorder or Recorder(self.device)) if plan.graphs else None

    # --- computing -------------------------------------------------------------------------------------------------

    def run(self, ids: Ints, starts: Ints) -> Floats:
        return self.submit(ids, starts).result()

    def submit(
        self, ids: Ints, starts: Ints, out: Floats | None = None, places: npt.NDArray[np.intp] | None = None
    ) -> Pending:
        """Start a batch on the device; `.result()` waits for it.

        With `out`, float32[…, width], text i's vector is written to its row i, or to row `places[i]`: straight from pinned
        memory to where the caller wants it.
        """
        lengths = np.diff(starts)
        self._check(ids, starts, lengths)
        if out is None:
            out, places = np.empty((len(lengths), self.width), dtype=np.float32), None
        self._check_out(out, lengths, places)
        with self._lock, torch.inference_mode():
            # Kernels, graphs and caches are per shape on every device but the CPU.
            fixed = self.device.type != "cpu" and self.plan.layout != "one-by-one"
            cut = plan_rows if self.plan.layout == "rows" else plan_packed
            chunks = cut(lengths, self.chunk_tokens, self.spec.max_positions, fixed=fixed)
            parts = [self._launch(chunk, ids, starts, lengths, out, places) for chunk in chunks]
        return Pending(self, out, parts)

    def _check(self, ids: npt.NDArray[Any], starts: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> None:
        if self._closed:
            raise UsageError("this encoder is closed")
        if ids.dtype != np.int32 or starts.dtype != np.int32:
            raise InputError(f"token ids and starts are int32 arrays, not {ids.dtype} and {starts.dtype}")
        if len(starts) < 1 or starts[0] != 0 or starts[-1] != len(ids):
            raise InputError(f"starts must run from 0 to the {len(ids)} ids")
        if len(lengths) and (lengths.min() < 1 or lengths.max() > self.spec.max_positions):
            worst = int(lengths.argmin() if lengths.min() < 1 else lengths.argmax())
            raise InputError(
                f"text {worst} has {lengths[worst]} tokens; the model takes 1 to {self.spec.max_positions}",
                hint="truncate it when it is tokenized",
            )
        # An id outside the table is undefined behaviour on a GPU: it must not get there.
        if len(ids) and (int(ids.max()) >= self.spec.vocabulary or int(ids.min()) < 0):
            raise InputError(
                f"a token id is outside the model's vocabulary of {self.spec.vocabulary}",
                hint="the tokenizer belongs to another model",
            )

    def _check_out(self, out: npt.NDArray[Any], lengths: npt.NDArray[Any], places: npt.NDArray[Any] | None) -> None:
        if out.dtype != np.float32 or out.ndim != 2 or out.shape[1] != self.width:
            raise UsageError(f"out must be float32[…, {self.width}], not {out.dtype}{list(out.shape)}")
        if places is None and len(out) != len(lengths):
            raise UsageError(f"out has {len(out)} rows for {len(lengths)} texts")
        if places is not None and len(places) != len(lengths):
            raise UsageError(f"{len(places)} places for {len(lengths)} texts")

    def _launch(
        self, chunk: Chunk, ids: Ints, starts: Ints, lengths: Ints, out: Floats, places: npt.NDArray[np.intp] | None
    ) -> Part:
        slot = self._ring.take()
        shape, texts = chunk.shape, chunk.texts
        bounds: list[int] = []
        if isinstance(shape, PackedShape):
            begin, count = int(starts[texts[0]]), shape.rows + 1 + shape.tokens
            total = int(starts[texts[-1] + 1]) - begin
            numbers, kept = slot.numbers, len(texts)
            np.subtract(starts[texts[0] : texts[-1] + 2], begin, out=numbers[: kept + 1])
            numbers[kept + 1 : shape.rows + 1] = total  # texts of no tokens
            numbers[shape.rows + 1 : shape.rows + 1 + total] = ids[begin : begin + total]
            numbers[shape.rows + 1 + total : count] = 0  # tokens of nobody
            if self.plan.layout == "one-by-one":
                bounds = numbers[: kept + 1].tolist()
        else:
            count = shape.rows + shape.tokens
            fill_rows(slot.numbers, shape, ids, starts[texts], lengths[texts])
        slot.send(count, self._input)

        def work() -> Tensor:
            return self._compute(shape, bounds)

        vectors = work() if self.recorder is None else self.recorder.run(shape, work)
        slot.keep(vectors, len(texts))
        return Part(slot, out, texts if places is None else places[texts])

    def _compute(self, shape: PackedShape | RowShape, bounds: list[int]) -> Tensor:
        """The vectors of what lies in the input buffer, by its shape alone: this is what a graph records."""
        layout: Layout
        if isinstance(shape, RowShape):
            layout, begin = Rows(self._input[: shape.rows], shape.length), shape.rows
        elif self.plan.layout == "packed":
            short = None
            if self._kernels is not None and self._kernels.fits(shape.longest, self.spec.head_width, self.plan.blocks):
                short = partial(self._kernels.attend_short, blocks=self.plan.blocks)
            layout = Packed(self._input[: shape.rows + 1], shape.tokens, shape.longest, short)
            begin = shape.rows + 1
        else:
            layout = OneByOne(self._input[: shape.rows + 1], shape.tokens, shape.longest, bounds)
            begin = shape.rows + 1
        states = self.module(self._input[begin : begin + shape.tokens], layout)
        vectors = pool(states, layout, self.poolings)
        return normalise(vectors) if self.normalize else vectors

    # --- the rest --------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        weights = sum(p.numel() * p.element_size() for p in [*self.module.parameters(), *self.module.buffers()])
        return {
            "device": str(self.device),
            "device_name": self.device_name,
            "dtype": self.dtype_name,
            "kernels": f"torch {torch.__version__}, {self.plan.words}",
            "layout": self.plan.layout,
            "graphs": bool(self.recorder and not self.recorder.failed),
            "why": self.plan.why,
            "quantization": self.quantization,
            "weight_nbytes": weights,
            "chunk_tokens": self.chunk_tokens,
            "in_flight": self.in_flight,
            "threads": torch.get_num_threads() if self.device.type == "cpu" else None,
        }

    def close(self) -> None:
        if self._closed:
            return
        with self._lock:
            self._ring.clear()
            self._closed = True
            if self.recorder is not None:
                self.recorder.clear()
            del self.module, self._input

    def __exit__(self, *about: object) -> None:
        self.close()


class Pending:
    """A batch under way. Asking for the result again gives the same array."""

    def __init__(self, encoder: TorchEncoder, out: Floats, parts: list[Part]) -> None:
        self._encoder, self._out, self._parts = encoder, out, parts

    def result(self) -> Floats:
        for part in self._parts:
            part.collect()
        self._parts = []
        return self._out


def fill_rows(numbers: Ints, shape: RowShape, ids: Ints, starts: Ints, lengths: Ints) -> None:
    """Lengths, then the texts padded to a rectangle with id 0. Rows without a text get one token of filling."""
    kept = len(starts)
    numbers[:kept] = lengths
    numbers[kept : shape.rows] = 1
    table = numbers[shape.rows : shape.rows + shape.tokens].reshape(shape.rows, shape.length)
    table[:] = 0
    places = np.arange(shape.length, dtype=np.int32)
    owned = places[None, :] < lengths[:, None]
    table[:kept][owned] = ids[(starts[:, None] + places[None, :])[owned]]
