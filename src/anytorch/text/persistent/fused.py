"""Recorded steps of our own kernels (`fused_source`): five to eight launches for a layer in place of torch's forty.

For devices that have Triton (CUDA, ROCm, XPU), bfloat16 and float16, any number of texts at once. A step is recorded as
`RecordedSteps` records it, and is what several texts are decoded by where one launch for all tokens takes one text only.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anytorch import logs
from anytorch.devices.locate import locate
from anytorch.devices.oom import is_out_of_memory
from anytorch.text.decoders.model import Decoder, Layer
from anytorch.text.decoders.rotary import tables
from anytorch.text.decoders.spec import DecoderSpec
from anytorch.text.decoders.steps import RecordedSteps
from anytorch.text.persistent.ahead import AheadSteps
from anytorch.text.persistent.joined import joined, joined_biases

log = logs.logger(__name__)

KINDS = (torch.bfloat16, torch.float16)
HALVES = (16, 32, 64, 128)  # of a head
FEW = 1  # rows that are multiplied without matrix units, which have sixteen
MOST_ROWS = 64  # beyond, torch's products are as fast
SPLIT, MOST_SPLITS = 128, 64  # positions that are worth a program of their own
# Of the logits' size. On the H200 single logits of 36 layers in bfloat16 differed by up to 0.13 of their spread.
SAME = 0.1

_why_not: dict[tuple[Any, ...], str] = {}  # by model and device: why the kernels are not used there; "" where they are


def steps_for(decoder: Decoder, rows: int, positions: int | None) -> tuple[RecordedSteps, str]:
    """Steps of our kernels where these run and give what torch gives, else of torch's; and why not ours ("" if they are)."""
    weight = decoder.lm_head.weight
    if why := refusal(decoder.spec, weight.dtype, weight.device):
        return RecordedSteps(decoder, rows, positions), why
    key = (decoder.spec, weight.dtype, weight.device)
    if key not in _why_not:
        try:
            _why_not[key] = _difference(decoder)
        except Exception as exc:
            if is_out_of_memory(exc):
                raise
            _why_not[key] = (
                f"they do not run on {weight.device}: {type(exc).__name__}: {(str(exc).splitlines() or [''])[0]}"
            )
        if _why_not[key]:
            log.warning("torch computes the tokens on %s, not our kernels: %s", weight.device, _why_not[key])
    if why := _why_not[key]:
        return RecordedSteps(decoder, rows, positions), why
    return FusedSteps(decoder, rows, positions), ""


def _difference(decoder: Decoder) -> str:
    """Compute two tokens of one text, and of three, both ways: "" if the logits agree, else by how much they do not."""
    for rows in (1, 3):
        found = []
        for kind in (RecordedSteps, FusedSteps):
            steps = kind(decoder, rows, 4)
            for row in range(rows):
                steps.read(row, [row % decoder.spec.vocabulary])
                steps.follow(row, (row + 1) % decoder.spec.vocabulary)
            found.append(steps.step()[:rows].float())
        wanted, ours = found
        by = float((ours - wanted).norm() / wanted.norm().clamp(min=1e-30))
        if not by <= SAME:
            return f"logits of {rows} texts differ by {by:.2g} of their size"
    return ""


