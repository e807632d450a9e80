"""Decoding on a GPU of NVIDIA in one launch: the token loop runs there, and the host looks on.

`code/decode.cu` says how. One text at a time, bfloat16 or float16, from compute capability 9.0 on (H100, H200, B200): it
streams weights by bulk copies, which earlier ones lack.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from anytorch.errors import InputError, UsageError
from anytorch.text.decoders.choosing import NO_NUMBER
from anytorch.text.decoders.model import Decoder, KeyValues
from anytorch.text.decoders.rotary import tables
from anytorch.text.decoders.spec import DecoderSpec
from anytorch.text.persistent import trace
from anytorch.text.persistent.cuda_weights import PackedDecoder, input_nbytes, phases
from anytorch.text.persistent.joined import joined, joined_biases
from anytorch.text.persistent.nvrtc import Kernel

SOURCE = Path(__file__).parent / "code" / "decode.cu"
WARPS, CHUNK = 8, 4096  # of a block; bytes of a slot, as in the source
MOST_SPLITS = 64
MOST_DEPTH = 6  # slots of a warp, of eight warps
NONE = 0xFFF0DEAD - 2**32
CAPABILITY = (9, 0)
HEAD_WIDTHS = (64, 128, 256)
LOOK_S = 1e-4  # between two looks at what a launch has made
SHARED = 227 << 10  # bytes of a block, from capability 9.0 on


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("qkv_bias", "out_bias", "gate_up_bias", "down_bias")),
        *((name, ctypes.c_void_p) for name in ("norm", "after", "q_norm", "k_norm", "keys", "values")),
        ("window", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("qkv_scale", "out_scale", "gate_up_scale", "down_scale")),
    )


class _Matrix(NamedTuple):
    address: int
    bias: int | None
    scale: float  # of all its products, where it is packed


def _run_of(layers: int) -> type[ctypes.Structure]:
    """The kernel's argument, which has all layers in it."""
    return type("_Run", (ctypes.Structure,), {"_fields_": (*_RUN, ("layers", _Layer * layers))})


_RUN = (
    *((name, ctypes.c_void_p) for name in ("head", "words", "norm", "cos", "sin", "flow", "best", "logits")),
    *((name, ctypes.c_void_p) for name in ("ends", "made", "done", "stopping")),
    ("positions", ctypes.c_int64),
    *((name, ctypes.c_int32) for name in ("steps", "token", "place", "end_count")),
    ("eps", ctypes.c_float),
    ("head_scale", ctypes.c_float),
    ("trace", ctypes.c_void_p),
)


@lru_cache(maxsize=16)
def _kernel(sizes: tuple[tuple[str, int], ...], device: torch.device) -> Kernel:
    return Kernel(SOURCE, "decode", dict(sizes), device)


def lay_out(decoder: Decoder) -> None:
    """Put the weights where a launch reads them. Whoever else keeps views of them does it before, or they stay twice."""
    for layer in decoder.model.layers:
        for name, layers in phases(layer).items():
            if len(layers) > 1:
                joined(layers, in_turns=name == "gate_up")


