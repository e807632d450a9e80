"""Decoding on the CPU in one call of our C++: all workers stay at work from the first token to the last.

Between two ops of torch the threads meet, and a one-row product of it uses one core. Here every worker has a fixed part of
every phase, the weights are read once for all texts, and tokens are chosen without coming back.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anytorch import native, settings
from anytorch.errors import OutOfMemory, UsageError
from anytorch.text.decoders.model import Decoder, KeyValues, RMSNorm
from anytorch.text.decoders.rotary import tables
from anytorch.text.decoders.rows import Rows
from anytorch.text.packed.encoder import available_cores
from anytorch.text.persistent import panels
from anytorch.text.persistent.panels import PanelMemory, Panels

SOURCE = Path(__file__).parent / "code" / "decode.cpp"
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ENDED, NO_NUMBER = -1, -2  # in place of a token


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("q", "k", "v", "out", "gate", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("norm", "after", "q_norm", "k_norm", "keys", "values")),
        ("window", ctypes.c_int64),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("vocabulary", "width", "layers", "heads", "kv_heads", "head", "inner", "positions")
        ),
        ("eps", ctypes.c_float),
        ("format", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("words", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("logits", _Matrix),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "layer")),
    )


class _Run(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "steps", "ends", "threads")),
        *((name, ctypes.c_void_p) for name in ("tokens", "places", "made", "end", "logits", "done", "stopping")),
    )


class HostKernel(Rows):
    """`rows` texts of up to `positions` tokens each by a decoder in host memory, float32, bfloat16 or float16.

    It reads the decoder's own weights: nothing is copied but norms and biases. Sums are float32 whatever the dtype, in an
    order that does not depend on the rows beside. Not for several threads at once; `stop` may be called from another.

    `weights="int8"` or `"int4"`: tokens are computed with a packed copy of all linear layers, the head too; their inputs
    are rounded to 8 bits, each to within 1/254 of the largest of its group of 32. Prompts are read by the decoder, with its
    own weights.
    Raises NativeUnavailable where there is no compiler.
    """

    def __init__(
        self,
        decoder: Decoder,
        rows: int = 1,
        positions: int | None = None,
        threads: int | None = None,
        weights: Literal["int8", "int4"] | None = None,
    ) -> None:
        spec, weight = decoder.spec, decoder.lm_head.weight
        if weight.device.type != "cpu" or weight.dtype not in FORMATS:
            raise UsageError(f"the decoder is {weight.dtype} on {weight.device}; this kernel takes floats of the CPU")
        if not 1 <= rows <= 1024 or not 1 <= (threads or 1) <= settings.MOST_THREADS:
            raise UsageError(f"rows={rows}, threads={threads}: use 1 to 1,024 of each")
        if weights is not None and weights not in panels.FORMATS:
            raise UsageError(f"weights={weights!r} is unknown; use {', '.join(map(repr, panels.FORMATS))} or None")
        self._library: Any = load_library()
        self.decoder, self.rows, self.threads = decoder, rows, threads or available_cores()
        self.positions = min(positions or spec.max_positions, spec.max_positions)
        self.kept = KeyValues(spec, rows, self.positions, weight.dtype, "cpu")
        self.lengths = [0] * rows
        self._held: list[Any] = []  # what the structures point to
        self._packed = None if weights is None else self._room(weights)
        self._layers = (_Layer * spec.layers)(*self._each_layer())
        cos, sin = tables(spec, self.positions)
        body = decoder.model
        self._model = _Model(
            *(spec.vocabulary, spec.width, spec.layers, spec.heads, spec.kv_heads, spec.head_width, spec.inner),
            self.positions,
            spec.norm_eps,
            FORMATS[weight.dtype],
            0 if self._packed is None else self._packed.format.bits,
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
        self._done, self._stopping = ctypes.c_int64(), ctypes.c_int32()
        self._busy = threading.Lock()

    # --- texts -----------------------------------------------------------------------------------------------------

    def step(self) -> Tensor:
        """Logits of the tokens that `follow` put there, [rows, vocabulary]. They are overwritten by the next step."""
        self._run(1, ())
        self._tokens.fill_(ENDED)
        return self._logits

    def _go_on(self, going: list[int], made: list[list[int]], tokens: int, ends: Collection[int]) -> None:
        """In one call for all tokens."""
        begun = [row for row in range(self.rows) if self._tokens[row] >= 0]
        found = self._run(tokens - 1, ends)
        for row in begun:
            self.lengths[row] = int(self._places[row])
        self._tokens.fill_(ENDED)
        for row in going:
            for token in found[:, row].tolist():
                if token == NO_NUMBER:
                    raise ArithmeticError("the model computed NaN or infinity")
                if token < 0 or token in ends:
                    break
                made[row].append(token)

    def _put(self, row: int, token: int, place: int) -> None:
        self._tokens[row], self._places[row] = token, place

    def _wait(self, row: int) -> None:
        self._tokens[row] = ENDED

    @property
    def done(self) -> int:
        """How many tokens of each text the run that is under way, or the last one, has computed."""
        return self._done.value

    def _run(self, steps: int, ends: Collection[int]) -> Tensor:
        """What followed, [steps, rows up to the last that has a token]; ENDED after a text's end."""
        if not self._busy.acquire(blocking=False):
            raise UsageError("another thread is using this kernel")
        try:
            begun = (self._tokens >= 0).nonzero()
            rows = int(begun[-1]) + 1 if len(begun) else 1  # those after it would be computed for nothing
            made = torch.full((steps, rows), ENDED, dtype=torch.int64)
            end = torch.tensor(sorted(ends), dtype=torch.int64)
            self._done.value = 0
            run = _Run(
                *(rows, steps, len(ends), self.threads),
                *(one.data_ptr() for one in (self._tokens, self._places, made, end, self._logits)),
                ctypes.addressof(self._done),
                ctypes.addressof(self._stopping),
            )
            if self._library.decode(ctypes.byref(self._model), ctypes.byref(run)):
                raise OutOfMemory("no memory is left for the workers of a generation", hint="use fewer rows")
            return made
        finally:
            self._busy.release()

    # --- weights ---------------------------------------------------------------------------------------------------

    def _each_layer(self) -> Iterator[_Layer]:
        for number, layer in enumerate(self.decoder.model.layers):
            own: Any = layer.self_attn
            mlp: Any = layer.mlp
            matrices = [own.q_proj, own.k_proj, own.v_proj, own.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
            norms: list[Any] = [layer.input_layernorm, layer.post_attention_layernorm]
            norms += [getattr(own, "q_norm", None), getattr(own, "k_norm", None)]
            yield _Layer(
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

    def _room(self, weights: str) -> PanelMemory:
        shapes = [tuple(one.weight.shape) for one in self.decoder.modules() if isinstance(one, nn.Linear)]
        return PanelMemory(shapes, weights, self._library.ask_for_large_pages)

    def _matrix(self, layer: nn.Linear) -> _Matrix:
        bias = None if layer.bias is None else self._floats(layer.bias)
        if self._packed is None:
            return _Matrix(self._address(layer.weight), bias, *layer.weight.shape, None, 1.0)
        packed = self._packed.add(layer.weight)
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


def load_library() -> Any:
    """The compiled decoder; raises NativeUnavailable."""
    library: Any = native.load("decode", [SOURCE])
    library.ask_for_large_pages.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.ask_for_large_pages.restype = None
    library.panel_product.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    return library


def packed_matrix(packed: Panels, bias: int | None) -> _Matrix:
    """The C view of a packed matrix; `packed` and what `bias` is the address of must live as long as it."""
    return _Matrix(packed.codes.data_ptr(), bias, *packed.shape, packed.scales.data_ptr(), packed.scale)


def panel_product(x: Tensor, packed: Panels, bias: Tensor | None = None) -> Tensor:
    """x [texts, columns] by a packed matrix, [texts, rows], as the token loop computes it: for tests and measurements."""
    wide, added = x.float().contiguous(), None if bias is None else bias.float().contiguous()
    out = torch.empty(len(x), packed.shape[0])
    matrix = packed_matrix(packed, None if added is None else added.data_ptr())
    failed = load_library().panel_product(ctypes.byref(matrix), packed.bits, wide.data_ptr(), len(x), out.data_ptr())
    if failed:
        raise OutOfMemory(f"no memory is left to round {len(x)} inputs", hint="give it fewer inputs at a time")
    return out
