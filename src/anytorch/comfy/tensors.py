"""Between tensors and what ComfyUI's own nodes understand: images, masks and latents; and a look at a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anytorch.comfy.values import (
    CATEGORY,
    IMAGE,
    LATENT,
    MASK,
    NUMBERS,
    RANGES,
    TENSOR,
    as_image,
    as_tensor,
    in_range,
    resting,
    shape_text,
    text_shown,
)
from anytorch.errors import InputError

LAYOUTS = ["channels last", "channels first"]
COLOURS = ["as they are", "one picture per channel"]
SUBCATEGORY = f"{CATEGORY}/convert"


class AnytorchTensorToImage:
    DESCRIPTION = "A tensor as an image that can be previewed and saved. Two dimensions become a grey picture."
    CATEGORY, FUNCTION = SUBCATEGORY, "run"
    RETURN_TYPES, RETURN_NAMES = (IMAGE,), ("image",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "tensor": (NUMBERS, {}),
                "output_range": (RANGES, {"default": "clamp", "tooltip": "How numbers get to 0…1."}),
                "layout": (LAYOUTS, {"default": LAYOUTS[0]}),
                "channels": (
                    COLOURS,
                    {"default": COLOURS[0], "tooltip": "One per channel shows feature maps."},
                ),
            }
        }

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


class AnytorchImageToTensor:
    DESCRIPTION = (
        "An image or mask as a tensor, channels last as ComfyUI keeps them, or first as torch's layers want them."
    )
    CATEGORY, FUNCTION = SUBCATEGORY, "run"
    RETURN_TYPES, RETURN_NAMES = (TENSOR,), ("tensor",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"image": (NUMBERS, {}), "layout": (LAYOUTS, {"default": LAYOUTS[0]})}}

    def run(self, image: Any, layout: str) -> tuple[Tensor]:
        pictures = as_image(image)
        return (resting(pictures.movedim(-1, 1) if layout == LAYOUTS[1] else pictures),)


class AnytorchTensorToMask:
    DESCRIPTION = "One channel of a tensor, or the mean of all, as a mask."
    CATEGORY, FUNCTION = SUBCATEGORY, "run"
    RETURN_TYPES, RETURN_NAMES = (MASK,), ("mask",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        channel = ("INT", {"default": -1, "min": -1, "max": 2**20, "tooltip": "-1: the mean of all channels."})
        return {
            "required": {"tensor": (NUMBERS, {}), "channel": channel, "output_range": (RANGES, {"default": "clamp"})}
        }

    def run(self, tensor: Any, channel: int, output_range: str) -> tuple[Tensor]:
        numbers = as_tensor(tensor, "tensor")
        image = numbers[None, :, :, None] if numbers.ndim == 2 else as_image(numbers, "tensor")
        if channel >= image.shape[-1]:
            raise InputError(f"channel is {channel}, but the tensor has channels 0 to {image.shape[-1] - 1}")
        mask = image.mean(-1) if channel < 0 else image[..., channel]
        return (resting(in_range(mask, output_range)),)


class AnytorchTensorToLatent:
    DESCRIPTION = "A tensor [batch, channels, height, width] as a latent."
    CATEGORY, FUNCTION = SUBCATEGORY, "run"
    RETURN_TYPES, RETURN_NAMES = (LATENT,), ("latent",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"tensor": (TENSOR, {})}}

    def run(self, tensor: Any) -> tuple[dict[str, Tensor]]:
        samples = as_tensor(tensor, "tensor")
        if samples.ndim != 4:
            found = shape_text(samples.shape)
            raise InputError(f"a latent has 4 dimensions (batch, channels, height, width), this tensor is {found}")
        return ({"samples": resting(samples)},)


class AnytorchLatentToTensor:
    DESCRIPTION = "The numbers of a latent, [batch, channels, height, width]."
    CATEGORY, FUNCTION = SUBCATEGORY, "run"
    RETURN_TYPES, RETURN_NAMES = (TENSOR,), ("tensor",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"latent": (LATENT, {})}}

    def run(self, latent: Any) -> tuple[Tensor]:
        if not isinstance(latent, dict) or "samples" not in latent:
            raise InputError(f"latent is a {type(latent).__name__} without samples, not a latent")
        return (resting(as_tensor(latent["samples"], "latent")),)


class AnytorchTensorInfo:
    DESCRIPTION = "Shape, type, device, and the smallest, largest and mean number of a tensor."
    CATEGORY, FUNCTION, OUTPUT_NODE = SUBCATEGORY, "run", True
    RETURN_TYPES, RETURN_NAMES = ("STRING",), ("text",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"tensor": (NUMBERS, {})}}

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
