"""INT8: weights and activations as small whole numbers.

    x ≈ scale · (q − zero)         q in −128 … 127 (weights: zero = 0, one scale per output channel)

Three ways to the scale of the activations:
    dynamic     from each input, when it comes
    static      from examples, once: `prepare`, run some data, `convert`
    training    the same with gradients, so that the weights get used to the rounding: `prepare(..., training=True)`

The product of whole numbers is computed by BLAS in float32, in pieces short enough to be exact (|q − zero| ≤ 255,
|w| ≤ 127, so 512 products stay below 2²⁴): the same result as with 32-bit integers, and tens of times faster than NumPy's.
Their sum needs float64, so quantized layers compute on the host, also for tensors on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anytorch.errors import UsageError
from anytorch.lite import functional as F
from anytorch.lite.autograd import make, record
from anytorch.lite.create import wrap, zeros
from anytorch.lite.dtypes import Array
from anytorch.lite.moving import on_device
from anytorch.lite.nn.layers import CustomConv2d, CustomLinear
from anytorch.lite.nn.module import Module, Sequential
from anytorch.lite.ops.conv import patches
from anytorch.lite.ops.windows import Windows, pair
from anytorch.lite.tensors import CustomTensor

EXACT = 512  # products of one piece


def weight_scale(weight: Array) -> Array:
    """One scale per output channel: (O, …) → (O,)"""
    largest = np.abs(weight.reshape(len(weight), -1)).max(axis=1, initial=0)
    return np.where(largest == 0, 1, largest / 127).astype(np.float32)


def quantize_weight(weight: Array) -> tuple[Array, Array]:
    scale = weight_scale(weight)
    per_channel = scale.reshape(-1, *(1,) * (weight.ndim - 1))
    return np.clip(np.rint(weight / per_channel), -127, 127).astype(np.int8), scale


def range_scale(low: float, high: float) -> tuple[float, int]:
    """Scale and zero for numbers from `low` to `high`; 0 is always exact, as padding and ReLU need it."""
    if not np.isfinite(high - low):
        raise UsageError(f"numbers from {low} to {high} cannot be quantized: int8 has no NaN and no infinity")
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / 255 or 1.0
    return scale, round(-128 - low / scale)


def quantize_activation(x: Array, scale: float, zero: int) -> Array:
    return np.clip(np.rint(x / np.float32(scale)) + zero, -128, 127).astype(np.int8)


def exact_product(weight: Array, centred: Array) -> Array:
    """(O, K) @ (…, K, P) of whole numbers, as float64."""
    depth = weight.shape[1]
    total = np.zeros((*centred.shape[:-2], weight.shape[0], centred.shape[-1]))
    for k in range(0, depth, EXACT):
        total += np.matmul(weight[:, k : k + EXACT], centred[..., k : k + EXACT, :])
    return total


class QuantizedLayer(Module):
    """A linear or convolution layer with int8 weights. Without a scale for its inputs it is dynamic."""

    def __init__(self, layer: CustomLinear | CustomConv2d, scale: float | None = None, zero: int = 0) -> None:
        weight, weight_scales = quantize_weight(np.asarray(layer.weight.data))
        self.weight = wrap(weight)
        self.weight_scale = wrap(weight_scales)
        self.bias = layer.bias.detach() if layer.bias is not None else None
        self.dynamic = scale is None
        self.input_scale = wrap(np.array(0.0 if scale is None else scale, np.float32))
        self.input_zero = wrap(np.array(zero, np.int64))
        self.convolution = None
        if isinstance(layer, CustomConv2d):
            self.convolution = (pair(layer.stride), pair(layer.padding), pair(layer.dilation), layer.groups)

    def forward(self, x: CustomTensor) -> CustomTensor:
        if x.dtype != np.float32:
            raise UsageError(f"a quantized layer takes float32, got {x.dtype}")
        host = np.asarray(x.data)
        scale, zero = self.input_scale.item(), self.input_zero.item()
        if self.dynamic and x.numel():
            scale, zero = range_scale(float(host.min()), float(host.max()))
        # Rounded to int8 and back: the numbers are exactly those that int8 holds.
        centred = quantize_activation(host, scale or 1.0, zero).astype(np.float32) - np.float32(zero)
        compute = self.linear if self.convolution is None else self.conv
        result = compute(centred, np.asarray(self.weight_scale.data) * np.float32(scale))
        out: CustomTensor = make(x, on_device(result, x.device))
        return out

    def linear(self, centred: Array, scales: Array) -> Array:
        weight = self.weight.data.astype(np.float32)  # (O, I)
        total = exact_product(weight, centred.reshape(-1, weight.shape[1]).T).T  # (R, O)
        out = (total * scales).astype(np.float32)
        if self.bias is not None:
            out += np.asarray(self.bias.data)
        return out.reshape(*centred.shape[:-1], len(weight))

    def conv(self, centred: Array, scales: Array) -> Array:
        assert self.convolution is not None
        stride, padding, dilation, groups = self.convolution
        o, c, kh, kw = self.weight.shape
        n, _, h, w = centred.shape
        windows = Windows((kh, kw), stride, padding, dilation, (h, w))
        columns = patches(centred, windows).reshape(n, groups, c * kh * kw, -1)
        weight = self.weight.data.astype(np.float32).reshape(groups, o // groups, -1)
        total = np.concatenate([exact_product(weight[g], columns[:, g]) for g in range(groups)], axis=1)  # (N, O, P)
        out = (total * scales[:, None]).astype(np.float32)
        if self.bias is not None:
            out += np.asarray(self.bias.data)[:, None]
        return out.reshape(n, o, *windows.out)


def fake_quantize(x: CustomTensor, rounded: Array, inside: Array) -> CustomTensor:
    """Rounded numbers forward, the gradient straight through: zero only where a number was cut off."""
    return record("fake_quantize", rounded.astype(x.dtype), (x,), lambda g: (g * inside,))


class Observed(Module):
    """A layer that watches the range of its inputs; in quantization-aware training it also rounds as int8 would."""

    momentum = 0.1

    def __init__(self, layer: CustomLinear | CustomConv2d, rounding: bool) -> None:
        self.layer, self.rounding = layer, rounding
        self.low, self.high, self.seen = zeros(), zeros(), zeros(dtype=np.int64)

    def watch(self, x: Array) -> None:
        low, high = x.min(), x.max()
        if self.rounding and self.seen.data:  # training changes the ranges: follow them
            low = self.low.data + self.momentum * (low - self.low.data)
            high = self.high.data + self.momentum * (high - self.high.data)
        elif self.seen.data:
            low, high = np.minimum(low, self.low.data), np.maximum(high, self.high.data)
        self.low.data[...], self.high.data[...] = low, high
        self.seen.data[...] += 1

    def scale(self) -> tuple[float, int]:
        if not self.seen.data:
            raise UsageError("this layer has seen no data, so the range of its inputs is unknown")
        return range_scale(self.low.item(), self.high.item())

    def forward(self, x: CustomTensor) -> CustomTensor:
        if x.numel() and (self.training or not self.rounding):
            self.watch(x.data)
        if not self.rounding:
            return self.layer(x)  # type: ignore[no-any-return]
        scale, zero = self.scale()
        q = np.rint(x.data / np.float32(scale)) + zero
        x = fake_quantize(x, (np.clip(q, -128, 127) - zero) * np.float32(scale), (q >= -128) & (q <= 127))
        integers, scales = quantize_weight(np.asarray(self.layer.weight.data))
        back = integers * scales.reshape(-1, *(1,) * (integers.ndim - 1))
        weight = fake_quantize(self.layer.weight, on_device(back, x.device), np.ones((), back.dtype))
        layer = self.layer
        if isinstance(layer, CustomLinear):
            return F.linear(x, weight, layer.bias)
        return F.conv2d(x, weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)


def replace_layers(module: Module, change: Callable[[Module], Module | None]) -> Any:
    """`module` with every part for which `change` gives a new one replaced, in place; the result if it is one itself."""
    changed = change(module)
    if changed is not None:
        return changed
    for name, child in list(module.named_children()):
        new = replace_layers(child, change)
        if new is not child:
            if isinstance(module, Sequential):
                module[int(name)] = new
            else:
                setattr(module, name, new)
    return module


def is_heavy(module: Module) -> bool:
    return isinstance(module, (CustomLinear, CustomConv2d))


def quantize_dynamic(model: Module) -> Any:
    """int8 weights at once; the inputs of each layer are quantized as they come. Nothing to calibrate."""
    return replace_layers(model, lambda m: QuantizedLayer(m) if is_heavy(m) else None).eval()  # type: ignore[arg-type]


def prepare(model: Module, training: bool = False) -> Any:
    """Watch the inputs of linear and convolution layers; with `training=True` round as int8 would, gradients included."""
    model = replace_layers(model, lambda m: Observed(m, training) if is_heavy(m) else None)  # type: ignore[arg-type]
    return model.train() if training else model.eval()


def convert(model: Module) -> Any:
    """After `prepare` and some data (or training): int8 weights, and inputs quantized with the ranges that were seen."""

    def change(module: Module) -> Module | None:
        return QuantizedLayer(module.layer, *module.scale()) if isinstance(module, Observed) else None

    return replace_layers(model, change).eval()
