"""What flows along the links between nodes, and how a node reads it.

    TENSOR             a torch tensor of any shape; the type name other packs of tensor nodes use as well
    IMAGE              ComfyUI's: float32 [batch, height, width, channels], 0 to 1
    MASK               ComfyUI's: float32 [batch, height, width]
    LATENT             ComfyUI's: {"samples": [batch, channels, height, width]}
    ANYTORCH_WEIGHTS   {"weight": tensor, …}, as a safetensors file holds them
    ANYTORCH_DEVICE    where to compute: a DeviceChoice

A value may be used by several nodes: nothing here or in any node writes to what it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from anytorch.comfy.comfyui import rest_device
from anytorch.errors import InputError

TENSOR, IMAGE, MASK, LATENT = "TENSOR", "IMAGE", "MASK", "LATENT"
WEIGHTS, DEVICE, ANYTHING = "ANYTORCH_WEIGHTS", "ANYTORCH_DEVICE", "*"
NUMBERS = f"{TENSOR},{IMAGE},{MASK}"  # an input that takes any of them
CATEGORY = "PyTorch Custom"
RANGES = ["clamp", "normalize", "raw"]

Weights = dict[str, Tensor]
Inputs = dict[str, tuple[Any, dict[str, Any]]]  # name → type, or the list to choose from; options


class Node:
    """What ComfyUI asks every node for. A node says its title and group in the menu, its inputs, and its `run`."""

    CATEGORY, FUNCTION = CATEGORY, "run"
    title: ClassVar[str]
    required: ClassVar[Inputs] = {}
    optional: ClassVar[Inputs] = {}

    def __init_subclass__(cls, title: str | None = None, group: str | None = None) -> None:
        if title is not None:  # a node made from one of ours keeps what it does not say
            cls.title = title
            cls.CATEGORY = f"{CATEGORY}/{group}" if group else CATEGORY

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        # Copies: other packs edit what they are given, and some of these are shared between nodes.
        return deepcopy({"required": cls.required, **({"optional": cls.optional} if cls.optional else {})})


def inputs(**named: tuple[Any, dict[str, Any]]) -> Inputs:
    """Inputs by name, in the order in which the node shows them."""
    return named


def widget(kind: str | list[str], default: Any, tooltip: str = "", **options: Any) -> tuple[Any, dict[str, Any]]:
    """An input that is a field on the node."""
    return kind, {"default": default, **options, **({"tooltip": tooltip} if tooltip else {})}


def whole(default: int, least: int, most: int, tooltip: str = "") -> tuple[Any, dict[str, Any]]:
    return widget("INT", default, tooltip, min=least, max=most)


@dataclass(frozen=True)
class DeviceChoice:
    """What the device node hands on: a request for `anytorch.resolve`, or "numpy"."""

    request: str


def shape_text(shape: Sequence[int]) -> str:
    return "×".join(str(n) for n in shape) if len(shape) else "a single number"


def as_tensor(value: Any, name: str) -> Tensor:
    """The input `name` as a float32 tensor. Raises InputError if it is not a tensor."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))  # torch has no negative strides
    if not isinstance(value, Tensor):
        kind = "a latent" if isinstance(value, dict) and "samples" in value else f"a {type(value).__name__}"
        raise InputError(f"{name} is {kind}, not a tensor", hint="put the node that converts it in between")
    if value.is_complex():
        raise InputError(f"{name} holds complex numbers, which these nodes do not compute with")
    if value.numel() == 0:
        raise InputError(f"{name} is empty: its shape is {shape_text(value.shape)}")
    return value if value.dtype == torch.float32 else value.to(torch.float32)


def as_image(value: Any, name: str = "image") -> Tensor:
    """[batch, height, width, channels]; a mask [batch, height, width] is given one channel, as ComfyUI means it."""
    image = as_tensor(value, name)
    if image.ndim == 3:
        return image[..., None]
    if image.ndim != 4:
        raise InputError(
            f"{name} has {image.ndim} dimensions ({shape_text(image.shape)}); an image has 4: batch, height, width, channels"
        )
    return image


def in_range(image: Tensor, wanted: str) -> Tensor:
    """Numbers for a picture: cut to 0…1 ("clamp"), stretched to it ("normalize", each picture by itself), or as they are."""
    if wanted == "raw":
        return image
    if wanted == "clamp":
        return torch.nan_to_num(image).clamp(0, 1)
    around = tuple(range(1, image.ndim))
    infinite = torch.full_like(image, float("inf"))
    lowest = torch.where(image.isfinite(), image, infinite).amin(around, keepdim=True)
    highest = torch.where(image.isfinite(), image, -infinite).amax(around, keepdim=True)
    lowest, highest = (torch.where(end.isfinite(), end, torch.zeros_like(end)) for end in (lowest, highest))
    clean = torch.where(image.isnan(), lowest, image).clamp(lowest, highest)  # infinities are the ends of the range
    # A picture of one colour has nothing to stretch: it is cut instead.
    # Halves, because a range from -3e38 to 3e38 is more than float32 holds.
    stretched = (clean / 2 - lowest / 2) / (highest / 2 - lowest / 2).clamp_min(1e-12)
    return torch.where(highest > lowest, stretched, clean.clamp(0, 1))


def resting(tensor: Tensor) -> Tensor:
    """As ComfyUI keeps values between nodes: float32, in one piece, on its device for that."""
    return tensor.to(rest_device(), torch.float32).contiguous()


def text_shown(text: str, *result: Any) -> dict[str, Any]:
    """An output node's answer: `text` on the node, and what it hands on."""
    return {"ui": {"text": (text,)}, "result": result}
