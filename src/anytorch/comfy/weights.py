"""A layer's numbers: drawn from a seed, made from a recipe, or taken by name from a safetensors file; with its nodes.

Such a file holds numbers and names, nothing that could run.
"""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from anytorch import lite
from anytorch.comfy.comfyui import file_refusal, fingerprint, folder, inside
from anytorch.comfy.values import WEIGHTS, Node, Weights, inputs, shape_text, text_shown, widget
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
            f"kernel_size {size} is invalid: the kernel {name!r} has no centre at an even size",
            hint="use an odd kernel_size",
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


# --- files -----------------------------------------------------------------------------------------------------------

SUFFIX, FROM_OUTPUT = ".safetensors", " [output]"  # ComfyUI's way to say that a file lies in the output folder


def known_files() -> list[str]:
    """Files that can be loaded: those in models/anytorch, and those that Save Weights has written."""
    own, made = models_folder(), folder("output")
    found = sorted(path.relative_to(own).as_posix() for path in own.rglob(f"*{SUFFIX}"))
    return found + sorted(path.relative_to(made).as_posix() + FROM_OUTPUT for path in made.rglob(f"*{SUFFIX}"))


def models_folder() -> Path:
    return folder("models") / "anytorch"


def file_named(name: str) -> Path:
    if name.endswith(FROM_OUTPUT):
        return inside(folder("output"), name.removesuffix(FROM_OUTPUT), "the file")
    return inside(models_folder(), name, "the file")


class AnytorchLoadWeights(Node, title="Load Weights", group="weights"):
    DESCRIPTION = "Weights from a .safetensors file in models/anytorch, or one that Save Weights wrote."
    RETURN_TYPES, RETURN_NAMES = (WEIGHTS, "STRING"), ("weights", "names")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"file": (known_files(), {})}}

    @classmethod
    def VALIDATE_INPUTS(cls, file: str | None) -> bool | str:
        """A file that another machine had is named in a sentence, not in a list of all files of this one."""
        return file is None or file_refusal(file_named, file, models_folder()) or True

    @classmethod
    def IS_CHANGED(cls, file: str | None) -> str:
        return fingerprint(file_named(file)) if file else ""

    def run(self, file: str) -> tuple[Weights, str]:
        path = file_named(file)
        if not path.is_file():  # a linked name is not seen by VALIDATE_INPUTS
            raise InputError(f"{file} does not exist", hint=f"put it into {models_folder()}")
        found = read(path)
        return found, "\n".join(f"{name}: {shape_text(value.shape)}" for name, value in sorted(found.items()))


class AnytorchSaveWeights(Node, title="Save Weights", group="weights"):
    DESCRIPTION = "Writes weights to a .safetensors file in ComfyUI's output folder."
    OUTPUT_NODE = True
    RETURN_TYPES, RETURN_NAMES = ("STRING",), ("file",)
    required = inputs(
        weights=(WEIGHTS, {}),
        filename_prefix=widget("STRING", "anytorch/layer"),
        overwrite=widget("BOOLEAN", False, "Off: each file gets a new number."),
    )

    @classmethod
    def VALIDATE_INPUTS(cls, filename_prefix: str | None) -> bool | str:
        try:
            if filename_prefix is not None:  # None: it comes from another node
                cls._target(filename_prefix)
        except InputError as exc:
            return exc.message
        return True

    @staticmethod
    def _target(filename_prefix: str) -> Path:
        path = inside(folder("output"), filename_prefix, "filename_prefix")
        return path.with_name(path.name + SUFFIX)

    def run(self, weights: Weights, filename_prefix: str, overwrite: bool) -> dict[str, Any]:
        path = self._target(filename_prefix)
        if not overwrite:
            path = next_free(path)
        write(weights, path)
        name = path.relative_to(os.path.normpath(folder("output"))).as_posix() + FROM_OUTPUT
        return text_shown(f"saved: {path}", name)


def next_free(path: Path) -> Path:
    """layer.safetensors → layer_00001.safetensors, or the next number that is free."""
    pattern = f"{glob.escape(path.stem)}_*{SUFFIX}"  # a name may hold brackets
    taken = [found.stem.removeprefix(f"{path.stem}_") for found in path.parent.glob(pattern)]
    number = max((int(text) for text in taken if text.isdigit()), default=0) + 1
    return path.with_name(f"{path.stem}_{number:05}{SUFFIX}")


class AnytorchCombineWeights(Node, title="Combine Weights", group="weights"):
    DESCRIPTION = "Combine the weights of two layers: each name is prefixed with its layer's name."
    RETURN_TYPES, RETURN_NAMES = (WEIGHTS,), ("weights",)
    required = inputs(
        weights_a=(WEIGHTS, {}),
        name_a=widget("STRING", "layer1", "Empty: the names stay as they are."),
        weights_b=(WEIGHTS, {}),
        name_b=widget("STRING", "layer2"),
    )

    def run(self, weights_a: Weights, name_a: str, weights_b: Weights, name_b: str) -> tuple[Weights]:
        first, second = renamed(weights_a, name_a), renamed(weights_b, name_b)
        if twice := sorted(first.keys() & second.keys()):
            raise InputError(f"both have {', '.join(twice)}", hint="give the two layers different names")
        return ({**first, **second},)
