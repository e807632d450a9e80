"""The nodes on a real accelerator, through the Device node's "auto": what ComfyUI users with a GPU get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch

from anytorch.counts import counted
from anytorch.devices.choose import resolve
from anytorch.text.checkpoints.locate import packaged_model

pytestmark = pytest.mark.device


@pytest.fixture(scope="module")
def accelerator(missing: Callable[[str, str], NoReturn]) -> str:
    """By the name that the Device node's "auto" finds; here no CPU can stand in."""
    chosen = resolve("auto").chosen
    if chosen.backend == "cpu":
        missing("accelerator", "the Device node finds none")
    return chosen.torch_name


def on(prompt: dict[str, Any], backend: str) -> dict[str, Any]:
    """The workflow with a Device node connected to every node that takes one."""
    takes = ("CustomPyTorchConv2D", "CustomPyTorchActivation", "CustomPyTorchLinear", "CustomPyTorchLoss")
    for node in prompt.values():
        if node["class_type"] in takes:
            node["inputs"]["device"] = ["99", 0]
    return {**prompt, "99": {"class_type": "AnytorchDevice", "inputs": {"backend": backend, "index": -1}}}


@pytest.mark.parametrize(("name", "node", "output"), [("mlp", "5", 0), ("loss", "3", 0)])
def test_workflow(
    comfy: Any, accelerator: str, prompt_of: Callable[[str], dict[str, Any]], name: str, node: str, output: int
) -> None:
    wanted, found = (comfy.run(on(prompt_of(name), backend)) for backend in ("cpu", "auto"))
    assert wanted.succeeded and found.succeeded, found
    assert found.value("99", 1) == accelerator
    ours, theirs = (torch.as_tensor(made.value(node, output)) for made in (found, wanted))
    assert ours.device.type == "cpu"
    torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=5e-3)  # convolutions there may round to TF32


def test_engines(comfy: Any, accelerator: str, prompt_of: Callable[[str], dict[str, Any]]) -> None:
    names = ["forecast", *(["text_embedding"] if packaged_model() else [])]  # whose model may not be installed there
    for name in names:
        made = comfy.run(prompt_of(name))
        assert made.succeeded, made
    clean = {"class_type": "AnytorchMemoryCleanup", "inputs": {"unload_models": True, "unload_engines": True}}
    assert f"{counted(len(names), 'engine')} closed" in comfy.run({"1": clean}).ui["1"]["text"][0]


def test_a_batch_that_does_not_fit_is_computed_in_parts(comfy: Any, accelerator: str) -> None:
    """A convolution that needs more at once than the device has free."""
    from anytorch.comfy import nodes, places
    from anytorch.comfy.values import DeviceChoice
    from anytorch.devices.memory import memory

    free = memory(accelerator).free
    if free is None:
        pytest.skip("nobody knows how much memory is free")
    side, channels = 1024, 64
    count = 8
    each = 4 * (3 + channels) * side * side
    kept = torch.empty(max(0, free - 4 * each), dtype=torch.uint8, device=accelerator)  # leaves room for about three
    conv = nodes.CustomPyTorchConv2D()
    image = torch.rand(count, side, side, 3)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(places, "AT_ONCE_NBYTES", count * each)  # all of them at once, to begin with
            _, tensor, _ = conv.run(image, 3, channels, 3, 1, 1, True, device=DeviceChoice("auto"))
    finally:
        del kept
    assert tensor.shape == (count, side, side, channels) and bool(torch.isfinite(tensor).all())
