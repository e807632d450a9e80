"""How busy the machine is: the kernel's files, and NVML through our mock library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anytorch.probe.activity import Activity, CardActivity
from anytorch.probe.tree import Tree


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_share_of_busy_cores_between_two_looks(tmp_path: Path) -> None:
    write(tmp_path, "proc/stat", "cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 1 2 3\n")
    activity = Activity(Tree(tmp_path), {})
    write(tmp_path, "proc/stat", "cpu  150 0 100 850 0 0 0 0 0 0\n")
    assert activity.cpu_share() == pytest.approx(0.5)
    assert activity.cpu_share() is None  # no time has passed
    write(tmp_path, "proc/stat", "cpu  250 0 100 850 0 0 0 0 0 0\n")
    assert activity.cpu_share() == 1.0


@pytest.mark.parametrize("text", ["", "cpu", "cpu a b c d e f", "intr 1 2 3 4 5 6 7"])
def test_what_nobody_tells_is_not_zero(tmp_path: Path, text: str) -> None:
    write(tmp_path, "proc/stat", text)
    assert Activity(Tree(tmp_path), {}).cpu_share() is None
    assert Activity(Tree(tmp_path / "empty"), {}).cpu_share() is None


def test_amd_cards_say_it_in_files(tmp_path: Path) -> None:
    card = "sys/bus/pci/devices/0000:03:00.0"
    write(tmp_path, f"{card}/gpu_busy_percent", "37\n")
    write(tmp_path, f"{card}/mem_info_vram_used", "1000\n")
    write(tmp_path, f"{card}/mem_info_vram_total", "4000\n")
    write(tmp_path, "sys/bus/pci/devices/0000:04:00.0/gpu_busy_percent", "900\n")  # makes no sense: left out
    write(tmp_path, "sys/bus/pci/devices/0000:05:00.0/vendor", "0x8086\n")
    assert Activity(Tree(tmp_path), {}).cards() == {"0000:03:00.0": CardActivity(0.37, 1000, 4000, "amdgpu driver")}


def test_nvml_says_memory_and_what_it_cannot_say_is_left_out(
    nvml_stub: Any, run_python: Callable[..., Any], tmp_path: Path
) -> None:
    """The mock library has no utilisation to tell, like a card in MIG mode."""
    code = (
        "from anytorch.probe.activity import Activity\n"
        "cards = Activity().cards()\n"
        "assert len(cards) == 1, cards\n"
        "(name, card), = cards.items()\n"
        "assert name.startswith('GPU-') and card.total > card.used >= 0 and card.source == 'NVML', (name, card)\n"
        "assert card.utilisation is None\n"
        "assert Activity().cards() == cards\n"
    )
    run_python(code, env={**nvml_stub.env([nvml_stub.h200]), "ANYTORCH_NVML_LIBRARY": str(nvml_stub.path)})


def test_a_library_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    environment = {"ANYTORCH_NVML_LIBRARY": str(tmp_path / "libnvidia-ml.so.1")}
    assert Activity(Tree(tmp_path), environment).cards() == {}
