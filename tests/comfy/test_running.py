"""Devices, and what a running ComfyUI gives: progress, room, folders, cancelling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.comfy.prompts import CONV, PHOTO, node, show

from anytorch.comfy.pack import NODE_CLASS_MAPPINGS
from anytorch.comfy.places import REQUESTS


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
    assert made.value("2", 1) == "cpu" and made.value("2", 2).startswith(f"device '{backend}:0' cannot be used")


@pytest.mark.long
def test_device_status_runs_every_time_and_the_rest_does_not(
    comfy: Any, prompt_of: Callable[[str], dict[str, Any]]
) -> None:
    first = comfy.run(prompt_of("devices"))
    assert first.succeeded, first
    assert "cpu: " in first.ui["7"]["text"][0] and "GiB free" in first.ui["7"]["text"][0]
    assert comfy.run(prompt_of("devices")).ran == ["7"]


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
