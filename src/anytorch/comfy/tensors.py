"""Between tensors and what ComfyUI's own nodes understand: images, masks and latents; and a look at a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anytorch.comfy.values import (
    IMAGE,
    LATENT,
    MASK,
    NUMBERS,
    RANGES,
    TENSOR,
    Node,
    as_image,
    as_tensor,
    in_range,
    inputs,
    resting,
    shape_text,
    text_shown,
    whole,
    widget,
)
from anytorch.errors import InputError

LAYOUTS = ["channels last", "channels first"]
COLOURS = ["as they are", "one picture per channel"]


class AnytorchTensorToImage(Node, group="convert"):
    DESCRIPTION = "A tensor as an image that can be previewed and saved. Two dimensions become a grey picture."
    RETURN_TYPES, RETURN_NAMES = (IMAGE,), ("image",)
    required = inputs(
        tensor=(NUMBERS, {}),
        output_range=widget(RANGES, "clamp", "How numbers get to 0…1."),
        layout=widget(LAYOUTS, LAYOUTS[0]),
        channels=widget(COLOURS, COLOURS[0], "One per channel shows feature maps."),
    )

    def run(self, tensor: Any, output_range: str, layout: str, channels: str) -> tuple[Tensor]:
        numbers = as_tensor(tensor, "tensor")
        if numbers.ndim == 2:
            numbers = numbers[None, :, :, None]  # (H, W) → (1, H, W, 1)
        elif numbers.ndim == 4 and layout == LAYOUTS[1]:
            numbers = numbers.movedim(1, -1)
        elif numbers.ndim == 3 and layout == LAYOUTS[1]:
            numbers = numbers.movedim(0, -1)[None]  # (C, H, W) → (1, H, W, C)
        image = as_image(numbers, "tensor")  # (B, H, W, C)
        count = image.shape[-1]
        if channels == COLOURS[1]:
            image = image.movedim(-1, 1).flatten(0, 1)[..., None]  # (B·C, H, W, 1)
        elif count not in (1, 3, 4):
            raise InputError(
                f"the tensor has {count} channels ({shape_text(image.shape)}), and a picture has 1, 3 or 4",
                hint=f"set channels to {COLOURS[1]!r}, or bring them to 3 with Custom Linear Layer",
            )
        image = in_range(image, output_range)
        return (resting(image.expand(-1, -1, -1, 3) if image.shape[-1] == 1 else image),)


class AnytorchImageToTensor(Node, group="convert"):
    DESCRIPTION = (
        "An image or mask as a tensor, channels last as ComfyUI keeps them, or first as torch's layers want them."
    )
    RETURN_TYPES, RETURN_NAMES = (TENSOR,), ("tensor",)
    required = inputs(image=(NUMBERS, {}), layout=widget(LAYOUTS, LAYOUTS[0]))

    def run(self, image: Any, layout: str) -> tuple[Tensor]:
        pictures = as_image(image)
        return (resting(pictures.movedim(-1, 1) if layout == LAYOUTS[1] else pictures),)


class AnytorchTensorToMask(Node, group="convert"):
    DESCRIPTION = "One channel of a tensor, or the mean of all, as a mask."
    RETURN_TYPES, RETURN_NAMES = (MASK,), ("mask",)
    required = inputs(
        tensor=(NUMBERS, {}),
        channel=whole(-1, -1, 2**20, "-1: the mean of all channels."),
        output_range=widget(RANGES, "clamp"),
    )

    def run(self, tensor: Any, channel: int, output_range: str) -> tuple[Tensor]:
        numbers = as_tensor(tensor, "tensor")
        image = numbers[None, :, :, None] if numbers.ndim == 2 else as_image(numbers, "tensor")
        if channel >= image.shape[-1]:
            raise InputError(f"channel is {channel}, but the tensor has channels 0 to {image.shape[-1] - 1}")
        mask = image.mean(-1) if channel < 0 else image[..., channel]
        return (resting(in_range(mask, output_range)),)


class AnytorchTensorToLatent(Node, group="convert"):
    DESCRIPTION = "A tensor [batch, channels, height, width] as a latent."
    RETURN_TYPES, RETURN_NAMES = (LATENT,), ("latent",)
    required = inputs(tensor=(TENSOR, {}))

    def run(self, tensor: Any) -> tuple[dict[str, Tensor]]:
        samples = as_tensor(tensor, "tensor")
        if samples.ndim != 4:
            found = shape_text(samples.shape)
            raise InputError(f"a latent has 4 dimensions (batch, channels, height, width), this tensor is {found}")
        return ({"samples": resting(samples)},)


class AnytorchLatentToTensor(Node, group="convert"):
    DESCRIPTION = "The numbers of a latent, [batch, channels, height, width]."
    RETURN_TYPES, RETURN_NAMES = (TENSOR,), ("tensor",)
    required = inputs(latent=(LATENT, {}))

    def run(self, latent: Any) -> tuple[Tensor]:
        if not isinstance(latent, dict) or "samples" not in latent:
            raise InputError(f"latent is a {type(latent).__name__} without samples, not a latent")
        return (resting(as_tensor(latent["samples"], "latent")),)


class AnytorchTensorInfo(Node, group="convert"):
    DESCRIPTION = "Shape, type, device, and the smallest, largest and mean number of a tensor."
    OUTPUT_NODE = True
    RETURN_TYPES, RETURN_NAMES = ("STRING",), ("text",)
    required = inputs(tensor=(NUMBERS, {}))

    def run(self, tensor: Any) -> dict[str, Any]:
        numbers = as_tensor(tensor, "tensor")
        kind = tensor.dtype if isinstance(tensor, Tensor) else numbers.dtype
        odd = int((~torch.isfinite(numbers)).sum())
        text = (
            f"{shape_text(numbers.shape)}, {str(kind).removeprefix('torch.')} on {numbers.device}\n"
            f"from {float(numbers.min()):.6g} to {float(numbers.max()):.6g}, mean {float(numbers.mean()):.6g}"
            + (f"\n{odd} not finite" if odd else "")
        )
        return text_shown(text, text)