def refusal(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> str:
    """Why these kernels cannot decode such a model there, in words; "" if they can."""
    backend, index = locate(device)
    if not backend.caps(index).triton:
        return f"there is no Triton for {device}, or it is not installed"
    if dtype not in KINDS:
        return f"they take bfloat16 and float16, not {dtype}"
    if spec.head_width // 2 not in HALVES or spec.head_width % 2:
        return f"they take heads of {', '.join(str(2 * half) for half in HALVES)}, not of {spec.head_width}"
    if spec.heads // spec.kv_heads > 16:
        return f"they take at most 16 query heads per key head, not {spec.heads // spec.kv_heads}"
    return ""


@dataclass(frozen=True)
class Cut:
    """How one product is divided among programs."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    splits: int = 1
    dot: bool = True


@lru_cache(maxsize=64)
def cut_for(rows: int, columns: int, width: int, processors: int, *, normed: bool, gated: bool) -> Cut:
    """The tiles that took the least time on an H200, or nearly; several programs for each multiprocessor."""
    if rows <= FEW:
        if width <= 1024:
            return Cut(4, 256, warps=2, stages=3, dot=False)
        if columns < 16 * processors:
            return Cut(2, 1024, warps=4, stages=3, dot=False)
        if gated:
            return Cut(4, 1024, warps=4, stages=3, dot=False)
        return Cut(8, 256, warps=4, stages=3, dot=False) if normed else Cut(4, 512, warps=4, stages=3, dot=False)
    if columns >= 1 << 15:
        return Cut(64, 128, warps=4, stages=3)
    splits, tiles = 1, -(-columns // 32)
    while splits < 4 and tiles * splits < 2.5 * processors and width >= 2 * splits * 512:
        splits *= 2
    return Cut(32, 128, warps=2, stages=4, splits=splits)


class FusedSteps(AheadSteps):
    """`rows` texts of up to `positions` tokens each, one replay of our own kernels for each token of all of them."""

    def __init__(self, decoder: Decoder, rows: int = 1, positions: int | None = None) -> None:
        super().__init__(decoder, rows, positions)
        self._kernels: Any = import_module("anytorch.text.persistent.fused_source")
        spec, weight = decoder.spec, decoder.lm_head.weight
        self._head, on_host = weight.detach(), weight.device.type == "cpu"  # there Triton's interpreter runs, in tests
        self._turns = [one.contiguous() for one in tables(spec, self.positions, weight.device)]
        self._processors = _processors(weight.device)
        self._layers = [_Layer(layer) for layer in decoder.model.layers]
        self._norm = _floats(decoder.model.norm.weight)
        self._device = nullcontext() if on_host else torch.get_device_module(weight.device).device(weight.device)
        self._nothing = torch.zeros(1, dtype=weight.dtype, device=weight.device)
        self._arrived = torch.zeros(1 << 16, dtype=torch.int32, device=weight.device)  # 0 again after every product
        self._parts = torch.empty(1, dtype=torch.float32, device=weight.device)

    def step(self) -> Tensor:
        with self._device:  # Triton launches on the current one
            return super().step()

    def _launch(self, *given: Any) -> None:
        with self._device:
            super()._launch(*given)

    @torch.no_grad()
    def _computed(self, rows: int, places: int) -> Tensor:
        spec, body = self.decoder.spec, self.decoder.model
        x = body.embed_tokens(self._ids[:rows])
        kind = x.dtype
        group = spec.heads // spec.kv_heads
        splits = self._splits(rows, places)
        attended = torch.empty(rows, spec.q_width, dtype=kind, device=x.device)
        parts = torch.empty(rows * spec.heads * splits * (spec.head_width + 2), dtype=torch.float32, device=x.device)
        most, total = (parts[at * rows * spec.heads * splits :] for at in (spec.head_width, spec.head_width + 1))
        for number, layer in enumerate(self._layers):
            qkv = self._product(x, layer.qkv, layer.qkv_bias, norm=layer.norm)
            keys, values = self.kept.keys[number], self.kept.values[number]
            self._kernels.attend[(spec.kv_heads, splits, rows)](
                qkv, *self._turns, layer.q_norm, layer.k_norm, self._places, keys, values, attended, parts, most, total,
                keys.stride(0), keys.stride(1), layer.window, spec.head_width**-0.5,
                HEADS=spec.heads, KV_HEADS=spec.kv_heads, HALF=spec.head_width // 2, GROUP=group, EPSILON=spec.norm_eps,
                NORMED=spec.qk_norm, WINDOWED=layer.window > 0, SPLITS=splits, BLOCK=64, num_warps=4,
            )  # fmt: skip
            if splits > 1:
                grid = (rows * spec.heads,)
                self._kernels.join[grid](parts, most, total, attended, HEAD=spec.head_width, SPLITS=splits, num_warps=2)
            x = self._product(attended, layer.out, layer.out_bias, residual=x)
            inner = self._product(x, layer.gate, layer.gate_bias, norm=layer.after, second=(layer.up, layer.up_bias))
            x = self._product(inner, layer.down, layer.down_bias, residual=x)
        return self._product(x, self._head, None, norm=self._norm, kind=torch.float32)

    def _splits(self, rows: int, places: int) -> int:
        """Parts of a context, a power of two: as many as keep the device busy, each long enough to be worth it."""
        wanted = min(places // SPLIT, 2 * self._processors // (rows * self.decoder.spec.kv_heads), MOST_SPLITS)
        return 1 << (wanted.bit_length() - 1) if wanted > 1 else 1

    def _product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm: Tensor | None = None,
        residual: Tensor | None = None,
        second: tuple[Tensor, Tensor | None] | None = None,
        kind: torch.dtype | None = None,
    ) -> Tensor:
        rows, (columns, width) = x.shape[0], weight.shape
        if rows > MOST_ROWS:
            return self._by_torch(x, weight, bias, norm, residual, second, kind)
        cut = cut_for(rows, columns, width, self._processors, normed=norm is not None, gated=second is not None)
        if norm is not None and cut.dot:
            x, norm = self._normed(x, norm), None
        out = torch.empty(rows, columns, dtype=kind or x.dtype, device=x.device)
        block_m = max(16, 1 << (rows - 1).bit_length()) if cut.dot else rows
        grid = (-(-columns // cut.block_n), 1, cut.splits)
        parts = self._parts
        if cut.splits > 1:
            room = grid[0] * cut.splits * (2 * block_m * cut.block_n + block_m)
            parts = torch.empty(room, dtype=torch.float32, device=x.device)
        nothing = self._nothing
        self._kernels.product[grid](
            x, weight, nothing if second is None else second[0], nothing if bias is None else bias,
            nothing if second is None or second[1] is None else second[1], nothing if norm is None else norm,
            nothing if residual is None else residual, out, parts, self._arrived, rows, columns, weight.stride(0),
            WIDTH=width, EPSILON=self.decoder.spec.norm_eps, NORM=norm is not None,
            BIAS=bias is not None, RESIDUAL=residual is not None, GATED=second is not None, DOT=cut.dot, BLOCK_M=block_m,
            BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, STAGES=cut.stages, SPLITS=cut.splits,
            SHARE=-(-width // (cut.splits * cut.block_k)) * cut.block_k, num_warps=cut.warps,
        )  # fmt: skip
        return out

    def _by_torch(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm: Tensor | None,
        residual: Tensor | None,
        second: tuple[Tensor, Tensor | None] | None,
        kind: torch.dtype | None,
    ) -> Tensor:
        """The same for many rows."""
        if norm is not None:
            x = self._normed(x, norm)
        made = F.linear(x, weight, bias)
        if second is not None:
            made = F.silu(made) * F.linear(x, *second)
        if residual is not None:
            made = made + residual
        return made if kind is None else made.to(kind)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        out, width = torch.empty_like(x), x.shape[1]
        block = 1 << (width - 1).bit_length()
        constants = {"WIDTH": width, "EPSILON": self.decoder.spec.norm_eps, "BLOCK": block}
        self._kernels.normed[(len(x),)](x, weight, out, **constants, num_warps=max(1, min(16, block // 256)))
        return out


class _Layer:
    """A layer's weights as the kernels take them."""

    def __init__(self, layer: nn.Module) -> None:
        assert isinstance(layer, Layer)
        own, mlp = layer.self_attn, layer.mlp
        projections = [own.q_proj, own.k_proj, own.v_proj]
        self.qkv, self.qkv_bias = joined(projections), joined_biases(projections)
        # Detached: what was recorded reads from here, even if another kernel lays the layer's weights out anew.
        (self.out, self.out_bias), (self.down, self.down_bias) = _detached(own.o_proj), _detached(mlp.down_proj)
        (self.gate, self.gate_bias), (self.up, self.up_bias) = _detached(mlp.gate_proj), _detached(mlp.up_proj)
        self.norm, self.after = _floats(layer.input_layernorm.weight), _floats(layer.post_attention_layernorm.weight)
        normed = hasattr(own, "q_norm")
        self.q_norm, self.k_norm = (
            (_floats(own.q_norm.weight), _floats(own.k_norm.weight)) if normed else (self.norm, self.norm)
        )
        self.window = own.window


def _detached(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return layer.weight.detach(), None if layer.bias is None else layer.bias.detach()


def _floats(weight: Tensor) -> Tensor:
    return weight.detach().float()


def _processors(device: torch.device) -> int:
    properties: Any = torch.get_device_module(device).get_device_properties(device) if device.type != "cpu" else None
    for name in ("multi_processor_count", "gpu_eu_count", "max_compute_units"):
        if (count := getattr(properties, name, None)) is not None:
            return int(count)
    return 64
