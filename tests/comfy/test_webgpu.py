"""The layer nodes on the webgpu device: its tensors must live with ComfyUI's inference mode."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from anytorch.comfy import nodes
from anytorch.comfy.places import TorchPlace

LAVAPIPE = Path(__file__).resolve().parents[2] / ".cache" / "mesa" / "lvp.json"
if "VK_ICD_FILENAMES" not in os.environ and "VK_DRIVER_FILES" not in os.environ and LAVAPIPE.exists():
    os.environ["VK_ICD_FILENAMES"] = str(LAVAPIPE)
os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")


@pytest.fixture(scope="module")
def webgpu(missing: Callable[[str, str], NoReturn]) -> Iterator[torch.device]:
    pytest.importorskip("wgpu")
    from anytorch.errors import DeviceUnavailable

    try:
        import anytorch.webgpu  # noqa: F401  (registers the device)
        from anytorch.gpu.runtime import open_runtime

        open_runtime()
    except DeviceUnavailable as exc:
        missing("webgpu-adapter", str(exc))
    yield torch.device("webgpu")
    torch.webgpu.synchronize()  # type: ignore[attr-defined]


def outputs(image: torch.Tensor) -> list[Any]:
    """What the documented workflow computes, and its loss."""
    _, tensor, _ = nodes.CustomPyTorchConv2D().run(image, 3, 8, 3, 1, 1, True)
    (relu,) = nodes.CustomPyTorchActivation().run(tensor, "relu")
    linear, _ = nodes.CustomPyTorchLinear().run(relu, 8, 3, True)
    (sigmoid,) = nodes.CustomPyTorchActivation().run(linear, "sigmoid")
    (product,) = nodes.CustomPyTorchTensorOps().run(sigmoid, image, "multiply")
    (loss,) = nodes.CustomPyTorchLoss().run(product, image, "mse")["result"]
    return [tensor, linear, sigmoid, product, torch.tensor(loss)]


def test_the_documented_workflow(webgpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.rand(2, 17, 23, 3)
    with torch.inference_mode():
        wanted = outputs(image)
        monkeypatch.setattr(nodes, "place_for", lambda choice: TorchPlace(webgpu))
        found = outputs(image)
    assert all(tensor.device.type == "cpu" for tensor in found)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
