"""get_device, get_device_info, get_memory_info and their like, on this machine's CPU and on the compiled NPU."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from anytorch_compat.system import (
    get_accelerator_type,
    get_best_device,
    get_device,
    get_device_info,
    get_memory_info,
    is_cuda_available,
    is_npu_available,
    memory_cleanup,
    resolve_device,
    set_seed,
)

import anytorch
from anytorch.errors import DeviceFallbackWarning, DeviceIndexError, UnknownDevice

SAMPLES = Path(__file__).parent / "samples"
FIGURES = ("allocated_gb", "reserved_gb", "max_allocated_gb", "free_gb", "total_gb")


@pytest.fixture(autouse=True)
def only_a_cpu() -> None:
    if get_best_device() != "cpu":
        pytest.skip("these answers are those of a machine without an accelerator")


def shape(name: str) -> Any:
    """The dictionary a document gives as the shape of an answer: keys, and types where it states them."""
    text = (SAMPLES / f"{name}.py").read_text(encoding="utf-8").partition("\n")[2]
    return eval(text)  # the sample is such a literal: {'device_count': int, 'ram': {...}}


def test_get_best_device_is_a_type_autocast_takes() -> None:
    device = get_best_device()
    assert device == "cpu"
    with torch.autocast(device_type=device, dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16


def test_get_device() -> None:
    assert get_device() == torch.device("cpu")
    assert get_device(force_cpu=True) == torch.device("cpu")
    assert get_device(prefer_npu=True) == torch.device("cpu")


def test_get_device_is_quiet_when_an_npu_is_only_preferred(recwarn: pytest.WarningsRecorder) -> None:
    get_device(prefer_npu=True)
    assert not recwarn.list


@pytest.mark.parametrize("request_", ["auto", "cpu", "CPU", " cpu ", None, torch.device("cpu")])
def test_resolve_device(request_: Any) -> None:
    assert resolve_device(request_) == torch.device("cpu")


@pytest.mark.parametrize("request_", ["cuda", "cuda:1", "mps", "npu:0", torch.device("cuda:0")])
def test_resolve_device_falls_back_and_says_so(request_: Any) -> None:
    with pytest.warns(DeviceFallbackWarning, match=re.escape(f"'{request_}' cannot be used")):
        assert resolve_device(request_) == torch.device("cpu")


def test_resolve_device_takes_no_nonsense() -> None:
    with pytest.raises(UnknownDevice, match="did you mean 'cuda'"):
        resolve_device("cudaa")


@pytest.mark.parametrize("variable", ["KRONOS_DEVICE", "YIRAGE_BACKEND", "ANYTORCH_BACKEND"])
def test_the_environment_answers_for_auto(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "CUDA:0")
    for ask in (resolve_device, get_device):
        with pytest.warns(DeviceFallbackWarning, match=rf"'cuda:0' \(from {variable}\) cannot be used"):
            assert ask() == torch.device("cpu")
    monkeypatch.setenv(variable, "auto")
    assert resolve_device() == torch.device("cpu")  # and no warning, which would be an error here
    assert get_best_device() == "cpu"


def test_strict_raises_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYTORCH_STRICT", "1")
    with pytest.raises(anytorch.AnytorchError, match="'cuda' cannot be used"):
        resolve_device("cuda")


def test_device_info_has_the_documented_shape() -> None:
    info = get_device_info()
    for key, kind in shape("5_10_device_info_keys").items():
        assert key in info
        assert info[key] is None or isinstance(info[key], kind), key
    assert info["device_type"] == "cpu" and info["device_count"] == 1
    assert info["cuda_available"] is False and info["npu_available"] is False
    assert info["device_name"] == anytorch.resolve("cpu").chosen.name
    assert info["torch_version"] == torch.__version__
    assert info["cuda_version"] == torch.version.cuda


def test_memory_info_has_the_documented_shape() -> None:
    told = get_memory_info()
    assert told.keys() == shape("5_11_memory_info_keys").keys()
    assert told["vram"] == {} and told["npu_memory"] == {}
    ram = told["ram"]
    assert 0 < ram["process_gb"] < ram["total_gb"] and 0 < ram["available_gb"] <= ram["total_gb"]
    assert ram["used_gb"] == pytest.approx(ram["total_gb"] - ram["available_gb"], abs=1e-5)


def test_memory_info_of_one() -> None:
    told = get_memory_info("cpu")
    assert told["available"] is True and told["reason"] == "" and told["device"] == "cpu"
    assert all(told[figure] > 0 for figure in FIGURES)
    assert get_memory_info("auto").keys() == told.keys()
    assert get_memory_info(torch.device("cpu")).keys() == told.keys()


@pytest.mark.parametrize("name", ["cuda", "CUDA:1", "npu", "mps", "rocm"])
def test_memory_info_of_one_that_is_missing(name: str, recwarn: pytest.WarningsRecorder) -> None:
    told = get_memory_info(name)
    assert told["available"] is False and told["reason"]
    assert told["backend"] == name.lower().partition(":")[0]
    assert all(told[figure] is None for figure in FIGURES)  # unknown is None, never 0
    assert not recwarn.list  # a question is no request: nothing fell back


def test_memory_info_takes_no_nonsense() -> None:
    with pytest.raises(UnknownDevice):
        get_memory_info("gpu0")
    with pytest.raises(DeviceIndexError):
        get_memory_info("cpu:3")


def test_accelerator_type_follows_the_settings() -> None:
    assert get_accelerator_type() == "cpu"
    with anytorch.use(backend="cuda"):
        assert get_accelerator_type() == "cpu"  # it is missing, so the CPU is in use
        assert "cuda" in get_device_info()["reason"].lower()


def test_availability() -> None:
    assert is_cuda_available() is False
    assert is_npu_available() is False


def test_set_seed_reaches_all_three() -> None:
    import numpy

    def draw() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.random()), float(torch.rand(()))

    set_seed(42)
    first = draw()
    assert draw() != first
    set_seed()
    assert draw() == first
    set_seed(7)
    assert draw() != first


def test_memory_cleanup_collects_garbage() -> None:
    import gc
    import weakref

    class Knot:
        def __init__(self) -> None:
            self.me = self  # a cycle: only the collector frees it

    gc.disable()
    try:
        gone = weakref.ref(Knot())
        assert gone() is not None
        memory_cleanup()
        assert gone() is None
    finally:
        gc.enable()
