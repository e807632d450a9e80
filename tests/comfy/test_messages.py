"""What a node says when something is wrong: on the node, before the run, and when memory is short."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.comfy.prompts import CONV, PHOTO, node, photo, show
from torch.nn import functional as F

from anytorch.comfy.pack import NODE_CLASS_MAPPINGS

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "channels": (
        node("CustomPyTorchConv2D", image=["1", 0], **{**CONV, "in_channels": 4}),
        "in_channels is 4, but the image has 3 channels .*1×30×41×3",
    ),
    "kernel too large": (
        node("CustomPyTorchConv2D", image=["1", 0], **{**CONV, "kernel_size": 33}),
        "33×33 does not fit into an image of 30×41",
    ),
    "even kernel": (
        node("CustomPyTorchConv2D", image=["1", 0], **{**CONV, "kernel_size": 4}, kernel="blur"),
        "kernel_size 4",
    ),
    "kernel and channels": (
        node("CustomPyTorchConv2D", image=["1", 0], **{**CONV, "out_channels": 8}, kernel="blur"),
        "out_channels is 8",
    ),
    "features": (
        node("CustomPyTorchLinear", tensor=["1", 0], in_features=7, out_features=2, use_bias=True),
        "in_features is 7, but the tensor's last dimension is 3",
    ),
    "operands": (
        node("CustomPyTorchTensorOps", tensor_a=["1", 0], tensor_b=["1", 1], operation="add"),
        "add cannot combine them: tensor_a is 1×30×41×3 and tensor_b 1×30×41",
    ),
    "matmul": (node("CustomPyTorchTensorOps", tensor_a=["1", 0], tensor_b=["1", 0], operation="matmul"), "3 is not 41"),
    "loss": (
        node("CustomPyTorchLoss", prediction=["1", 0], target=["1", 1], loss_type="mse"),
        "the prediction is 1×30×41×3 and the target 1×30×41",
    ),
    "no text": (node("AnytorchTextEmbedding", text=" \n ", model="", split_lines=True), "there is no text"),
    "no model": (
        node("AnytorchTextEmbedding", text="x", model="./nowhere", split_lines=True),
        "there is no such folder",
    ),
    "bad candles": (
        node(
            "AnytorchForecast",
            model="tiny",
            horizon=2,
            samples=1,
            draw_seed=0,
            temperature=1.0,
            top_p=1.0,
            candles="a,b\n1,2\n",
        ),
        "column",
    ),
    "no forecaster": (
        node("AnytorchForecast", model="nobody", horizon=2, samples=1, draw_seed=0, temperature=1.0, top_p=1.0),
        "nobody",
    ),
    "channel": (node("AnytorchTensorToMask", tensor=["1", 0], channel=3, output_range="clamp"), "channels 0 to 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_message_on_the_node(comfy: Any, case: str) -> None:
    """One sentence with what was found, and a hint; no stack of somebody else's words."""
    wrong, words = WRONG[case]
    prompt = {"1": PHOTO, "2": wrong}
    if not getattr(NODE_CLASS_MAPPINGS[wrong["class_type"]], "OUTPUT_NODE", False):
        prompt["3"] = node("PreviewAny", source=["2", 0])
    made = comfy.run(prompt)
    assert made.error is not None and made.error["node"] == "2"
    assert re.search(words, made.error["message"]), made.error
    assert made.error["type"].startswith("anytorch.errors.")
    assert len(made.error["message"].splitlines()) <= 2


def test_a_value_that_is_no_tensor() -> None:
    linear: Any = NODE_CLASS_MAPPINGS["CustomPyTorchLinear"]
    for value, words in (
        ({"samples": photo()}, "a latent"),
        (3, "a int"),
        (torch.empty(0, 3), "empty"),
        (photo() * 1j, "complex"),
    ):
        with pytest.raises(ValueError, match=words):
            linear().run(value, 0, 1, True)


def test_refused_before_running(comfy: Any) -> None:
    for wrong, words in (
        (node("AnytorchDevice", backend="gpu9", index=-1), "unknown back end 'gpu9'"),
        (node("AnytorchLoadWeights", file="gone.safetensors"), "gone.safetensors does not exist"),
        (node("AnytorchLoadWeights", file="../../etc/passwd"), "not a path inside"),
    ):
        refused = comfy.run({"1": wrong, "2": node("PreviewAny", source=["1", 0])}).refused
        assert words in str(refused), refused
    forecast = {"model": "tiny", "horizon": 2, "samples": 1, "draw_seed": 0, "temperature": 1.0, "top_p": 1.0}
    assert "not a path inside" in str(comfy.run({"1": node("AnytorchForecast", **forecast, file="../x.csv")}).refused)
    assert "does not exist" in str(comfy.run({"1": node("AnytorchForecast", **forecast, file="x.csv")}).refused)


def test_out_of_memory_is_said(comfy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nlong story")

    monkeypatch.setattr(F, "relu", fail)
    made = comfy.run(
        {"1": PHOTO, "2": node("CustomPyTorchActivation", tensor=["1", 0], activation_type="relu"), "3": show(["2", 0])}
    )
    assert made.error["type"] == "anytorch.errors.OutOfMemory"
    assert "too little memory" in made.error["message"] and "long story" not in made.error["message"]


def test_fewer_pictures_at_once_where_memory_is_short(comfy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = F.conv2d, []

    def short(x: Any, *rest: Any, **named: Any) -> Any:
        seen.append(len(x))
        if len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(x, *rest, **named)

    conv: Any = NODE_CLASS_MAPPINGS["CustomPyTorchConv2D"]
    batch = torch.rand(5, 8, 8, 3)
    wanted = conv().run(batch, *CONV.values())[1]
    monkeypatch.setattr(F, "conv2d", short)
    torch.testing.assert_close(conv().run(batch, *CONV.values())[1], wanted)
    assert seen == [5, 2, 2, 1]
