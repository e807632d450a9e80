"""The NVIDIA H200 as it described itself: recorded facts through the pure parts of the layer."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from anytorch.devices.cuda import CudaBackend, matrix_tflops, memory_gb_per_s
from anytorch.devices.doctor import diagnose
from anytorch.devices.gather import candidates
from anytorch.devices.ranking import rank
from anytorch.devices.registry import registry
from anytorch.devices.try_out import report_from_json
from anytorch.devices.types import Facts, Level, State
from anytorch.probe.facts import Cpu, Gpu, Graphics, Hardware, Icd, Machine, Memory, Node, Nvidia, Packages, TorchWheel

RECORDED = json.loads((Path(__file__).parents[1] / "fixtures/h200.json").read_text())


def value(kind: type, data: dict[str, Any]) -> Any:
    known = {field.name for field in fields(kind)}  # the command line adds derived values; they are left out
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in known})


@pytest.fixture
def facts() -> Facts:
    graphics = dict(RECORDED["graphics"])
    for list_name in ("vulkan_icds", "opencl_icds"):
        graphics[list_name] = [Icd(**icd) for icd in graphics[list_name]]
    hardware = Hardware(
        machine=value(Machine, RECORDED["machine"]),
        cpu=value(Cpu, {**RECORDED["cpu"], "features": frozenset(RECORDED["cpu"]["features"])}),
        memory=value(Memory, RECORDED["memory"]),
        gpus=tuple(value(Gpu, gpu) for gpu in RECORDED["gpus"]),
        nvidia=value(Nvidia, RECORDED["nvidia"]),
        graphics=value(Graphics, graphics),
        torch=value(TorchWheel, RECORDED["torch"]),
        packages=Packages(RECORDED["packages"]),
        # Not part of that JSON; torch ran on the card there as root, so the nodes were open.
        nodes=(
            Node("/dev/nvidia0", True, True),
            Node("/dev/nvidiactl", True, True),
            Node("/dev/nvidia-uvm", True, True),
        ),
    )
    return Facts(hardware, report_from_json(RECORDED["probe"]))


def test_nothing_is_wrong_with_it(facts: Facts) -> None:
    assert [reason.code for reason in diagnose(facts) if reason.level is not Level.NOTE] == []


def test_it_is_the_best_device_and_one_card_not_two(facts: Facts) -> None:
    found = rank(candidates(facts, registry().backends.values(), diagnose(facts)))
    assert [(c.id, c.state) for c in found[:2]] == [("cuda:0", State.USABLE), ("cpu", State.USABLE)]
    best = found[0]
    assert best.pci == "0000:00:06.0", "PCI, NVML and torch name the same card"
    assert best.uuid == RECORDED["gpus"][0]["uuid"]
    assert best.caps is not None
    assert best.caps.autocast_dtype == "bfloat16"
    assert "fp8" in best.caps.quantizations


def test_its_limits_follow_from_what_the_driver_tells() -> None:
    properties = {
        name: int(RECORDED["properties"][name]) for name in ("memory_clock_rate", "memory_bus_width", "clock_rate")
    }
    properties["multiprocessors"] = int(RECORDED["properties"]["multi_processor_count"])
    assert memory_gb_per_s(properties) == pytest.approx(4814, abs=5)  # the data sheet says 4.8 TB/s
    assert matrix_tflops((9, 0), properties)["float32"] == pytest.approx(66.9, abs=0.1)  # 67 there


def test_files_alone_say_as_much_as_they_can(facts: Facts) -> None:
    (card,) = CudaBackend().seen(facts.hardware)
    assert (card.state, card.facts["capability"]) == (State.SEEN, (9, 0))
