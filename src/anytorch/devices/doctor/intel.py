"""Intel GPUs: Level Zero, and the retired extension."""

from __future__ import annotations

from collections.abc import Iterator

from anytorch.devices.doctor.common import installed, named
from anytorch.devices.doctor.registry import Finding, diagnosis
from anytorch.devices.types import Facts, Level
from anytorch.devices.wheels import cards_of, is_xpu


@diagnosis(
    "level-zero-missing",
    Level.ERROR,
    "The Level Zero driver of the Intel GPU is missing",
    number=22,
    symptom="`torch.xpu.is_available()` is False, or `XPU device count is zero!`, with the XPU wheel and an Arc card.",
    evidence="A supported Intel GPU, an XPU wheel, and no `libze_loader.so.1` or no `libze_intel_gpu.so.1`.",
    fix="`sudo apt install libze1 libze-intel-gpu1` (Ubuntu 24.04: from Intel's graphics repository).",
    background=("https://docs.pytorch.org/docs/stable/notes/get_start_xpu.html", "https://dgpu-docs.intel.com/"),
)
def level_zero_missing(facts: Facts) -> Iterator[Finding]:
    hardware, graphics = facts.hardware, facts.hardware.graphics
    cards = [gpu for gpu in cards_of(hardware, "intel") if is_xpu(gpu)]
    if hardware.torch is None or hardware.torch.kind != "xpu" or not cards or hardware.machine.system != "Linux":
        return
    missing = []
    if graphics.level_zero_loader is None:
        missing.append(("libze_loader.so.1", "libze1"))
    if graphics.level_zero_driver is None:
        missing.append(("libze_intel_gpu.so", "libze-intel-gpu1"))
    if missing:
        yield Finding(
            f"{named(cards[0])} needs {' and '.join(library for library, _ in missing)}, which cannot be found",
            f"sudo apt install {' '.join(package for _, package in missing)}",
            f"loader: {graphics.level_zero_loader or 'none'}; driver: {graphics.level_zero_driver or 'none'}",
            ("xpu",),
        )


@diagnosis(
    "level-zero-failed",
    Level.ERROR,
    "Level Zero does not start",
    symptom="`torch.xpu.is_available()` is False although the driver is installed.",
    evidence="`zeInit` or `zesInit` returned something other than 0 with loader and driver in place.",
    fix="Check the permissions of `/dev/dri/renderD*` (see no-permission), then update the driver: "
    "`sudo apt install --only-upgrade libze1 libze-intel-gpu1`.",
    background=("https://github.com/pytorch/pytorch/issues/148477",),
)
def level_zero_failed(facts: Facts) -> Iterator[Finding]:
    hardware, graphics = facts.hardware, facts.hardware.graphics
    cards = [gpu for gpu in cards_of(hardware, "intel") if is_xpu(gpu)]
    code = graphics.level_zero_code
    if hardware.torch is None or hardware.torch.kind != "xpu" or not cards or code in (None, 0):
        return
    if graphics.level_zero_loader is None or graphics.level_zero_driver is None:
        return
    yield Finding(
        f"Level Zero returned 0x{code:x} for {named(cards[0])} although its driver is installed",
        "sudo apt install --only-upgrade libze1 libze-intel-gpu1",
        f"zeInit returned 0x{code:x}; driver {graphics.level_zero_driver}",
        ("xpu",),
    )


@diagnosis(
    "ipex-installed",
    Level.ERROR,
    "The retired Intel extension for PyTorch is installed",
    number=23,
    symptom="Import errors or crashes after a torch update; security scanners complain about "
    "intel_extension_for_pytorch.",
    evidence="The distribution intel-extension-for-pytorch is installed. Its repository is archived since 2026-03-30 "
    "with `known security issues`; its last release is 2.8.0.",
    fix="`pip uninstall -y intel-extension-for-pytorch`, and use `torch.xpu`, which torch has built in.",
    background=("https://github.com/intel/intel-extension-for-pytorch",),
)
def ipex_installed(facts: Facts) -> Iterator[Finding]:
    version = installed(facts.hardware, "intel-extension-for-pytorch")
    if version:
        yield Finding(
            f"intel-extension-for-pytorch {version} is installed: it is archived with known security issues, and "
            "torch.xpu replaces it",
            "pip uninstall -y intel-extension-for-pytorch",
            f"intel-extension-for-pytorch {version}",
        )
