"""Weights to and from safetensors files: numbers and names, nothing that could run."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

from anytorch.comfy import weights as layer_weights
from anytorch.comfy.comfyui import file_refusal, fingerprint, folder, inside
from anytorch.comfy.values import WEIGHTS, Node, Weights, inputs, shape_text, text_shown, widget
from anytorch.errors import InputError

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


class AnytorchLoadWeights(Node, group="weights"):
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
        found = layer_weights.read(path)
        return found, "\n".join(f"{name}: {shape_text(value.shape)}" for name, value in sorted(found.items()))


class AnytorchSaveWeights(Node, group="weights"):
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
        layer_weights.write(weights, path)
        name = path.relative_to(os.path.normpath(folder("output"))).as_posix() + FROM_OUTPUT
        return text_shown(f"saved: {path}", name)


def next_free(path: Path) -> Path:
    """layer.safetensors → layer_00001.safetensors, or the next number that is free."""
    pattern = f"{glob.escape(path.stem)}_*{SUFFIX}"  # a name may hold brackets
    taken = [found.stem.removeprefix(f"{path.stem}_") for found in path.parent.glob(pattern)]
    number = max((int(text) for text in taken if text.isdigit()), default=0) + 1
    return path.with_name(f"{path.stem}_{number:05}{SUFFIX}")


class AnytorchCombineWeights(Node, group="weights"):
    DESCRIPTION = "Combine the weights of two layers: each name is prefixed with its layer's name."
    RETURN_TYPES, RETURN_NAMES = (WEIGHTS,), ("weights",)
    required = inputs(
        weights_a=(WEIGHTS, {}),
        name_a=widget("STRING", "layer1", "Empty: the names stay as they are."),
        weights_b=(WEIGHTS, {}),
        name_b=widget("STRING", "layer2"),
    )

    def run(self, weights_a: Weights, name_a: str, weights_b: Weights, name_b: str) -> tuple[Weights]:
        first, second = layer_weights.renamed(weights_a, name_a), layer_weights.renamed(weights_b, name_b)
        if twice := sorted(first.keys() & second.keys()):
            raise InputError(f"both have {', '.join(twice)}", hint="give the two layers different names")
        return ({**first, **second},)
