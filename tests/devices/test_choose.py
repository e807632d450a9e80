"""Asking for a device on machines that are not this one: recorded facts in, a choice and its explanation out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from tests.devices.machines import GIB, hardware

import anytorch
from anytorch import settings
from anytorch.devices import choose
from anytorch.devices import gather as gather_module
from anytorch.devices.choose import resolve
from anytorch.devices.locate import locate
from anytorch.devices.registry import registry
from anytorch.devices.types import BackendReport, Caps, DeviceReport, Facts, TorchReport
from anytorch.errors import (
    DeviceFallbackWarning,
    DeviceIndexError,
    DeviceUnavailable,
    TorchMissing,
    UnknownDevice,
)
from anytorch.probe.facts import Gpu, Hardware

CAPS = Caps(("float32",), ("float32",), None)
CPU = BackendReport("cpu", (DeviceReport(0, "AMD EPYC 7B13", caps=CAPS),))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that gathering the facts gave these."""

    def pretend(found: Hardware, *reports: BackendReport) -> None:
        report = TorchReport("2.13.0", backends={r.name: r for r in (*reports, CPU)})

        def gather(tried: str = "needed", **more: object) -> Facts:
            return Facts(found, None if tried == "never" or found.torch is None else report)

        monkeypatch.setattr(gather_module, "gather", gather)

    return pretend


def two_cards(machine: Callable[..., None]) -> None:
    cards = [
        Gpu(
            "nvidia",
            f"NVIDIA H200 {i}",
            f"0000:0{i}:00.0",
            driver="nvidia",
            uuid=f"GPU-{i}{i}",
            index=i,
            capability=(9, 0),
        )
        for i in (0, 1)
    ]
    devices = tuple(
        DeviceReport(i, f"NVIDIA H200 {i}", f"GPU-{i}{i}", free=(100 + 20 * i) * GIB, caps=CAPS) for i in (0, 1)
    )
    machine(hardware(*cards, wheel="2.13.0+cu130"), BackendReport("cuda", devices))


def test_the_best_card_is_chosen_and_explained(machine: Callable[..., None]) -> None:
    two_cards(machine)
    assert anytorch.best_device() == torch.device("cuda:1")  # more memory is free on it
    text = anytorch.explain()
    assert "chosen: cuda:1" in text
    assert "not cuda:0, NVIDIA H200 0: it has less free memory" in text
    assert "not cpu, AMD EPYC 7B13: cuda comes before cpu" in text
    assert "no xpu: no Intel GPU (XPU) was found here" in text


def test_an_explicit_request_is_met_without_a_word(machine: Callable[..., None]) -> None:
    two_cards(machine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text in ("cuda:0", "CUDA:0", " cuda:0 ", "nvidia:0", "GPU-00"):
            found = anytorch.resolve(text)
            assert (found.device, found.fell_back, found.warning) == (torch.device("cuda:0"), False, "")
        assert anytorch.resolve(torch.device("cuda", 1)).name == "cuda:1"


@pytest.mark.parametrize("current", [0, 1])
def test_a_torch_device_without_a_number_is_the_current_card(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, current: int
) -> None:
    two_cards(machine)  # card 1 has more free memory
    cards = SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 2, current_device=lambda: current)
    monkeypatch.setattr(registry().get("cuda"), "module", lambda: cards)
    assert locate(torch.device("cuda")) == (registry().get("cuda"), current)
    assert locate(torch.device("cuda:0"))[1] == 0
    assert resolve(torch.device("cuda")).name == f"cuda:{current}"
    assert resolve("cuda").name == "cuda:1", "a name is a wish: the best card"
    cards.is_initialized = lambda: False  # torch would say 0, and nobody has asked for that one either
    assert locate(torch.device("cuda"))[1] == 0
    assert resolve(torch.device("cuda")).name == "cuda:1"


def test_a_missing_device_falls_back_to_the_cpu_and_says_why(machine: Callable[..., None]) -> None:
    two_cards(machine)
    with pytest.warns(DeviceFallbackWarning, match="no Intel GPU") as caught:
        found = anytorch.resolve("xpu")
    assert (found.device, found.fell_back) == (torch.device("cpu"), True), "not another GPU"
    assert str(caught[0].message) == found.warning
    with pytest.warns(DeviceFallbackWarning):
        assert anytorch.resolve("xpu", fallback="best").name == "cuda:1"


