"""Every node, run by a host that keeps ComfyUI's rules."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from anytorch import lite
from anytorch.comfy.pack import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from anytorch.comfy.places import REQUESTS

PHOTO = {"class_type": "LoadImage", "inputs": {"image": "example.png"}}
CONV = {"in_channels": 3, "out_channels": 3, "kernel_size": 3, "stride": 1, "padding": 1, "use_bias": True}


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def show(link: list[Any]) -> dict[str, Any]:
    return node("AnytorchTensorInfo", tensor=link)


def photo() -> torch.Tensor:
    return torch.rand(1, 30, 41, 3, generator=torch.Generator().manual_seed(0))


# --- the documented nodes --------------------------------------------------------------------------------------------

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


# --- messages --------------------------------------------------------------------------------------------------------

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
        (node("AnytorchDevice", backend="gpu9", index=-1), "no back end 'gpu9'"),
        (node("AnytorchLoadWeights", file="gone.safetensors"), "gone.safetensors is not there"),
        (node("AnytorchLoadWeights", file="../../etc/passwd"), "not a name inside"),
    ):
        refused = comfy.run({"1": wrong, "2": node("PreviewAny", source=["1", 0])}).refused
        assert words in str(refused), refused
    forecast = {"model": "tiny", "horizon": 2, "samples": 1, "draw_seed": 0, "temperature": 1.0, "top_p": 1.0}
    assert "not a name inside" in str(comfy.run({"1": node("AnytorchForecast", **forecast, file="../x.csv")}).refused)
    assert "is not there" in str(comfy.run({"1": node("AnytorchForecast", **forecast, file="x.csv")}).refused)


def test_out_of_memory_is_said(comfy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nlong story")

    monkeypatch.setattr(F, "relu", fail)
    made = comfy.run(
        {"1": PHOTO, "2": node("CustomPyTorchActivation", tensor=["1", 0], activation_type="relu"), "3": show(["2", 0])}
    )
    assert made.error["type"] == "anytorch.errors.OutOfMemory"
    assert "not enough memory" in made.error["message"] and "long story" not in made.error["message"]


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


# --- caching, weights, devices ---------------------------------------------------------------------------------------


def test_nothing_is_written_to_an_input(comfy: Any) -> None:
    prompt = {
        "1": PHOTO,
        "2": node("CustomPyTorchConv2D", image=["1", 0], **CONV),
        "3": node("CustomPyTorchActivation", tensor=["1", 0], activation_type="tanh"),
        "4": node(
            "AnytorchTensorToImage",
            tensor=["1", 0],
            output_range="normalize",
            layout="channels last",
            channels="as they are",
        ),
        "5": node("CustomPyTorchLoss", prediction=["3", 0], target=["4", 0], loss_type="mse"),
        "6": show(["2", 0]),
    }
    made = comfy.run(prompt)
    assert made.succeeded and torch.equal(made.value("1"), photo())


def test_the_same_weights_in_every_run(comfy: Any) -> None:
    prompt = {"1": PHOTO, "2": node("CustomPyTorchConv2D", image=["1", 0], **CONV, weight_seed=3), "3": show(["2", 1])}
    first = comfy.run(prompt)
    assert comfy.run(prompt).cached == ["1", "2", "3"]
    comfy.cache.clear()
    again = comfy.run(prompt)
    assert again.ran == ["1", "2", "3"] and torch.equal(first.value("2", 1), again.value("2", 1))
    prompt["2"]["inputs"]["weight_seed"] = 4
    assert not torch.equal(comfy.run(prompt).value("2", 1), first.value("2", 1))


def test_saved_weights_come_back(comfy: Any, prompt_of: Callable[[str], dict[str, Any]], tmp_path: Path) -> None:
    saved = comfy.run(prompt_of("save_weights"))
    assert saved.succeeded, saved
    assert saved.value("5") == "anytorch/two_layers.safetensors [output]"
    loaded = comfy.run(prompt_of("load_weights"))
    assert loaded.succeeded, loaded
    torch.testing.assert_close(loaded.value("3", 1), saved.value("2", 1))
    # Another file of that name: the node runs again, and what hangs on it.
    prompt = prompt_of("save_weights")
    prompt["2"]["inputs"]["weight_seed"] = 99
    comfy.run(prompt)
    assert "2" in comfy.run(prompt_of("load_weights")).ran
    assert comfy.run(prompt_of("load_weights")).ran == []
    wrong = prompt_of("load_weights")
    wrong["3"]["inputs"]["layer_name"] = "nobody"
    assert "no 'nobody.weight'; they have conv.bias, conv.weight" in comfy.run(wrong).error["message"]
    wrong["3"]["inputs"] |= {"layer_name": "conv", "out_channels": 4}
    assert "'conv.weight' is 3×3×3×3, but this layer's weights are 4×3×3×3" in comfy.run(wrong).error["message"]


def test_files_that_are_numbered(comfy: Any, prompt_of: Callable[[str], dict[str, Any]]) -> None:
    prompt = prompt_of("save_weights")
    prompt["5"]["inputs"]["overwrite"] = False
    names = []
    for seed in (1, 2):
        prompt["2"]["inputs"]["weight_seed"] = seed
        names.append(comfy.run(prompt).value("5"))
    assert names == ["anytorch/two_layers_00001.safetensors [output]", "anytorch/two_layers_00002.safetensors [output]"]
    for wrong in ("../elsewhere", "..", "", "a/", "a\0b", "/tmp/elsewhere", "x" * 300):
        prompt["5"]["inputs"]["filename_prefix"] = wrong
        refused = str(comfy.run(prompt).refused)
        assert "not a name inside" in refused or "longer than a file's name" in refused, wrong


def test_a_link_in_the_models_folder_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are often kept on another disk."""
    monkeypatch.chdir(tmp_path)
    save, load = NODE_CLASS_MAPPINGS["AnytorchSaveWeights"], NODE_CLASS_MAPPINGS["AnytorchLoadWeights"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "output").symlink_to(tmp_path / "elsewhere")
    save().run({"weight": torch.ones(2, 2)}, "made", True)
    (tmp_path / "models" / "anytorch").mkdir(parents=True)
    (tmp_path / "models" / "anytorch" / "there.safetensors").symlink_to(tmp_path / "elsewhere" / "made.safetensors")
    listed = load.INPUT_TYPES()["required"]["file"][0]
    assert listed == ["there.safetensors", "made.safetensors [output]"]
    for name in listed:
        assert load.VALIDATE_INPUTS(name) is True
        assert torch.equal(load().run(name)[0]["weight"], torch.ones(2, 2))


