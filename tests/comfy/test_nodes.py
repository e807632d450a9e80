"""The documented nodes: their names and inputs, and that they compute what torch computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.comfy.prompts import CONV, PHOTO, node, photo, show
from torch.nn import functional as F

from anytorch.comfy.pack import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

DOCUMENTED = {
    "CustomPyTorchLinear": ("Custom Linear Layer", ["tensor", "in_features", "out_features", "use_bias"], "TENSOR"),
    "CustomPyTorchConv2D": (
        "Custom Conv2D Layer",
        ["image", "in_channels", "out_channels", "kernel_size", "stride", "padding", "use_bias"],
        "IMAGE",
    ),
    "CustomPyTorchActivation": ("Custom Activation", ["tensor", "activation_type"], "TENSOR"),
    "CustomPyTorchLoss": ("Custom Loss Function", ["prediction", "target", "loss_type"], "FLOAT"),
    "CustomPyTorchTensorOps": ("Custom Tensor Operations", ["tensor_a", "tensor_b", "operation"], "TENSOR"),
}
CHOICES = {
    ("CustomPyTorchActivation", "activation_type"): ["relu", "sigmoid", "tanh"],
    ("CustomPyTorchLoss", "loss_type"): ["mse", "mae"],
    ("CustomPyTorchTensorOps", "operation"): ["add", "multiply", "matmul"],
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_surface(name: str) -> None:
    title, inputs, output = DOCUMENTED[name]
    kind: Any = NODE_CLASS_MAPPINGS[name]
    assert NODE_DISPLAY_NAME_MAPPINGS[name] == title and kind.CATEGORY == "PyTorch Custom"
    assert list(kind.INPUT_TYPES()["required"]) == inputs
    assert kind.RETURN_TYPES[0] == output
    for (owner, widget), first in CHOICES.items():
        if owner == name:
            assert kind.INPUT_TYPES()["required"][widget][0][: len(first)] == first


@pytest.mark.parametrize("name", NODE_CLASS_MAPPINGS)
def test_every_node_is_well_made(name: str) -> None:
    kind: Any = NODE_CLASS_MAPPINGS[name]
    groups = kind.INPUT_TYPES()
    assert set(groups) <= {"required", "optional"} and kind.DESCRIPTION and callable(getattr(kind, kind.FUNCTION))
    assert len(kind.RETURN_TYPES) == len(kind.RETURN_NAMES)
    inputs = {**groups["required"], **groups.get("optional", {})}
    # The page adds "randomize after each run" to a widget of this name, and weights would change with every run.
    assert not {"seed", "noise_seed"} & inputs.keys()
    for spec in inputs.values():
        assert len(spec) == 2 and isinstance(spec[1], dict)
        if isinstance(spec[0], list) and "default" in spec[1]:
            assert spec[1]["default"] in spec[0]
        spec[1]["tooltip"] = "another pack's"  # packs edit what they are given, and that must stay theirs
    assert "another pack's" not in str(kind.INPUT_TYPES())


@pytest.mark.parametrize("place", ["cpu", "numpy"])
def test_convolution_is_torchs(comfy: Any, place: str) -> None:
    prompt = {
        "1": PHOTO,
        "2": node("AnytorchDevice", backend=place, index=-1),
        "3": node(
            "CustomPyTorchConv2D",
            image=["1", 0],
            **{**CONV, "out_channels": 5, "stride": 2},
            device=["2", 0],
            weight_seed=4,
        ),
        "4": show(["3", 1]),
    }
    made = comfy.run(prompt)
    assert made.succeeded, made
    image, tensor, weights = (made.value("3", i) for i in range(3))
    wanted = F.conv2d(photo().movedim(-1, 1), weights["weight"], weights["bias"], stride=2, padding=1).movedim(1, -1)
    torch.testing.assert_close(tensor, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(image, wanted.clamp(0, 1), rtol=1e-4, atol=1e-5)
    assert made.value("2", 1) == place and tensor.shape == (1, 15, 21, 5) and tensor.is_contiguous()


def test_one_channel_can_be_shown(comfy: Any) -> None:
    prompt = {
        "1": PHOTO,
        "2": node("CustomPyTorchConv2D", image=["1", 1], **{**CONV, "in_channels": 1, "out_channels": 1}),  # a mask
        "3": node("PreviewImage", images=["2", 0]),
    }
    made = comfy.run(prompt)
    assert made.succeeded, made
    assert made.value("2", 0).shape == (1, 30, 41, 3) and made.value("2", 1).shape == (1, 30, 41, 1)


@pytest.mark.parametrize("kernel", ["identity", "blur", "sharpen", "edges"])
def test_kernels(comfy: Any, kernel: str) -> None:
    prompt = {
        "1": PHOTO,
        "2": node("CustomPyTorchConv2D", image=["1", 0], **{**CONV, "kernel_size": 5, "padding": 2}, kernel=kernel),
        "3": node("PreviewImage", images=["2", 0]),
    }
    tensor = comfy.run(prompt).value("2", 1)
    middle, inner = photo()[:, 2:-2, 2:-2], tensor[:, 2:-2, 2:-2]  # where the window lies inside the picture
    around = F.avg_pool2d(photo().movedim(-1, 1), 5, 1).movedim(1, -1)
    wanted = {"identity": middle, "blur": around, "sharpen": 2 * middle - around, "edges": 25 * (middle - around)}
    torch.testing.assert_close(inner, wanted[kernel], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_features", [3, 0, 30 * 41 * 3])
def test_linear_per_pixel_and_per_picture(comfy: Any, in_features: int) -> None:
    prompt = {
        "1": PHOTO,
        "2": node("CustomPyTorchLinear", tensor=["1", 0], in_features=in_features, out_features=4, use_bias=True),
        "3": show(["2", 0]),
    }
    made = comfy.run(prompt)
    weights = made.value("2", 1)
    given = photo().reshape(1, -1) if in_features > 3 else photo()
    torch.testing.assert_close(
        made.value("2"), F.linear(given, weights["weight"], weights["bias"]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("place", ["cpu", "numpy"])
@pytest.mark.parametrize(
    "name", NODE_CLASS_MAPPINGS["CustomPyTorchActivation"].INPUT_TYPES()["required"]["activation_type"][0]
)  # type: ignore[attr-defined]
def test_activations_are_torchs(comfy: Any, name: str, place: str) -> None:
    prompt = {
        "1": PHOTO,
        "2": node("CustomPyTorchTensorOps", tensor_a=["1", 0], tensor_b=["1", 0], operation="subtract"),
        "3": node("AnytorchDevice", backend=place, index=-1),
        "4": node("CustomPyTorchActivation", tensor=["1", 0], activation_type=name, device=["3", 0]),
        "5": show(["4", 0]),
    }
    options = {"dim": -1} if name == "softmax" else {}
    torch.testing.assert_close(comfy.run(prompt).value("4"), getattr(F, name)(photo(), **options), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", ["cpu", "numpy"])
def test_losses_and_operations(comfy: Any, place: str) -> None:
    def ran(operation: str, loss: str) -> Any:
        return comfy.run(
            {
                "1": PHOTO,
                "2": node("CustomPyTorchConv2D", image=["1", 0], **CONV, kernel="blur"),
                "3": node("AnytorchDevice", backend=place, index=-1),
                "4": node(
                    "CustomPyTorchTensorOps", tensor_a=["1", 0], tensor_b=["2", 0], operation=operation, device=["3", 0]
                ),
                "5": node("CustomPyTorchLoss", prediction=["4", 0], target=["1", 0], loss_type=loss, device=["3", 0]),
            }
        )

    for operation in ("add", "multiply", "subtract", "divide"):
        made = ran(operation, "mae")
        blurred = made.value("2", 0)
        a, b = photo(), blurred
        wanted = {"add": a + b, "multiply": a * b, "subtract": a - b, "divide": a / b}[operation]
        torch.testing.assert_close(made.value("4"), wanted)
        loss = made.value("5")
        assert type(loss) is float and loss == pytest.approx(float((wanted - a).abs().mean()), rel=1e-4)
        assert made.ui["5"]["text"] == [f"mae: {loss:.6g}"]
    assert ran("add", "mse").value("5") == pytest.approx(float((blurred**2).mean()), rel=1e-4)


def test_matmul(comfy: Any) -> None:
    prompt = {
        "1": node("AnytorchTextEmbedding", text="one\ntwo", model="", split_lines=True),
        "2": node("CustomPyTorchTensorOps", tensor_a=["1", 1], tensor_b=["1", 0], operation="matmul"),
        "3": show(["2", 0]),
    }
    made = comfy.run(prompt)
    torch.testing.assert_close(made.value("2"), made.value("1", 1) @ made.value("1", 0))
    assert made.ui["3"]["text"][0].startswith("2×384, float32 on cpu\n")