def test_the_warning_carries_the_diagnosis(machine: Callable[..., None]) -> None:
    card = Gpu("nvidia", "NVIDIA GeForce RTX 4090", "0000:01:00.0", driver="nvidia", capability=(8, 9))
    machine(hardware(card, wheel="2.13.0+cpu"), BackendReport("cuda", code="not-built", error="built without CUDA"))
    with pytest.warns(DeviceFallbackWarning) as caught:
        found = anytorch.resolve("cuda")
    assert found.reasons, "the doctor explains it"
    message = caught[0].message
    assert isinstance(message, DeviceFallbackWarning)
    assert message.reasons == tuple(reason.code for reason in found.reasons)
    assert "CPU" in found.warning


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_strict_raises_with_the_reasons(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    machine(hardware())
    if how == "environment":
        monkeypatch.setenv("ANYTORCH_STRICT", "1")
    with pytest.raises(DeviceUnavailable, match="'cuda' cannot be used"):
        anytorch.resolve("cuda", strict=True if how == "argument" else None)


def test_auto_never_warns(machine: Callable[..., None]) -> None:
    machine(hardware())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert anytorch.resolve("auto").name == "cpu"


def test_mistakes_always_raise(machine: Callable[..., None]) -> None:
    two_cards(machine)
    with pytest.raises(UnknownDevice):
        anytorch.resolve("cdua")
    with pytest.raises(DeviceIndexError, match="cuda:0"):
        anytorch.resolve("cuda:7")
    with pytest.raises(DeviceIndexError):
        anytorch.resolve("cpu:3")


def test_without_torch_the_error_holds_the_command(machine: Callable[..., None]) -> None:
    machine(hardware(wheel=None))
    with pytest.raises(TorchMissing, match="pip install") as caught:
        anytorch.resolve("auto")
    assert "/usr/bin/python3" in caught.value.message


def test_the_settings_file_names_a_card_by_its_uuid(machine: Callable[..., None]) -> None:
    two_cards(machine)
    settings.write_settings_file({"settings": {"backend": "cuda:0", "device_uuid": "GPU-11"}})
    assert anytorch.resolve().name == "cuda:1", "the index has changed since; the card has not"


def test_a_setting_that_cannot_be_met_says_where_it_came_from(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(hardware())
    monkeypatch.setenv("KRONOS_DEVICE", "mps")
    with pytest.warns(DeviceFallbackWarning, match="from KRONOS_DEVICE"):
        anytorch.resolve()


def test_prefer_npu(machine: Callable[..., None]) -> None:
    npu = BackendReport("npu", (DeviceReport(0, "Ascend 910B", caps=CAPS),))
    cuda = BackendReport("cuda", (DeviceReport(0, "NVIDIA H200", caps=CAPS),))
    machine(hardware(wheel="2.13.0+cu130"), npu, cuda)
    assert choose.resolve("auto").name == "cuda:0"
    assert choose.resolve("auto", prefer_npu=True).name == "npu:0"


def test_this_machine_needs_no_child_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_child(*_: object, **__: object) -> None:
        raise AssertionError("a child process was started")

    monkeypatch.setattr("anytorch.devices.try_out.try_out", no_child)
    monkeypatch.setattr("anytorch.devices.try_out.run_children", no_child)
    assert anytorch.resolve("cpu").device == torch.device("cpu")


def test_the_facts_of_this_process_reach_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the user's own process knows that it woke CUDA and changed the mask afterwards."""
    from anytorch.devices.gather import gather

    monkeypatch.setattr(
        "torch.cuda.is_initialized", lambda: True
    )  # torch/cuda/__init__.py: `return _initialized and …`
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = gather("needed")
    assert found.torch is not None
    assert found.torch.facts["cuda_initialized_before"] is True
    assert found.torch.facts["mask_now"] == "1"
    assert found.torch.facts["mask_at_import"] != "1"
    assert found.torch.facts["start_method"] in ("fork", "spawn", "forkserver")
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert gather("needed").settings["dtype"] == "bfloat16"
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_the_child_learns_of_level_zero_reaches_the_doctor() -> None:
    """The parent never loads Intel's driver; the child's answer must still become a fact about the hardware."""
    from anytorch.devices.gather import with_child_facts

    silent = TorchReport("2.13.0", backends={"xpu": BackendReport("xpu", code="no-device")})
    told = BackendReport("xpu", code="no-device", facts={"level_zero_code": 0x78000001, "level_zero_devices": None})
    machine = hardware()
    assert with_child_facts(machine, None) is machine
    assert with_child_facts(machine, silent) is machine
    assert (
        with_child_facts(machine, TorchReport("2.13.0", backends={"xpu": told})).graphics.level_zero_code == 0x78000001
    )
