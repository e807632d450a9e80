"""A layer's numbers: drawn from a seed, made from a recipe, or taken from a file by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from anytorch import lite
from anytorch.comfy.values import Weights, shape_text
from anytorch.errors import InputError

KERNELS = ["random", "identity", "blur", "sharpen", "edges"]


def drawn(shape: Sequence[int], seed: int, *, bias: bool) -> Weights:
    """Random weights as torch's own layers start with: uniform, ±1/√fan-in. Drawn on the CPU: every device gets the same."""
    generator = torch.Generator().manual_seed(seed)
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    made = {"weight": (torch.rand(tuple(shape), generator=generator) * 2 - 1) * bound}
    if bias:
        made["bias"] = (torch.rand(shape[0], generator=generator) * 2 - 1) * bound
    return made


def kernel(name: str, channels: int, size: int, *, bias: bool) -> Weights:
    """A filter that treats every channel alike: (channels, channels, size, size), zero off the diagonal."""
    if size % 2 == 0:
        raise InputError(
            f"the kernel {name!r} has a middle, and kernel_size {size} has none", hint="use an odd kernel_size"
        )
    middle = torch.zeros(size, size)
    middle[size // 2, size // 2] = 1
    blur = torch.full((size, size), 1 / size**2)
    one = {"identity": middle, "blur": blur, "sharpen": 2 * middle - blur, "edges": (middle - blur) * size**2}[name]
    weight = torch.zeros(channels, channels, size, size)
    weight[range(channels), range(channels)] = one
    made = {"weight": weight}
    if bias:
        made["bias"] = torch.zeros(channels)
    return made


def chosen(weights: Weights, layer: str, shape: Sequence[int], *, bias: bool) -> Weights:
    """The numbers of the layer called `layer` ("" where the file holds one alone). Raises InputError if they do not fit."""
    name = f"{layer}.weight" if layer else "weight"
    if not layer and name not in weights:
        fitting = [key for key, value in weights.items() if key.endswith(".weight") and value.ndim == len(shape)]
        if len(fitting) == 1:
            name = fitting[0]
    if name not in weights:
        raise InputError(
            f"the weights have no {name!r}; they have {', '.join(sorted(weights)) or 'nothing'}",
            hint="set layer_name to the part before .weight",
        )
    weight = weights[name]
    if not weight.is_floating_point():
        raise InputError(
            f"{name!r} holds {str(weight.dtype).removeprefix('torch.')} numbers: this layer was quantized",
            hint="connect the layer's weights from before it was quantized",
        )
    if tuple(weight.shape) != tuple(shape):
        raise InputError(
            f"{name!r} is {shape_text(weight.shape)}, but this layer's weights are {shape_text(shape)}",
            hint="set the node's sizes to those of the weights",
        )
    found = {"weight": weight.to(torch.float32)}
    bias_name = name.removesuffix("weight") + "bias"
    if bias:
        if bias_name not in weights:
            raise InputError(f"the weights have no {bias_name!r}", hint="turn use_bias off")
        if tuple(weights[bias_name].shape) != (shape[0],):
            given = shape_text(weights[bias_name].shape)
            raise InputError(f"{bias_name!r} is {given}, but this layer's bias has {shape[0]} numbers")
        found["bias"] = weights[bias_name].to(torch.float32)
    return found


def renamed(weights: Weights, name: str) -> Weights:
    """Put `name` before each: "weight" → "conv1.weight"."""
    return {f"{name}.{key}" if name else key: value for key, value in weights.items()}


def read(path: Path) -> Weights:
    return {name: torch.from_numpy(value.numpy()) for name, value in lite.load(path).items()}


def write(weights: Weights, path: Path) -> None:
    lite.save({name: value.detach().cpu().contiguous() for name, value in weights.items()}, path)
