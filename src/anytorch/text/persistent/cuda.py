"""Decoding on a GPU of NVIDIA in one launch: the token loop runs there, and the host looks on.

`code/decode.cu` says how. One text at a time, bfloat16 or float16, from compute capability 9.0 on (H100, H200, B200): it
streams weights by bulk copies, which earlier ones lack.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anytorch.errors import InputError, UsageError
from anytorch.text.decoders.model import Decoder, KeyValues
from anytorch.text.decoders.rotary import tables
from anytorch.text.decoders.spec import DecoderSpec
from anytorch.text.persistent.joined import joined, joined_biases
from anytorch.text.persistent.nvrtc import Kernel

SOURCE = Path(__file__).parent / "code" / "decode.cu"
THREADS, WARPS, CHUNK = 256, 8, 4096  # as in the source
SPLIT, MOST_SPLITS = 128, 64
NONE = 0xFFF0DEAD - 2**32
NO_NUMBER = -2
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
    )


def _run_of(layers: int) -> type[ctypes.Structure]:
    """The kernel's argument, which has all layers in it."""
    return type("_Run", (ctypes.Structure,), {"_fields_": (*_RUN, ("layers", _Layer * layers))})


_RUN = (
    *((name, ctypes.c_void_p) for name in ("head", "words", "norm", "cos", "sin", "flow", "best", "logits")),
    *((name, ctypes.c_void_p) for name in ("ends", "made", "done", "stopping")),
    ("positions", ctypes.c_int64),
    *((name, ctypes.c_int32) for name in ("steps", "token", "place", "end_count", "most_splits")),
    ("eps", ctypes.c_float),
    ("trace", ctypes.c_void_p),
)


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
        return f"it takes up to 8 heads for one of keys, not {spec.heads // spec.kv_heads}"
    if spec.kv_heads > torch.cuda.get_device_properties(device).multi_processor_count:
        return f"it takes no more heads of keys than there are multiprocessors, not {spec.kv_heads}"
    return ""


