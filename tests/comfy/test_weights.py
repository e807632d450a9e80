"""Weights are the same in every run, come back from files and from elsewhere, and no input is written to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.comfy.prompts import CONV, PHOTO, node, photo, show
from torch.nn import functional as F

from anytorch.comfy.pack import NODE_CLASS_MAPPINGS


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
        assert "not a path inside" in refused or "longer than a file's name" in refused, wrong


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
    assert error["type"] == "anytorch.errors.ModelError" and "is not a whole safetensors file" in error["message"]
