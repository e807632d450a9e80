"""Nodes to choose a device, list all devices, and free memory."""

from __future__ import annotations

from typing import Any

from anytorch.comfy import comfyui
from anytorch.comfy.jobs import forget
from anytorch.comfy.places import NUMPY, REQUESTS, place_for
from anytorch.comfy.values import ANYTHING, DEVICE, DeviceChoice, Node, inputs, text_shown, whole, widget
from anytorch.counts import counted
from anytorch.devices.choose import devices
from anytorch.devices.memory import cleanup, memory
from anytorch.devices.ranking import gigabytes
from anytorch.devices.types import Level, State


class AnytorchDevice(Node, title="Device", group="devices"):
    DESCRIPTION = (
        "Where the connected nodes compute. A missing device falls back to the CPU, and `note` says why. "
        "numpy computes without any driver, through anytorch.lite."
    )
    RETURN_TYPES, RETURN_NAMES = (DEVICE, "STRING", "STRING"), ("device", "name", "note")
    required = inputs(backend=widget(REQUESTS, "auto"), index=whole(-1, -1, 63, "Index of the card; -1: the best one."))

    @classmethod
    def VALIDATE_INPUTS(cls, backend: str | None) -> bool | str:
        """Named here, so that an unknown back end is answered with this sentence instead of "value not in list"."""
        if backend is None or backend in REQUESTS:
            return True
        return f"unknown back end {backend!r}; choose one of {', '.join(REQUESTS)}"

    def run(self, backend: str, index: int) -> tuple[DeviceChoice, str, str]:
        numbered = index >= 0 and backend not in ("auto", NUMPY)
        choice = DeviceChoice(f"{backend}:{index}" if numbered else backend)
        place = place_for(choice)
        return choice, place.name, place.note


class AnytorchDeviceStatus(Node, title="Device Status", group="devices"):
    DESCRIPTION = "Every device of this machine, its memory, and why some cannot be used."
    OUTPUT_NODE = True
    RETURN_TYPES, RETURN_NAMES = ("STRING",), ("text",)

    @classmethod
    def IS_CHANGED(cls) -> float:
        return float("nan")  # memory changes from moment to moment: always run

    def run(self) -> dict[str, Any]:
        text = status()
        return text_shown(text, text)


def status() -> str:
    lines = []
    for device in devices():
        use = memory(device.torch_name) if device.state is State.USABLE else None
        room = f", {gigabytes(use.free)} of {gigabytes(use.total)} free" if use and use.free and use.total else ""
        lines.append(f"{device.id}: {device.name}, {device.state.value}{room}")
        problems = [reason for reason in device.reasons if reason.level is not Level.NOTE]
        lines += [f"    {reason.text}" for reason in problems[:2]]
    return "\n".join(lines)


class AnytorchMemoryCleanup(Node, title="Memory Clean-up", group="devices"):
    DESCRIPTION = "Frees memory when the workflow gets here, and passes its input on."
    OUTPUT_NODE = True
    RETURN_TYPES, RETURN_NAMES = (ANYTHING, "STRING"), ("anything", "text")
    required = inputs(
        unload_models=widget("BOOLEAN", False, "Also unload ComfyUI's models."),
        unload_engines=widget("BOOLEAN", True, "Also unload those of Text Embedding and Forecast."),
    )
    optional = inputs(anything=(ANYTHING, {"tooltip": "Passed on unchanged, so that the clean-up runs in between."}))

    def run(self, unload_models: bool, unload_engines: bool, anything: Any = None) -> dict[str, Any]:
        before = free_everywhere()
        closed = forget() if unload_engines else 0
        if unload_models:
            comfyui.unload_models()
        cleanup()
        now = free_everywhere()
        lines = [
            f"{name}: {gigabytes(was)} free before, {gigabytes(now[name])} after"
            for name, was in before.items()
            if name in now
        ]
        text = "\n".join([*lines, *([f"{counted(closed, 'engine')} closed"] if closed else [])])
        return text_shown(text, anything, text)


def free_everywhere() -> dict[str, int]:
    usable = [device for device in devices(tried="needed") if device.state is State.USABLE]
    found = {device.id: memory(device.torch_name).free for device in usable}
    return {name: free for name, free in found.items() if free is not None}