@pytest.mark.parametrize("backend", [name for name in REQUESTS if name not in ("webgpu", "cpu", "numpy", "auto")])
def test_a_device_that_is_not_here_falls_back(comfy: Any, backend: str, cpu_wheel: None) -> None:
    prompt = {
        "1": PHOTO,
        "2": node("AnytorchDevice", backend=backend, index=0),
        "3": node("CustomPyTorchConv2D", image=["1", 0], **CONV, device=["2", 0]),
        "4": show(["3", 1]),
    }
    made = comfy.run(prompt)
    assert made.succeeded, made
    assert made.value("2", 1) == "cpu" and made.value("2", 2).startswith(
        f"'{backend}:0' was asked for and cannot be used"
    )


def test_device_status_runs_every_time_and_the_rest_does_not(
    comfy: Any, prompt_of: Callable[[str], dict[str, Any]]
) -> None:
    first = comfy.run(prompt_of("devices"))
    assert first.succeeded, first
    assert "cpu: " in first.ui["7"]["text"][0] and "GiB free" in first.ui["7"]["text"][0]
    assert comfy.run(prompt_of("devices")).ran == ["7"]


# --- inside a running ComfyUI ----------------------------------------------------------------------------------------


def test_progress_room_and_folders(
    running_comfyui: Any, comfy: Any, prompt_of: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    saved = comfy.run(prompt_of("save_weights"))
    assert saved.succeeded, saved
    assert (tmp_path / "O/anytorch/two_layers.safetensors").is_file()
    assert running_comfyui.progress == [(1, 1), (1, 1)] and running_comfyui.room[0] == 4 * 2 * 3 * 30 * 41
    cleaned = comfy.run({"1": node("AnytorchMemoryCleanup", unload_models=True, unload_engines=True)})
    assert cleaned.succeeded and running_comfyui.unloaded == 1 and "free before" in cleaned.ui["1"]["text"][0]


def test_a_run_that_is_cancelled(running_comfyui: Any, comfy: Any) -> None:
    running_comfyui.cancel_at = 1
    made = comfy.run({"1": node("AnytorchTextEmbedding", text="a\nb", model="", split_lines=True), "2": show(["1", 0])})
    assert made.error["type"] == "builtins.InterruptedError"


def test_progress_of_a_batch(running_comfyui: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from anytorch.comfy import places

    monkeypatch.setattr(places, "AT_ONCE_NBYTES", 2 * 4 * 6 * 64)
    conv: Any = NODE_CLASS_MAPPINGS["CustomPyTorchConv2D"]
    batch = torch.rand(5, 8, 8, 3)
    parts = conv().run(batch, *CONV.values())[1]
    assert running_comfyui.progress == [(2, 5), (4, 5), (5, 5)]
    torch.testing.assert_close(parts[4:], conv().run(batch[4:], *CONV.values())[1])


# --- converters and engines ------------------------------------------------------------------------------------------


def test_there_and_back(comfy: Any) -> None:
    prompt = {
        "1": PHOTO,
        "2": node("AnytorchImageToTensor", image=["1", 0], layout="channels first"),
        "3": node("AnytorchTensorToLatent", tensor=["2", 0]),
        "4": node("AnytorchLatentToTensor", latent=["3", 0]),
        "5": node(
            "AnytorchTensorToImage",
            tensor=["4", 0],
            output_range="raw",
            layout="channels first",
            channels="as they are",
        ),
        "6": node("PreviewImage", images=["5", 0]),
        "7": node(
            "AnytorchTensorToImage",
            tensor=["4", 0],
            output_range="clamp",
            layout="channels first",
            channels="one picture per channel",
        ),
        "8": node("PreviewImage", images=["7", 0]),
        "9": node("AnytorchTensorToMask", tensor=["1", 0], channel=1, output_range="clamp"),
        "10": show(["9", 0]),
    }
    made = comfy.run(prompt)
    assert made.succeeded, made
    assert torch.equal(made.value("5"), photo()) and torch.equal(made.value("9"), photo()[..., 1])
    assert made.ui["8"]["images"] == ["3 of 30×41"]


def test_a_tensor_that_is_no_picture(comfy: Any) -> None:
    prompt = {
        "1": PHOTO,
        "2": node("CustomPyTorchConv2D", image=["1", 0], **{**CONV, "out_channels": 7}),
        "3": node(
            "AnytorchTensorToImage",
            tensor=["2", 0],
            output_range="clamp",
            layout="channels last",
            channels="as they are",
        ),
        "4": node("PreviewImage", images=["3", 0]),
    }
    assert "has 7 channels" in comfy.run(prompt).error["message"]


def test_normalize_of_one_colour() -> None:
    from anytorch.comfy.values import in_range

    flat = torch.full((2, 3, 3, 1), 4.0)
    flat[1, 0, 0, 0] = 0.0
    shown = in_range(flat, "normalize")
    assert shown[0].unique().tolist() == [1.0] and shown[1].unique().tolist() == [0.0, 1.0]


def test_vectors_of_texts(comfy: Any, prompt_of: Callable[[str], dict[str, Any]]) -> None:
    made = comfy.run(prompt_of("text_embedding"))
    assert made.succeeded, made
    vectors, similarity = made.value("1"), made.value("1", 1)
    assert vectors.shape == (3, 384) and similarity[0, 1] > similarity[0, 2] + 0.2
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3))
    assert made.value("1", 2) == "3 texts, 384 dimensions, on cpu"


