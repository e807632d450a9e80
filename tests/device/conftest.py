"""Tests that need a real accelerator: `make test-device`. Each compares what the device computes with the CPU.

`ANYTORCH_TEST_DEVICE` names the device, torch's own accelerator without it. `cpu` lets the CPU stand in: Triton's kernels
then run in its interpreter, and what a CPU has not (recorded graphs) is skipped. That shows that the tests run, not that a
device is right.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

if os.environ.get("ANYTORCH_TEST_DEVICE") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # here, not in a fixture: Triton reads it when a kernel's module is imported


@pytest.fixture(scope="session")
def triton(accelerator: Any, missing: Callable[[str, str], NoReturn]) -> Any:
    """The device that runs Triton's kernels, or a CPU with the interpreter in its place."""
    from importlib.util import find_spec

    from anytorch.devices.locate import locate
    from anytorch.devices.precision import capabilities

    if find_spec("triton") is None:
        missing("triton", "it is not installed")
    backend, index = locate(accelerator)
    if accelerator.type != "cpu" and not capabilities(backend.name, index).triton:
        missing("triton", f"it does not compile for {accelerator}")
    return accelerator


@pytest.fixture(scope="session")
def graphs(accelerator: Any, missing: Callable[[str, str], NoReturn]) -> Any:
    """The device, if it records graphs."""
    from anytorch.devices.locate import locate
    from anytorch.devices.precision import capabilities

    backend, index = locate(accelerator)
    if not capabilities(backend.name, index).graphs:
        missing("graphs", f"{accelerator} records none")
    return accelerator


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def built_cache(isolation: None, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache for all tests of a process: what is compiled or measured once is not compiled again for each test."""
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", str(kernel_cache))