class CudaKernel:
    """One text of up to `positions` tokens by a decoder on a GPU, from its first new token to its last in one launch.

    The decoder's weights move once: those of one phase come to lie in one matrix, of which its own are views from then
    on. Sums are float32. Not for several threads at once; `stop` may be called from another.
    """

    def __init__(self, decoder: Decoder, positions: int | None = None) -> None:
        spec, weight = decoder.spec, decoder.lm_head.weight
        if why := refusal(spec, weight.dtype, weight.device):
            raise UsageError(f"this model cannot be decoded in one launch: {why}", hint="use RecordedSteps")
        self.decoder, self.device = decoder, weight.device
        self.positions = min(positions or spec.max_positions, spec.max_positions)
        self.kept = KeyValues(spec, 1, self.positions, weight.dtype, self.device)
        self.blocks = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.splits = max(1, min(MOST_SPLITS, self.blocks // spec.kv_heads))
        group = spec.heads // spec.kv_heads
        part = spec.head_width + 2
        fixed = max(
            2 * max(spec.width, spec.q_width, spec.inner),
            4 * ((group + 2) * spec.head_width + WARPS * group * part),
        )
        fixed = -(-fixed // 16) * 16 + 8 * WARPS + 32 + 4 * (-(-spec.width // self.blocks) + 8)
        most = getattr(torch.cuda.get_device_properties(self.device), "shared_memory_per_block_optin", SHARED)
        depth = min(6, (most - fixed) // (WARPS * (CHUNK + 8)))
        if depth < 2:
            raise UsageError(f"a row of {spec.inner} numbers does not fit into the {most:,} bytes that a block shares")
        self.shared = fixed + depth * WARPS * (CHUNK + 8)
        sizes = {
            "WIDTH": spec.width,
            "INNER": spec.inner,
            "HEADS": spec.heads,
            "KV_HEADS": spec.kv_heads,
            "HEAD": spec.head_width,
            "VOCABULARY": spec.vocabulary,
            "LAYERS": spec.layers,
            "DEPTH": depth,
            "QK_NORM": int(spec.qk_norm),
            "HALF": int(weight.dtype == torch.float16),
        }
        self._kernel = Kernel(SOURCE, "decode", sizes, self.device)
        if self._kernel.blocks_at_once(THREADS, self.shared) < 1:
            raise UsageError(f"a block of {self.shared:,} bytes does not fit on a multiprocessor of {self.device}")
        self._held: list[Any] = []  # what the structures point to
        self._layers = (_Layer * spec.layers)(*self._each_layer())
        self._argument = _run_of(spec.layers)
        floats = spec.q_width + 2 * spec.kv_width + spec.q_width + 2 * spec.width + spec.inner
        floats += spec.kv_heads * self.splits * group * part
        floats = -(-floats // 4) * 4  # four are looked at together
        self._flow = torch.empty(2 * spec.layers * floats, dtype=torch.int32, device=self.device)
        self._best = torch.empty(4 * self.blocks, dtype=torch.int64, device=self.device)
        self._logits = torch.empty(spec.vocabulary, device=self.device)
        self._done, self._stopping = (torch.zeros(1, dtype=torch.int32).pin_memory() for _ in range(2))
        cos, sin = tables(spec, self.positions)
        self._fixed = {
            "head": self._address(decoder.lm_head.weight),
            "words": self._address(decoder.model.embed_tokens.weight),
            "norm": self._floats(decoder.model.norm.weight),
            "cos": self._floats(cos),
            "sin": self._floats(sin),
            "positions": self.positions,
            "most_splits": self.splits,
            "eps": spec.norm_eps,
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
            raise InputError(f"{token} is not a token of {self.decoder.spec.vocabulary}")
        steps = min(tokens, self.positions - self.length)
        if steps < 1:
            return
        made = torch.zeros(steps, dtype=torch.int32).pin_memory()
        end = torch.tensor(sorted(ends), dtype=torch.int32, device=self.device)
        self._flow.fill_(NONE)
        self._best.zero_()
        self._done.zero_()
        self._stopping.zero_()
        run = self._argument(
            **self._fixed,
            layers=self._layers,
            flow=self._flow.data_ptr(),
            best=self._best.data_ptr(),
            logits=self._logits.data_ptr(),
            ends=end.data_ptr(),
            end_count=len(ends),
            made=made.data_ptr(),
            done=self._done.data_ptr(),
            stopping=self._stopping.data_ptr(),
            steps=steps,
            token=token,
            place=self.length,
        )
        ended, seen = torch.cuda.Event(), 0
        try:
            self._kernel.launch(self.blocks, THREADS, self.shared, run)
            ended.record()
            while True:
                over = ended.query()  # first: what is done by then is all there is
                for one in made[seen : int(self._done[0])].tolist():
                    seen += 1
                    if one == NO_NUMBER:
                        raise ArithmeticError("the model computed NaN or infinity")
                    if one in ends:
                        return
                    yield one
                if over:
                    return
                time.sleep(LOOK_S)
        finally:  # also after Ctrl-C: the launch writes to memory that is freed afterwards
            self.stop()
            torch.cuda.current_stream(self.device).synchronize()
            self.length += int(self._done[0])

    def stop(self) -> None:
        """End what runs after the token it is at."""
        self._stopping[0] = 1

    # --- weights ---------------------------------------------------------------------------------------------------

    def _each_layer(self) -> Iterator[_Layer]:
        for number, layer in enumerate(self.decoder.model.layers):
            own: Any = layer.self_attn
            mlp: Any = layer.mlp
            qkv = self._joined([own.q_proj, own.k_proj, own.v_proj], in_turns=False)
            gate_up = self._joined([mlp.gate_proj, mlp.up_proj], in_turns=True)
            matrices = (qkv[0], self._address(own.o_proj.weight), gate_up[0], self._address(mlp.down_proj.weight))
            biases = (qkv[1], self._bias(own.o_proj), gate_up[1], self._bias(mlp.down_proj))
            norms: list[Any] = [layer.input_layernorm, layer.post_attention_layernorm]
            norms += [getattr(own, "q_norm", None), getattr(own, "k_norm", None)]
            yield _Layer(
                *matrices,
                *biases,
                *(None if norm is None else self._floats(norm.weight) for norm in norms),
                self.kept.keys[number].data_ptr(),
                self.kept.values[number].data_ptr(),
                own.window,
            )

    def _joined(self, layers: list[Any], *, in_turns: bool) -> tuple[int, int | None]:
        """The addresses of all rows in one matrix and of their biases."""
        biases = joined_biases(layers, in_turns=in_turns)
        return self._address(joined(layers, in_turns=in_turns)), None if biases is None else self._floats(biases)

    def _bias(self, layer: nn.Linear) -> int | None:
        return None if layer.bias is None else self._floats(layer.bias)

    def _address(self, tensor: Tensor) -> int:
        whole = tensor.detach().contiguous()
        self._held.append(whole)
        return whole.data_ptr()

    def _floats(self, tensor: Tensor) -> int:
        return self._address(tensor.to(self.device, torch.float32))