CANDLES = "timestamps,open,high,low,close,volume\n" + "".join(
    f"2026-01-{1 + i // 24:02} {i % 24:02}:00,{100 + i % 7},{101 + i % 7},{99 + i % 7},{100 + (i + 1) % 7},{10 + i % 5}\n"
    for i in range(100)
)


def test_forecast(comfy: Any, tmp_path: Path) -> None:
    (tmp_path / "input").mkdir()
    (tmp_path / "input" / "prices.csv").write_text(CANDLES)
    common = {"model": "tiny", "horizon": 3, "samples": 2, "draw_seed": 1, "temperature": 1.0, "top_p": 1.0}
    prompt = {"1": node("AnytorchForecast", **common, file="prices.csv"), "2": node("PreviewImage", images=["1", 0])}
    made = comfy.run(prompt)
    assert made.succeeded, made
    mean, paths, table = (made.value("1", i) for i in (1, 2, 3))
    assert mean.shape == (3, 6) and paths.shape == (2, 3, 6) and table.count("\n") == 4
    assert table.splitlines()[1].startswith("2026-01-05 04:00:00,") and float(mean[0, 3]) == pytest.approx(103, abs=15)
    typed = comfy.run(
        {"1": node("AnytorchForecast", **common, candles=CANDLES), "2": node("PreviewImage", images=["1", 0])}
    )
    assert torch.equal(typed.value("1", 1), mean)
    assert comfy.run(prompt).ran == ["1", "2"]  # the cache keeps the last prompt's values alone
    assert comfy.run(prompt).ran == []
    (tmp_path / "input" / "prices.csv").write_text(CANDLES[: CANDLES.rindex("2026")])  # one row less
    assert comfy.run(prompt).ran == ["1", "2"]


