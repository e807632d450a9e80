"""What the tests of the stand-in get: `cuda`, torch with a stand-in in force, on the CPU and on the webgpu device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LAVAPIPE = REPOSITORY / ".cache" / "mesa" / "lvp.json"

# Here, not in a fixture: the Vulkan loader reads it once, when the first adapter of the process is looked for.
if "VK_ICD_FILENAMES" not in os.environ and "VK_DRIVER_FILES" not in os.environ and LAVAPIPE.exists():
    os.environ["VK_ICD_FILENAMES"] = str(LAVAPIPE)
os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")  # the loader complains on standard error without one

DEVICES = ("cpu", "webgpu")


@pytest.fixture(autouse=True)
def devices_tried_once(isolation: None, monkeypatch: pytest.MonkeyPatch, shared_cache: Callable[[str], Path]) -> None:
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", str(shared_cache("run")))
    monkeypatch.setenv("ANYTORCH_WEBGPU_FALLBACK", "silent")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture(autouse=True)
def fresh_ledger() -> Iterator[Any]:
    """The notes of one test alone."""
    from anytorch.run.ledger import ledger

    ledger.clear()
    yield ledger


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, missing: Callable[[str, str], NoReturn]) -> str:
    """The name of a device that can stand in here."""
    name = str(request.param)
    if name == "webgpu":
        pytest.importorskip("wgpu")
        from anytorch.errors import DeviceUnavailable

        try:
            import anytorch.webgpu  # noqa: F401  (registers the device)
            from anytorch.gpu.runtime import open_runtime

            open_runtime()
        except DeviceUnavailable as exc:
            missing("webgpu-adapter", str(exc))
    return name


@pytest.fixture
def cuda(device: str, cpu_wheel: None) -> Iterator[Any]:
    """torch, while `device` stands in for CUDA."""
    import torch

    import anytorch

    with anytorch.stand_in(device) as standing:
        assert standing.resolution.chosen.torch_type == device and not standing.resolution.fell_back
        yield torch
