"""Which GPU: every adapter wgpu offers, ours in order of preference, and the one a user names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from anytorch.errors import DeviceUnavailable, UnknownDevice
from anytorch.gpu import layer

APIS = ("Vulkan", "Metal", "D3D12")  # OpenGL lacks the compute features we need
# What wgpu calls the fields of an `Adapter`, in their order.
INFO = ("device", "backend_type", "adapter_type", "description", "vendor_id", "device_id")
# Taken where the adapter has them. `cooperative-matrix` is listed by some and cannot be enabled: never ask for it here.
FEATURES = (
    "immediates",
    "shader-f16",
    "shader-f64",
    "shader-int64",
    "shader-i16",
    "subgroup",
    "subgroup-barrier",
    "shader-float32-atomic",
    "timestamp-query",
    "timestamp-query-inside-passes",
    "pipeline-cache",
)
_ORDER = {"DiscreteGPU": 0, "IntegratedGPU": 1, "VirtualGPU": 2, "Unknown": 3, "CPU": 4}


@dataclass(frozen=True)
class Adapter:
    name: str  # "NVIDIA H200"
    api: str  # "Vulkan"
    kind: str  # "DiscreteGPU", "IntegratedGPU", "VirtualGPU", "CPU", "Unknown"
    driver: str
    vendor_id: int
    device_id: int
    handle: Any = None  # wgpu's own object

    @property
    def software(self) -> bool:
        return self.kind == "CPU"


def list_adapters() -> list[Adapter]:
    """Every usable adapter, best first. Raises DeviceUnavailable if the package wgpu is missing."""
    try:
        import wgpu
    except ModuleNotFoundError as exc:
        if exc.name != "wgpu":
            raise
        raise DeviceUnavailable("the package wgpu is not installed", hint="pip install 'anytorch[webgpu]'") from exc
    with no_display(), as_first_user():
        handles = wgpu.gpu.enumerate_adapters_sync()
    usable = [(handle.info, handle) for handle in handles if handle.info["backend_type"] in APIS]
    found = [Adapter(*[*[info[name] for name in INFO], handle]) for info, handle in usable]
    return sorted(found, key=lambda adapter: _ORDER.get(adapter.kind, 3))


@contextmanager
def no_display() -> Iterator[None]:
    """Within it drivers that look for a Wayland display find none without writing an error to the terminal, as they do
    for every look where XDG_RUNTIME_DIR is not set: in containers, over ssh."""
    if "XDG_RUNTIME_DIR" in os.environ:
        yield
        return
    os.environ["XDG_RUNTIME_DIR"] = "/nonexistent"
    try:
        yield
    finally:
        del os.environ["XDG_RUNTIME_DIR"]


@contextmanager
def as_first_user() -> Iterator[None]:
    """Where wgpu has not been used yet, its instance is made within, as we want it: with our layer, and without OpenGL.
    Looking for OpenGL adapters takes longer than all the rest, and we cannot use them.

    A program that draws with wgpu has made its own choice before.
    """
    from wgpu.backends.wgpu_native import _helpers
    from wgpu.backends.wgpu_native.extras import set_instance_extras

    if _helpers._the_instance is not None:
        yield
        return
    with layer.asked_for():
        set_instance_extras(backends=("Vulkan", "Metal", "DX12"))  # makes the instance
        yield


def choose_adapter(adapters: Sequence[Adapter], wanted: str) -> Adapter:
    """The adapter a user means: "" for the best, a number in our order, a part of its name, or its API ("vulkan").

    A software adapter is chosen only by name or number, or when there is nothing else.
    """
    listed = "; ".join(f"{i}: {a.name} ({a.kind}, {a.api})" for i, a in enumerate(adapters))
    if not adapters:
        raise DeviceUnavailable(
            "wgpu found no Vulkan, Metal or D3D12 adapter on this machine",
            hint="install the graphics driver; on Linux also libvulkan1. `anytorch doctor` says which",
        )
    word = wanted.strip().lower()
    if not word:
        return adapters[0]
    if word.isdigit():
        if int(word) < len(adapters):
            return adapters[int(word)]
        raise UnknownDevice(f"there is no WebGPU adapter {word}; adapters: {listed}")
    for adapter in adapters:
        if word in adapter.name.lower() or word == adapter.api.lower():
            return adapter
    raise UnknownDevice(f"no WebGPU adapter is called {wanted!r}; adapters: {listed}")