def refusal(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> str:
    """Why this kernel cannot decode such a model there, in words; "" if it can."""
    if (
        torch.get_device_module(device) is not torch.cuda or torch.version.cuda is None
    ):  # ROCm's torch calls itself so, too
        return f"it runs on GPUs of NVIDIA, not on {device}"
    if (found := torch.cuda.get_device_capability(device)) < CAPABILITY:
        return f"it needs compute capability 9.0, and this GPU has {found[0]}.{found[1]}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {dtype}"
    if spec.head_width not in HEAD_WIDTHS:
        return f"it takes heads of {', '.join(map(str, HEAD_WIDTHS))}, not of {spec.head_width}"
    if any(size % 8 for size in (spec.width, spec.q_width, spec.inner)):
        return f"widths {spec.width}, {spec.q_width} and {spec.inner} are not all multiples of 8"
    if spec.heads // spec.kv_heads > 8:
        return f"it takes at most 8 query heads per key head, not {spec.heads // spec.kv_heads}"
    if spec.kv_heads > torch.cuda.get_device_properties(device).multi_processor_count:
        return f"it takes at most as many key heads as the GPU has multiprocessors, not {spec.kv_heads}"
    return ""


@dataclass(frozen=True)
class Build:
    """The kernel of one model on one kind of GPU: its constants, and what a launch of it takes."""

    sizes: tuple[tuple[str, int], ...]
    blocks: int  # one for each multiprocessor
    threads: int  # of a block
    shared: int  # bytes of a block
    floats: int  # that a layer hands on


def build_of(
    spec: DecoderSpec,
    dtype: torch.dtype,
    bits: int,
    blocks: int,
    most_shared: int,
    *,
    profile: bool = False,
    constants: Mapping[str, int] | None = None,
) -> Build:
    """As many slots as a block's shared memory holds beside the vector that its weights are multiplied with. Pure.

    Raises UsageError where that is too little."""
    splits = max(1, min(MOST_SPLITS, blocks // spec.kv_heads))
    group, part = spec.heads // spec.kv_heads, spec.head_width + 2
    given = {"WARPS": WARPS, **(constants or {})}
    warps = given["WARPS"]
    fixed = max(
        *(input_nbytes(size, bits) for size in (spec.width, spec.q_width, spec.inner)),
        4 * ((group + 2) * spec.head_width + warps * group * part),
    )
    fixed = -(-fixed // 16) * 16 + (8 + 4) * warps + 4 * (-(-spec.width // blocks) + 8)
    depth = min(MOST_DEPTH * WARPS // warps, (most_shared - fixed) // (warps * (CHUNK + 8)))
    if depth < 2:
        raise UsageError(
            f"a row of {spec.inner} numbers does not fit into the {most_shared:,} bytes that a block shares"
        )
    sizes = {
        "WIDTH": spec.width,
        "INNER": spec.inner,
        "HEADS": spec.heads,
        "KV_HEADS": spec.kv_heads,
        "HEAD": spec.head_width,
        "VOCABULARY": spec.vocabulary,
        "LAYERS": spec.layers,
        "BLOCKS": blocks,
        "MOST_SPLITS": splits,
        "DEPTH": depth,
        "QK_NORM": int(spec.qk_norm),
        "HALF": int(dtype == torch.float16),
        "BITS": bits,
        "TRACE": int(profile),
        **given,
    }
    floats = spec.q_width + 2 * spec.kv_width + spec.q_width + 2 * spec.width + spec.inner
    floats += spec.kv_heads * splits * group * part
    return Build(
        tuple(sizes.items()),
        blocks,
        32 * warps,
        fixed + depth * warps * (CHUNK + 8),
        -(-floats // 4) * 4,  # four are looked at together
    )


def build_on(device: torch.device, spec: DecoderSpec, dtype: torch.dtype, bits: int = 16, **more: Any) -> Build:
    """The same for a GPU that is there."""
    found = torch.cuda.get_device_properties(device)
    most = getattr(found, "shared_memory_per_block_optin", SHARED)
    return build_of(spec, dtype, bits, found.multi_processor_count, most, **more)


class CudaKernel:
    """One text of up to `positions` tokens by a decoder on a GPU, from its first new token to its last in one launch.

    The decoder's weights move once: those of one phase come to lie in one matrix, of which its own are views from then
    on. Sums are float32. `kept`: the keys and values of several texts, which somebody else fills; a launch goes on with one
    of them. Not for several threads at once; `stop` may be called from another.

    `weights`: tokens are computed with a packed copy of all linear layers, the head too, and inputs rounded to 8 bits, each
    to within 1/254 of the largest of its group of 32. Prompts are read by the decoder, with its own weights.

    `profile`: `marks` has the times of a launch's last token (`trace.py`). `constants` of the source, to measure others.
    """

    def __init__(
        self,
        decoder: Decoder,
        positions: int | None = None,
        kept: KeyValues | None = None,
        weights: PackedDecoder | Literal["int8", "int4"] | None = None,
        *,
        profile: bool = False,
        constants: Mapping[str, int] | None = None,
    ) -> None:
        spec, weight = decoder.spec, decoder.lm_head.weight
        if why := refusal(spec, weight.dtype, weight.device):
            raise UsageError(f"this model cannot be decoded in one launch: {why}", hint="use RecordedSteps")
        self.decoder, self.device = decoder, weight.device
        self.packed = PackedDecoder(decoder, weights) if isinstance(weights, str) else weights
        bits = 16 if self.packed is None else self.packed.bits
        if kept is None:
            positions = min(positions or spec.max_positions, spec.max_positions)
            kept = KeyValues(spec, 1, positions, weight.dtype, self.device)
        self.kept, self.positions = kept, kept.positions
        build = build_on(self.device, spec, weight.dtype, bits, profile=profile, constants=constants)
        self.blocks, self.threads, self.shared = build.blocks, build.threads, build.shared
        self._kernel = _kernel(build.sizes, self.device)
        if self._kernel.blocks_at_once(self.threads, self.shared) < 1:
            raise UsageError(f"a block of {self.shared:,} bytes does not fit on a multiprocessor of {self.device}")
        self._held: list[Any] = []  # what the structures point to
        self._layers = (_Layer * spec.layers)(*self._each_layer())
        self._argument = _run_of(spec.layers)
        self._flow = torch.empty(2 * spec.layers * build.floats, dtype=torch.int32, device=self.device)
        self._best = torch.empty(4 * self.blocks, dtype=torch.int64, device=self.device)
        self.logits = torch.empty(spec.vocabulary, device=self.device)  # of a launch's last token
        self._done, self._stopping = (torch.zeros(1, dtype=torch.int32).pin_memory() for _ in range(2))
        self._made = torch.zeros(self.positions, dtype=torch.int32).pin_memory()
        self.marks = None
        if profile:
            shape = (self.blocks, spec.layers + 1, trace.MARKS)
            self.marks = torch.zeros(shape, dtype=torch.int64, device=self.device)
        cos, sin = tables(spec, self.positions)
        head = self._matrix("head", [decoder.lm_head])
        self._fixed = {
            "head": head.address,
            "head_scale": head.scale,
            "words": self._address(decoder.model.embed_tokens.weight),
            "norm": self._floats(decoder.model.norm.weight),
            "cos": self._floats(cos),
            "sin": self._floats(sin),
            "positions": self.positions,
            "eps": spec.norm_eps,
            "flow": self._flow.data_ptr(),
            "best": self._best.data_ptr(),
            "logits": self.logits.data_ptr(),
            "made": self._made.data_ptr(),
            "done": self._done.data_ptr(),
            "stopping": self._stopping.data_ptr(),
            "trace": None if self.marks is None else self.marks.data_ptr(),
        }
        self.length = 0

    # --- texts -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def read(self, ids: Sequence[int]) -> Tensor:
        """Begin anew with a prompt; gives the logits of its last token, [vocabulary]. Raises InputError."""
        if not ids or len(ids) > self.positions:
            raise InputError(f"a prompt of {len(ids)} tokens: there is room for 1 to {self.positions}")
        logits = self.decoder.read(ids, self.kept.of_row(0))
        self.length = len(ids)
        return logits.float()

    def generate(self, ids: Sequence[int], tokens: int, ends: Collection[int] = ()) -> list[int]:
        """The most likely tokens after a prompt: at most `tokens`, and up to the first of `ends`, which is left out."""
        return list(self.stream(ids, tokens, ends))

    def stream(self, ids: Sequence[int], tokens: int, ends: Collection[int] = ()) -> Generator[int, None, None]:
        """The same, each token as soon as the host sees it. Raises ArithmeticError where the model computes no numbers."""
        if tokens < 1:
            return
        first = int(self.read(ids).argmax())
        if first in ends:
            return
        yield first
        yield from self.follow(first, tokens - 1, ends)

    def follow(self, token: int, tokens: int, ends: Collection[int] = ()) -> Generator[int, None, None]:
        """The most likely tokens after `token`, which follows what has been read. Raises InputError."""
        if not 0 <= token < self.decoder.spec.vocabulary:
            raise InputError(f"token {token} is invalid: ids go from 0 to {self.decoder.spec.vocabulary - 1}")
        made = self.launched(0, token, self.length, tokens, ends)
        try:
            for one in made:
                if one in ends:
                    return
                yield one
        finally:
            made.close()
            self.length += int(self._done[0]) if tokens > 0 and self.length < self.positions else 0

    def launched(
        self, row: int, token: int, place: int, tokens: int, ends: Collection[int]
    ) -> Generator[int, None, None]:
        """The most likely tokens after `token`, which comes to `place` of a row: up to the first of `ends`, which is the
        last one given, as many as there is room for. Closed, it ends the launch. Raises ArithmeticError."""
        steps = min(tokens, self.positions - place)
        if steps < 1:
            return
        end = torch.tensor(sorted(ends), dtype=torch.int32, device=self.device)
        self._flow.fill_(NONE)
        self._best.zero_()
        self._done.zero_()
        self._stopping.zero_()
        counts = {"ends": end.data_ptr(), "end_count": len(ends), "steps": steps, "token": token, "place": place}
        for number, layer in enumerate(self._layers):
            layer.keys = self.kept.keys[number, row].data_ptr()
            layer.values = self.kept.values[number, row].data_ptr()
        run = self._argument(**self._fixed, **counts, layers=self._layers)
        ended, seen = torch.cuda.Event(), 0
        try:
            with torch.cuda.device(self.device):
                self._kernel.launch(self.blocks, self.threads, self.shared, run)
                ended.record()
            while True:
                over = ended.query()  # first: what is done by then is all there is
                for one in self._made[seen : int(self._done[0])].tolist():
                    seen += 1
                    if one == NO_NUMBER:
                        raise ArithmeticError("the model computed NaN or infinity")
                    yield one
                if over:
                    return
                time.sleep(LOOK_S)
        finally:  # also after Ctrl-C: the launch writes to memory that is freed afterwards
            self.stop()
            torch.cuda.current_stream(self.device).synchronize()

    def stop(self) -> None:
        """End what runs after the token it is at."""
        self._stopping[0] = 1

    # --- weights ---------------------------------------------------------------------------------------------------

    def _each_layer(self) -> Iterator[_Layer]:
        for number, layer in enumerate(self.decoder.model.layers):
            matrices = {name: self._matrix(f"{number}.{name}", layers) for name, layers in phases(layer).items()}
            own: Any = layer.self_attn
            norms: list[Any] = [layer.input_layernorm, layer.post_attention_layernorm]
            norms += [getattr(own, "q_norm", None), getattr(own, "k_norm", None)]
            yield _Layer(
                *(one.address for one in matrices.values()),
                *(one.bias for one in matrices.values()),
                *(None if norm is None else self._floats(norm.weight) for norm in norms),
                None,  # keys and values are those of a row, which a launch names
                None,
                own.window,
                *(one.scale for one in matrices.values()),
            )

    def _matrix(self, name: str, layers: list[nn.Linear]) -> _Matrix:
        """The rows of all these layers in one matrix, with their biases."""
        in_turns = name.endswith("gate_up")
        biases = joined_biases(layers, in_turns=in_turns)
        bias = None if biases is None else self._floats(biases)
        if self.packed is None:
            whole = joined(layers, in_turns=in_turns) if len(layers) > 1 else layers[0].weight
            return _Matrix(self._address(whole), bias, 1.0)
        rows, scale = self.packed.matrices[name]
        return _Matrix(self._address(rows), bias, scale)

    def _address(self, tensor: Tensor) -> int:
        whole = tensor.detach().contiguous()
        self._held.append(whole)
        return whole.data_ptr()

    def _floats(self, tensor: Tensor) -> int:
        return self._address(tensor.to(self.device, torch.float32))
