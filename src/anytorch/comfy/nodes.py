"""Nodes over tensors. The five documented ones: Linear, Conv2D, Activation, Loss, Tensor Operations.

Their documented inputs and outputs come first and mean what the document says; the rest is optional and has a default.

Others lead between tensors and what ComfyUI's own nodes understand (images, masks, latents), and look at a tensor.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

from anytorch.comfy import weights as layer_weights
from anytorch.comfy.places import computed, computed_in_parts, place_for, said_plainly
from anytorch.comfy.values import (
    DEVICE,
    IMAGE,
    LATENT,
    MASK,
    NUMBERS,
    RANGES,
    TENSOR,
    WEIGHTS,
    DeviceChoice,
    Node,
    Weights,
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

LARGEST = 2**20
DEVICE_INPUT = {"device": (DEVICE, {"tooltip": "From the Device node. Not connected: the device ComfyUI uses."})}
LAYER_INPUTS = {
    "weight_seed": whole(0, 0, 2**32 - 1, "The same seed gives the same weights, on every device and in every run."),
    "weights": (WEIGHTS, {"tooltip": "From Load Weights or another layer. Not connected: drawn from weight_seed."}),
    "layer_name": widget("STRING", "", "Which layer of the connected weights: the part of the names before '.weight'."),
    **DEVICE_INPUT,
}


class CustomPyTorchLinear(Node, title="Custom Linear Layer"):
    DESCRIPTION = "y = x·Wᵀ + b over the last dimension, or over whole items where in_features is their size."
    RETURN_TYPES, RETURN_NAMES = (TENSOR, WEIGHTS), ("tensor", "weights")
    required = inputs(
        tensor=(NUMBERS, {"tooltip": "A tensor, an image or a mask."}),
        in_features=whole(0, 0, 2**31 - 1, "0: the last dimension's size."),
        out_features=whole(3, 1, LARGEST),
        use_bias=widget("BOOLEAN", True),
    )
    optional = LAYER_INPUTS

    @said_plainly
    def run(
        self,
        tensor: Any,
        in_features: int,
        out_features: int,
        use_bias: bool,
        weight_seed: int = 0,
        weights: Weights | None = None,
        layer_name: str = "",
        device: DeviceChoice | None = None,
    ) -> tuple[Tensor, Weights]:
        rows = features_last(as_tensor(tensor, "tensor"), in_features)  # (…, in)
        shape = (out_features, rows.shape[-1])
        if weights is None:
            numbers = layer_weights.drawn(shape, weight_seed, bias=use_bias)
        else:
            numbers = layer_weights.chosen(weights, layer_name, shape, bias=use_bias)
        batch = rows if rows.ndim > 1 else rows[None]
        out = layer_computed("linear", numbers, batch, (*batch.shape[1:-1], out_features), device)
        return (out if rows.ndim > 1 else out[0]), numbers


def layer_computed(
    name: str, numbers: Weights, batch: Tensor, out_shape: tuple[int, ...], device: DeviceChoice | None, **options: int
) -> Tensor:
    """torch's or lite's function `name` over a batch, a few items at a time; `out_shape` is that of one item."""
    place = place_for(device)
    weight, bias = place.put(numbers["weight"]), place.put(numbers["bias"]) if "bias" in numbers else None
    function = getattr(place.functional, name)
    nbytes_each = 4 * (math.prod(batch.shape[1:]) + math.prod(out_shape))
    return computed_in_parts(place, lambda part: function(part, weight, bias, **options), batch, nbytes_each)


def features_last(tensor: Tensor, in_features: int) -> Tensor:
    """The tensor with in_features as its last dimension: as it is, or with each item of the batch laid out flat."""
    last = tensor.shape[-1] if tensor.ndim else 1
    if tensor.ndim == 0:
        tensor = tensor[None]
    if in_features in (0, last):
        return tensor
    whole = math.prod(tensor.shape[1:])
    if tensor.ndim > 2 and in_features == whole:
        return tensor.reshape(len(tensor), whole)
    other = f", or {whole} to take each of the {len(tensor)} items as a whole" if tensor.ndim > 2 else ""
    raise InputError(
        f"in_features is {in_features}, but the tensor's last dimension is {last} (its shape is {shape_text(tensor.shape)})",
        hint=f"set in_features to {last} (or 0){other}",
    )


class CustomPyTorchConv2D(Node, title="Custom Conv2D Layer"):
    DESCRIPTION = "A two-dimensional convolution. `image` is 0…1 and can be shown; `tensor` is what the layer computed."
    RETURN_TYPES, RETURN_NAMES = (IMAGE, TENSOR, WEIGHTS), ("image", "tensor", "weights")
    required = inputs(
        image=(NUMBERS, {"tooltip": "An image; also a mask, or a tensor [batch, height, width, channels]."}),
        in_channels=whole(3, 0, LARGEST, "0: the image's own number."),
        out_channels=whole(3, 1, LARGEST, "3 or 4 make a picture."),
        kernel_size=whole(3, 1, 1023),
        stride=whole(1, 1, 1023),
        padding=whole(1, 0, 1023),
        use_bias=widget("BOOLEAN", True),
    )
    optional = inputs(
        kernel=widget(layer_weights.KERNELS, "random", "A known filter instead of random weights."),
        output_range=widget(RANGES, "clamp", "How the numbers are mapped to 0…1 for the image output."),
        **LAYER_INPUTS,
    )

    @said_plainly
    def run(
        self,
        image: Any,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int,
        padding: int,
        use_bias: bool,
        kernel: str = "random",
        output_range: str = "clamp",
        weight_seed: int = 0,
        weights: Weights | None = None,
        layer_name: str = "",
        device: DeviceChoice | None = None,
    ) -> tuple[Tensor, Tensor, Weights]:
        pictures = as_image(image).movedim(-1, 1)  # (B, C, H, W)
        batch, channels, height, width = pictures.shape
        if in_channels not in (0, channels):
            raise InputError(
                f"in_channels is {in_channels}, but the image has {channels} channels "
                f"(its shape is {shape_text((batch, height, width, channels))}: batch, height, width, channels)",
                hint=f"set in_channels to {channels}, or to 0 to take it from the image",
            )
        out_size = tuple((n + 2 * padding - kernel_size) // stride + 1 for n in (height, width))
        if min(out_size) < 1:
            raise InputError(
                f"a kernel of {kernel_size}×{kernel_size} does not fit into an image of {height}×{width} with a padding of "
                f"{padding}",
                hint=f"use a kernel_size of at most {min(height, width) + 2 * padding}, or more padding",
            )
        shape = (out_channels, channels, kernel_size, kernel_size)
        if weights is not None:
            numbers = layer_weights.chosen(weights, layer_name, shape, bias=use_bias)
        elif kernel == "random":
            numbers = layer_weights.drawn(shape, weight_seed, bias=use_bias)
        elif out_channels != channels:
            raise InputError(
                f"the kernel {kernel!r} gives as many channels as it gets ({channels}), but out_channels is {out_channels}",
                hint=f"set out_channels to {channels}, or kernel to random",
            )
        else:
            numbers = layer_weights.kernel(kernel, channels, kernel_size, bias=use_bias)
        out = layer_computed(
            "conv2d", numbers, pictures, (out_channels, *out_size), device, stride=stride, padding=padding
        )
        tensor = resting(out.movedim(1, -1))  # (B, H', W', C')
        shown = in_range(tensor, output_range)
        # ComfyUI's own nodes cannot show one channel: it becomes a grey picture. Other numbers stay as they are.
        return (shown.expand(-1, -1, -1, 3).contiguous() if out_channels == 1 else shown), tensor, numbers


ACTIVATIONS = ["relu", "sigmoid", "tanh", "gelu", "silu", "softmax"]


class CustomPyTorchActivation(Node, title="Custom Activation"):
    DESCRIPTION = "An activation function, number by number (softmax: over the last dimension)."
    RETURN_TYPES, RETURN_NAMES = (TENSOR,), ("tensor",)
    required = inputs(tensor=(NUMBERS, {}), activation_type=widget(ACTIVATIONS, "relu"))
    optional = DEVICE_INPUT

    @said_plainly
    def run(self, tensor: Any, activation_type: str, device: DeviceChoice | None = None) -> tuple[Tensor]:
        place = place_for(device)
        function = getattr(place.functional, activation_type)
        options = {"dim": -1} if activation_type == "softmax" else {}
        return (computed(place, lambda x: function(x, **options), as_tensor(tensor, "tensor")),)


LOSSES = {"mse": "mse_loss", "mae": "l1_loss"}


class CustomPyTorchLoss(Node, title="Custom Loss Function"):
    DESCRIPTION = (
        "How far a prediction is from its target: the mean of the squared (mse) or absolute (mae) differences."
    )
    OUTPUT_NODE = True
    RETURN_TYPES, RETURN_NAMES = ("FLOAT",), ("loss",)
    required = inputs(prediction=(NUMBERS, {}), target=(NUMBERS, {}), loss_type=widget(list(LOSSES), "mse"))
    optional = DEVICE_INPUT

    @said_plainly
    def run(self, prediction: Any, target: Any, loss_type: str, device: DeviceChoice | None = None) -> dict[str, Any]:
        ours, theirs = as_tensor(prediction, "prediction"), as_tensor(target, "target")
        if ours.shape != theirs.shape:
            raise InputError(
                f"the prediction is {shape_text(ours.shape)} and the target {shape_text(theirs.shape)}; "
                "a loss compares number with number, so they must be the same",
                hint="check sizes and channels of what is connected",
            )
        place = place_for(device)
        loss = float(computed(place, getattr(place.functional, LOSSES[loss_type]), ours, theirs))
        return text_shown(f"{loss_type}: {loss:.6g}", loss)


OPERATIONS = {
    "add": operator.add,
    "multiply": operator.mul,
    "matmul": operator.matmul,
    "subtract": operator.sub,
    "divide": operator.truediv,
}


class CustomPyTorchTensorOps(Node, title="Custom Tensor Operations"):
    DESCRIPTION = "Combine two tensors. matmul multiplies the last two dimensions: of images, width × channels."
    RETURN_TYPES, RETURN_NAMES = (TENSOR,), ("tensor",)
    required = inputs(tensor_a=(NUMBERS, {}), tensor_b=(NUMBERS, {}), operation=widget(list(OPERATIONS), "add"))
    optional = DEVICE_INPUT

    @said_plainly
    def run(self, tensor_a: Any, tensor_b: Any, operation: str, device: DeviceChoice | None = None) -> tuple[Tensor]:
        a, b = as_tensor(tensor_a, "tensor_a"), as_tensor(tensor_b, "tensor_b")
        check_operands(a, b, operation)
        return (computed(place_for(device), OPERATIONS[operation], a, b),)


def check_operands(a: Tensor, b: Tensor, operation: str) -> None:
    shapes = f"tensor_a is {shape_text(a.shape)} and tensor_b {shape_text(b.shape)}"
    if operation == "matmul":
        if min(a.ndim, b.ndim) == 0:
            raise InputError(f"matmul multiplies matrices, but {shapes}", hint="use multiply for single numbers")
        inner = b.shape[-2] if b.ndim > 1 else b.shape[0]
        if a.shape[-1] != inner:
            raise InputError(
                f"matmul needs as many columns in tensor_a as rows in tensor_b, but {shapes}: {a.shape[-1]} is not {inner}"
            )
    left, right = tuple(a.shape), tuple(b.shape)
    if operation == "matmul":
        left, right = left[:-2], right[:-2]  # what must fit together besides
    if not all(m == n or 1 in (m, n) for m, n in zip(reversed(left), reversed(right), strict=False)):
        raise InputError(
            f"{operation} cannot combine them: {shapes}",
            hint="sizes must be equal, or 1 where they differ, counted from the last dimension",
        )


# --- between tensors and ComfyUI's own values ------------------------------------------------------------------------

LAYOUTS = ["channels last", "channels first"]
COLOURS = ["as they are", "one picture per channel"]


class AnytorchTensorToImage(Node, title="Tensor to Image", group="convert"):
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


class AnytorchImageToTensor(Node, title="Image to Tensor", group="convert"):
    DESCRIPTION = (
        "An image or mask as a tensor, channels last as ComfyUI keeps them, or first as torch's layers want them."
    )
    RETURN_TYPES, RETURN_NAMES = (TENSOR,), ("tensor",)
    required = inputs(image=(NUMBERS, {}), layout=widget(LAYOUTS, LAYOUTS[0]))

    def run(self, image: Any, layout: str) -> tuple[Tensor]:
        pictures = as_image(image)
        return (resting(pictures.movedim(-1, 1) if layout == LAYOUTS[1] else pictures),)


class AnytorchTensorToMask(Node, title="Tensor to Mask", group="convert"):
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


class AnytorchTensorToLatent(Node, title="Tensor to Latent", group="convert"):
    DESCRIPTION = "A tensor [batch, channels, height, width] as a latent."
    RETURN_TYPES, RETURN_NAMES = (LATENT,), ("latent",)
    required = inputs(tensor=(TENSOR, {}))

    def run(self, tensor: Any) -> tuple[dict[str, Tensor]]:
        samples = as_tensor(tensor, "tensor")
        if samples.ndim != 4:
            found = shape_text(samples.shape)
            raise InputError(f"a latent has 4 dimensions (batch, channels, height, width), this tensor is {found}")
        return ({"samples": resting(samples)},)


class AnytorchLatentToTensor(Node, title="Latent to Tensor", group="convert"):
    DESCRIPTION = "The numbers of a latent, [batch, channels, height, width]."
    RETURN_TYPES, RETURN_NAMES = (TENSOR,), ("tensor",)
    required = inputs(latent=(LATENT, {}))

    def run(self, latent: Any) -> tuple[Tensor]:
        if not isinstance(latent, dict) or "samples" not in latent:
            raise InputError(f"latent is a {type(latent).__name__} without samples, not a latent")
        return (resting(as_tensor(latent["samples"], "latent")),)


class AnytorchTensorInfo(Node, title="Tensor Info", group="convert"):
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