def test_a_model_folder_that_changes_is_loaded_again(comfy: Any, tmp_path: Path) -> None:
    import shutil

    from anytorch.engines.forecast.assets import tiny_folder

    for kind in ("model", "tokenizer"):
        shutil.copytree(tiny_folder(kind), tmp_path / kind)
    prompt = {
        "1": node(
            "AnytorchForecast", model=str(tmp_path / "model"), tokenizer=str(tmp_path / "tokenizer"), candles=CANDLES,
            horizon=2, samples=1, draw_seed=1, temperature=1.0, top_p=1.0,
        )
    }  # fmt: skip
    first = comfy.run(prompt)
    assert first.succeeded, first
    assert comfy.run(prompt).ran == []
    weights = tmp_path / "model" / "model.safetensors"
    state = lite.load(weights)
    name = next(name for name in state if name.startswith("embedding"))
    lite.save({**state, name: state[name].numpy() * 0.5}, weights)
    again = comfy.run(prompt)
    assert again.ran == ["1"] and not torch.equal(first.value("1", 1), again.value("1", 1))


def test_weights_from_elsewhere(comfy: Any, tmp_path: Path) -> None:
    """A file that torch wrote, in bfloat16, of a layer with a longer name; and one that is no such file."""
    from safetensors.torch import save_file

    folder = tmp_path / "models" / "anytorch"
    folder.mkdir(parents=True)
    weight = torch.randn(2, 3).to(torch.bfloat16)
    save_file({"head.fc.weight": weight, "head.fc.bias": torch.ones(2)}, folder / "theirs.safetensors")
    (folder / "broken.safetensors").write_bytes(b"not a file of tensors")
    prompt = {
        "1": PHOTO,
        "2": node("AnytorchLoadWeights", file="theirs.safetensors"),
        "3": node(
            "CustomPyTorchLinear", tensor=["1", 0], in_features=3, out_features=2, use_bias=True, weights=["2", 0]
        ),
        "4": show(["3", 0]),
    }
    made = comfy.run(prompt)
    assert made.succeeded, made
    torch.testing.assert_close(made.value("3"), F.linear(photo(), weight.float(), torch.ones(2)))
    assert made.value("2", 1) == "head.fc.bias: 2\nhead.fc.weight: 2×3"
    prompt["2"]["inputs"]["file"] = "broken.safetensors"
    error = comfy.run(prompt).error
    assert error["type"] == "anytorch.errors.ModelError" and "is not a safetensors file" in error["message"]
