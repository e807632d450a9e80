"""Apple GPUs: the right Python, the right macOS."""

from __future__ import annotations

from collections.abc import Iterator

from anytorch.devices.doctor.common import child_flag, first_line, report_of
from anytorch.devices.doctor.registry import Finding, diagnosis
from anytorch.devices.types import Facts, Level
from anytorch.devices.wheels import parse_version


@diagnosis(
    "rosetta",
    Level.ERROR,
    "Python runs under Rosetta, so MPS is not available",
    number=26,
    symptom="On an M-series Mac `torch.backends.mps.is_available()` is False, or pip finds no recent torch at all.",
    evidence="`sysctl.proc_translated` is 1: an x86_64 Python on arm64 hardware.",
    fix="Install an arm64 Python: `arch -arm64 /bin/zsh`, then Python from python.org, Homebrew under /opt/homebrew, "
    "or `CONDA_SUBDIR=osx-arm64 conda create -n torch python=3.12`.",
    background=("https://developer.apple.com/documentation/apple-silicon/about-the-rosetta-translation-environment",),
)
def rosetta(facts: Facts) -> Iterator[Finding]:
    machine = facts.hardware.machine
    if machine.system == "Darwin" and machine.rosetta:
        yield Finding(
            f"{machine.executable or 'this Python'} is an {machine.arch} build translated by Rosetta on an arm64 Mac",
            "CONDA_SUBDIR=osx-arm64 conda create -n torch python=3.12",
            f"sysctl.proc_translated is 1, platform.machine() is {machine.arch}",
            ("mps",),
        )


@diagnosis(
    "mps-unavailable",
    Level.ERROR,
    "MPS is built into torch and cannot be used",
    number=27,
    needs="child",
    symptom="`torch.backends.mps.is_available()` is False; or it is True and the first allocation fails, as on "
    "virtual machines: `MPS backend out of memory`. torch blames the macOS version even where that is not the reason.",
    evidence="`mps_built` and not `mps_available` in the child, or a failed 256-byte allocation there; the macOS "
    "version.",
    fix="macOS 14 or newer is needed: `softwareupdate --install --recommended`. In a virtual machine there is no "
    "remedy: use the CPU.",
    background=(
        "https://github.com/pytorch/pytorch/issues/177819",
        "https://github.com/actions/runner-images/issues/9918",
    ),
)
def mps_unavailable(facts: Facts) -> Iterator[Finding]:
    machine, report = facts.hardware.machine, report_of(facts, "mps")
    if machine.system != "Darwin" or machine.rosetta or not child_flag(facts, "mps_built"):
        return
    if child_flag(facts, "mps_available") is False:
        old = machine.macos is not None and parse_version(machine.macos) < (14,)
        if old:
            text = f"macOS {machine.macos} is too old for MPS: torch needs macOS 14 or newer"
            fix = "softwareupdate --install --recommended"
        else:
            text = (
                f"Metal offers no device on macOS {machine.macos or '(unknown)'}, as in a virtual machine or CI runner"
            )
            fix = "export ANYTORCH_BACKEND=cpu"
        yield Finding(text, fix, "torch.backends.mps.is_built() True, is_available() False", ("mps",))
    elif report is not None and report.code == "failed":
        yield Finding(
            f"MPS says it is available, but the first use failed: {first_line(report.error)}",
            "export ANYTORCH_BACKEND=cpu",
            report.error[:1000],
            ("mps",),
        )


@diagnosis(
    "mps-fallback-unset",
    Level.WARNING,
    "Operators that MPS lacks will raise",
    number=28,
    needs="child",
    symptom="`NotImplementedError: The operator 'aten::…' is not currently implemented for the MPS device.`",
    evidence="MPS is available and `PYTORCH_ENABLE_MPS_FALLBACK` is not 1. It only counts when set before torch is "
    "loaded.",
    fix="`export PYTORCH_ENABLE_MPS_FALLBACK=1` before Python starts.",
    background=(
        "https://github.com/pytorch/pytorch/issues/77764",
        "https://github.com/invoke-ai/InvokeAI/pull/2508",
    ),
)
def mps_fallback_unset(facts: Facts) -> Iterator[Finding]:
    value = facts.hardware.env.get("PYTORCH_ENABLE_MPS_FALLBACK")
    if child_flag(facts, "mps_available") and value != "1":
        yield Finding(
            f"PYTORCH_ENABLE_MPS_FALLBACK is {value or 'not set'}, so an operator MPS lacks raises instead of using "
            "the CPU",
            "export PYTORCH_ENABLE_MPS_FALLBACK=1",
            f"PYTORCH_ENABLE_MPS_FALLBACK is {value or 'not set'}",
        )
