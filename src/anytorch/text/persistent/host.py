"""Decoding on the CPU in one call of our C++: all workers stay at work from the first token to the last.

Between two ops of torch the threads meet, and a one-row product of it uses one core. Here every worker has a fixed part of
every phase, the weights are read once for all texts, and tokens are chosen without coming back.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anytorch import settings
from anytorch.errors import OutOfMemory, UsageError
from anytorch.text.decoders.loading import load_decoder, spec_of
from anytorch.text.decoders.model import Decoder, KeyValues, RMSNorm
from anytorch.text.decoders.rotary import tables
from anytorch.text.decoders.rows import Rows
from anytorch.text.packed.encoder import available_cores
from anytorch.text.persistent import panels
from anytorch.text.persistent.host_code import Draw, Layer, Matrix, Model, Run, load_library, packed_matrix
from anytorch.text.persistent.panels import PackedWeights, linear_shapes

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ENDED, NO_NUMBER = -1, -2  # in place of a token
HEAD, WORDS = "lm_head", "model.embed_tokens"
CALL_S = 0.5  # of a generation that is computed without coming back to Python
PORTION = 64  # tokens of a prompt that are read at once: their inputs stay in a core's second cache
FEW = PORTION  # tokens up to which ours read float32 weights as fast as torch's products of matrices, or faster


class HostKernel(Rows):
    """`rows` texts of up to `positions` tokens each by a decoder in host memory, float32, bfloat16 or float16.

    It reads the decoder's own weights: nothing is copied but norms and biases. Sums are float32 whatever the dtype, in an
    order that does not depend on the rows beside. Not for several threads at once; `stop` may be called from another.

    `weights="int8"` or `"int4"`: everything is computed with a packed copy of all linear layers, the head too; their inputs
    are rounded to 8 bits, each to within 1/254 of the largest of its group of 32. Given as `PackedWeights` (of
    `load_packed_decoder`) the copy is shared, and the decoder needs no weights of its own for them.
    Raises NativeUnavailable where there is no compiler.
    """

    def __init__(
        self,
        decoder: Decoder,
        rows: int = 1,
        positions: int | None = None,
        threads: int | None = None,
        weights: Literal["int8", "int4"] | PackedWeights | None = None,
    ) -> None:
        spec, weight = decoder.spec, decoder.model.embed_tokens.weight
        if weight.device.type != "cpu" or weight.dtype not in FORMATS:
            raise UsageError(f"the decoder is {weight.dtype} on {weight.device}; this kernel takes floats of the CPU")
        if not 1 <= rows <= 1024 or not 1 <= (threads or 1) <= settings.MOST_THREADS:
            raise UsageError(f"rows={rows}, threads={threads}: use 1 to 1,024 of each")
        if isinstance(weights, str) and weights not in panels.FORMATS:
            raise UsageError(f"weights={weights!r} is unknown; use {', '.join(map(repr, panels.FORMATS))} or None")
        self._library: Any = load_library()
        self.decoder, self.rows, self.threads = decoder, rows, threads or available_cores()
        self.positions = min(positions or spec.max_positions, spec.max_positions)
        self.kept = KeyValues(spec, rows, self.positions, weight.dtype, "cpu")
        self.lengths = [0] * rows
        self._held: list[Any] = []  # what the structures point to
        self._packed = packed_of(decoder, weights) if isinstance(weights, str) else weights
        self._names = {id(module): name for name, module in decoder.named_modules()}
        self._layers = (Layer * spec.layers)(*self._each_layer())
        cos, sin = tables(spec, self.positions)
        body = decoder.model
        self._model = Model(
            *(spec.vocabulary, spec.width, spec.layers, spec.heads, spec.kv_heads, spec.head_width, spec.inner),
            self.positions,
            spec.norm_eps,
            FORMATS[weight.dtype],
            0 if self._packed is None else self._packed.bits,
            self._address(body.embed_tokens.weight),
            self._floats(body.norm.weight),
            self._matrix(decoder.lm_head),
            self._floats(cos),
            self._floats(sin),
            ctypes.addressof(self._layers),
        )
        self._tokens = torch.full((rows,), ENDED, dtype=torch.int64)
        self._places = torch.zeros(rows, dtype=torch.int64)
        self._logits = torch.empty(rows, spec.vocabulary)
        self._before = 0  # tokens that earlier calls of a generation computed
        self._done, self._stopping = ctypes.c_int64(), ctypes.c_int32()
        self._busy = threading.RLock()
        self.trace: Tensor | None = None  # int64: what every worker did when, written by each run (code/trace.h)

    # --- texts -----------------------------------------------------------------------------------------------------

    def step(self) -> Tensor:
        """Logits of the tokens that `follow` put there, [rows, vocabulary]. They are overwritten by the next step."""
        self._before = 0
        self._run(1, ())
        self._tokens.fill_(ENDED)
        return self._logits

    def _go_on(self, going: list[int], made: list[list[int]], tokens: int, ends: Collection[int]) -> None:
        """Add the tokens of all rows, computed in calls of about CALL_S: Python sees Ctrl-C only between them.

        With a trace in one call, as a trace is of one."""
        left, computed = tokens - 1, 0
        steps = 1 if self.trace is None else left
        with self._used():
            while going and not self._stopping.value:
                if computed:
                    for row in going:
                        self.follow(row, made[row][-1])
                begun = time.perf_counter()
                found = self.ahead(going, steps, ends, before=computed)
                took = time.perf_counter() - begun
                computed, left = computed + steps, left - steps
                for row, ids in zip(going, found, strict=True):
                    if ids and ids[-1] == NO_NUMBER:
                        raise ArithmeticError("the model computed NaN or infinity")
                    made[row] += ids[:-1] if ids and ids[-1] in ends else ids
                whole = [
                    row for row, ids in zip(going, found, strict=True) if len(ids) == steps and ids[-1] not in ends
                ]
                going = [row for row in whole if left > 0 and self.lengths[row] < self.positions]
                steps = max(1, min(left, round(steps * CALL_S / max(took, 1e-9))))

    @contextmanager
    def _used(self) -> Iterator[None]:
        """By this thread alone. Raises UsageError."""
        if not self._busy.acquire(blocking=False):
            raise UsageError("another thread is using this kernel")
        try:
            yield
        finally:
            self._busy.release()

    def _put(self, row: int, token: int, place: int) -> None:
        self._tokens[row], self._places[row] = token, place

    def _wait(self, row: int) -> None:
        self._tokens[row] = ENDED

    @property
    def done(self) -> int:
        """How many tokens of each text the run that is under way, or the last one, has computed."""
        return self._before + self._done.value

    def ahead(
        self,
        rows: Sequence[int],
        steps: int,
        ends: Collection[int] = (),
        draws: Mapping[int, Draw] | None = None,
        *,
        before: int = 0,
    ) -> list[list[int]]:
        """Up to so many tokens of each of these rows, which `follow` gave a token, in one call; the last may be one of
        `ends`, or NO_NUMBER. All but the last are kept. `draws`: how rows choose; left out: the most likely token.
        `before`: tokens of the same generation that other calls computed."""
        begun = {row: int(self._places[row]) for row in rows}
        self._before = before
        try:
            made = self._run(steps, ends, draws)
        finally:
            self._tokens.fill_(ENDED)
        found = []
        for row in rows:
            self.lengths[row] = int(self._places[row])
            found.append(made[: self.lengths[row] - begun[row], row].tolist())
        return found

    def _read(self, row: int, ids: Sequence[int], begin: int, every: bool) -> Tensor:
        self._before = 0
        floats = self._packed is None and self.decoder.model.embed_tokens.weight.dtype == torch.float32
        if floats and not every and len(ids) > FEW:
            return super()._read(row, ids, begin, every)
        asked = len(ids) if every else 1
        logits = torch.empty(asked, self.decoder.spec.vocabulary)
        for first in range(0, len(ids), PORTION):
            some = torch.tensor(ids[first : first + PORTION], dtype=torch.int64)
            end = first + len(some)
            silent = max(
                0, min(len(some), len(ids) - asked - first)
            )  # tokens of this portion whose logits nobody wants
            places = torch.arange(begin + first, begin + end)
            out = logits[max(0, first + silent - (len(ids) - asked)) :]
            made = torch.empty(1, max(1, len(some) - silent), dtype=torch.int64)
            homes = torch.full_like(some, row)
            self._call(len(some), 1, some, places, made, (), out, homes=homes, first=silent)
        return logits if every else logits[0]

    def _run(self, steps: int, ends: Collection[int], draws: Mapping[int, Draw] | None = None) -> Tensor:
        """What followed, [steps, rows up to the last that has a token]; ENDED after a text's end."""
        begun = (self._tokens >= 0).nonzero()
        rows = int(begun[-1]) + 1 if len(begun) else 1  # those after it would be computed for nothing
        made = torch.full((steps, rows), ENDED, dtype=torch.int64)
        chosen = None if not draws else (Draw * rows)(*(draws.get(row, LIKELIEST) for row in range(rows)))
        self._call(rows, steps, self._tokens, self._places, made, ends, self._logits, draws=chosen)
        return made

    def _call(
        self,
        rows: int,
        steps: int,
        tokens: Tensor,
        places: Tensor,
        made: Tensor,
        ends: Collection[int],
        logits: Tensor,
        *,
        homes: Tensor | None = None,
        first: int = 0,
        draws: Any = None,
    ) -> None:
        with self._used():
            end = torch.tensor(sorted(ends), dtype=torch.int64)
            trace = self.trace
            self._done.value = 0
            run = Run(
                *(rows, steps, len(ends), self.threads),
                *(one.data_ptr() for one in (tokens, places, made, end, logits)),
                ctypes.addressof(self._done),
                ctypes.addressof(self._stopping),
                None if homes is None else homes.data_ptr(),
                first,
                None if draws is None else ctypes.addressof(draws),
                *((None, 0) if trace is None else (trace.data_ptr(), trace.numel())),
            )
            if self._library.decode(ctypes.byref(self._model), ctypes.byref(run)):
                raise OutOfMemory("no memory is left for the workers of a generation", hint="use fewer rows")

    # --- weights ---------------------------------------------------------------------------------------------------

    def _each_layer(self) -> Iterator[Layer]:
        for number, layer in enumerate(self.decoder.model.layers):
            own: Any = layer.self_attn
            mlp: Any = layer.mlp
            matrices = [own.q_proj, own.k_proj, own.v_proj, own.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
            norms: list[Any] = [layer.input_layernorm, layer.post_attention_layernorm]
            norms += [getattr(own, "q_norm", None), getattr(own, "k_norm", None)]
            yield Layer(
                *map(self._matrix, matrices),
                *(None if norm is None else self._norm(norm) for norm in norms),
                self.kept.keys[number].data_ptr(),
                self.kept.values[number].data_ptr(),
                own.window,
            )

    @property
    def weight_nbytes(self) -> int:
        """Bytes of weights that one token reads, whatever the number of rows."""
        if self._packed is not None:
            return self._packed.nbytes
        linears = (one.weight for one in self.decoder.modules() if isinstance(one, nn.Linear))
        return sum(one.numel() * one.element_size() for one in linears)

    def _matrix(self, layer: nn.Linear) -> Matrix:
        bias = None if layer.bias is None else self._floats(layer.bias)
        if self._packed is None:
            return Matrix(self._address(layer.weight), bias, *layer.weight.shape, None, 1.0)
        packed = self._packed.by_name[self._names[id(layer)]]
        self._held.append(packed)
        return packed_matrix(packed, bias)

    def _norm(self, norm: RMSNorm) -> int:
        return self._floats(norm.weight)

    def _address(self, tensor: Tensor) -> int:
        whole = tensor.detach().contiguous()
        self._held.append(whole)
        return whole.data_ptr()

    def _floats(self, tensor: Tensor) -> int:
        return self._address(tensor.float())


LIKELIEST = Draw(0.0, 1.0, 1.0, 0, None, None)


def packed_of(decoder: Decoder, weights: str) -> PackedWeights:
    """A packed copy of a decoder's linear layers. Raises OutOfMemory."""
    packed = PackedWeights(linear_shapes(decoder), weights)
    for name, one in decoder.named_modules():
        if isinstance(one, nn.Linear):
            packed.add(name, one.weight)
    return packed


def load_packed_decoder(folder: Path, dtype: str, weights: str) -> tuple[Decoder, PackedWeights]:
    """The decoder in a folder with its linear layers in panels alone: each is packed as it is read, so that no more than one
    is ever there in floats. Embeddings, norms and biases are of `dtype`. Raises ModelError, NativeUnavailable."""
    load_library()  # before anything is read: there may be no compiler
    spec = spec_of(folder)
    with torch.device("meta"):
        shapes = linear_shapes(Decoder(spec))
    packed = PackedWeights(shapes, weights)

    def taken(name: str, tensor: Tensor) -> bool:
        layer = name.removesuffix(".weight")
        if layer in shapes and name.endswith(".weight"):
            packed.add(layer, tensor)
            return True
        if layer == WORDS and spec.tied:  # a tied head is packed, too, and the table stays for looking words up
            packed.add(HEAD, tensor)
        return False

    return load_decoder(folder, "cpu", dtype, taken=taken), packed
