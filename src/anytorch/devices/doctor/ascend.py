"""Huawei Ascend NPUs: torch_npu, CANN, and the wheel they need."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from anytorch.devices.doctor.common import installed, listed, named, report_of, true_cause
from anytorch.devices.doctor.registry import Finding, diagnosis
from anytorch.devices.types import Facts, Level
from anytorch.devices.wheels import advise_ascend, cards_of, parse_version


def set_env(facts: Facts) -> str:
    """The line that loads CANN, from where this machine has it: set_env.sh lies beside the folder `latest`."""
    toolkit = facts.hardware.ascend.toolkit_path or "/usr/local/Ascend/ascend-toolkit/latest"
    return f"source {quote(toolkit.rstrip('/').removesuffix('/latest') + '/set_env.sh')}"


@diagnosis(
    "autoload-failed",
    Level.ERROR,
    "`import torch` fails because of a device plug-in",
    number=24,
    needs="child",
    symptom="`RuntimeError: Failed to load the backend extension: torch_npu. You can disable extension auto-loading "
    "with TORCH_DEVICE_BACKEND_AUTOLOAD=0.`",
    evidence="`import torch` failed in a child process and worked with `TORCH_DEVICE_BACKEND_AUTOLOAD=0`; then the "
    "plug-in's own import error is the true cause (`libhccl.so: cannot open shared object file` means that CANN is "
    "not loaded).",
    fix="For torch_npu: `source /usr/local/Ascend/ascend-toolkit/set_env.sh`. To go without the plug-in: "
    "`export TORCH_DEVICE_BACKEND_AUTOLOAD=0`.",
    background=(
        "https://github.com/vllm-project/vllm-ascend/issues/152",
        "https://docs.pytorch.org/tutorials/unstable/python_extension_autoload.html",
    ),
)
def autoload_failed(facts: Facts) -> Iterator[Finding]:
    if facts.torch is None or not facts.torch.autoload_error:
        return
    error = facts.torch.autoload_error
    points = [p for p in facts.hardware.packages.entry_points if p.group == "torch.backends"]
    blamed = [p for p in points if p.value.split(":")[0] in error or p.name in error] or points
    names = listed(p.distribution for p in blamed) or "a torch.backends plug-in"
    cann = any(word in error for word in ("libhccl", "libascend", "libascendcl", "CANN", "libatb"))
    yield Finding(
        f"`import torch` fails because {names} cannot load: {true_cause(error)}",
        set_env(facts) if cann else "export TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        error[:1000],
        tuple("npu" if "npu" in p.value else p.name for p in blamed),
    )


@diagnosis(
    "cann-not-loaded",
    Level.WARNING,
    "The CANN toolkit is not in this shell's environment",
    symptom="`ImportError: libhccl.so: cannot open shared object file: No such file or directory`.",
    evidence="An Ascend NPU and torch_npu, and neither `ASCEND_HOME_PATH` nor `ASCEND_TOOLKIT_HOME`, which "
    "set_env.sh exports.",
    fix="`source /usr/local/Ascend/ascend-toolkit/set_env.sh`, in every shell or in `~/.bashrc`.",
    background=("https://github.com/vllm-project/vllm-ascend/issues/262",),
)
def cann_not_loaded(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    cards, version = cards_of(hardware, "huawei"), installed(hardware, "torch-npu")
    if not cards or not version or "ASCEND_HOME_PATH" in hardware.env or "ASCEND_TOOLKIT_HOME" in hardware.env:
        return
    report = report_of(facts, "npu")
    if report is not None and report.devices:
        return  # found some other way, such as ldconfig
    yield Finding(
        f"{named(cards[0])} and torch_npu {version} are here, but CANN's set_env.sh has not been sourced",
        set_env(facts),
        "ASCEND_HOME_PATH and ASCEND_TOOLKIT_HOME are not set",
    )


@diagnosis(
    "npu-wheel-conflict",
    Level.ERROR,
    "torch_npu and torch do not fit together",
    number=25,
    symptom="`Two accelerators cannot be used at the same time in PyTorch: npu and cuda`, or undefined symbols when "
    "torch_npu is imported.",
    evidence="torch_npu is installed beside a CUDA, ROCm or XPU wheel, or its minor version is not torch's.",
    fix="Install the CPU wheel of the same version: `pip install torch==X+cpu --index-url "
    "https://download.pytorch.org/whl/cpu && pip install 'torch-npu==X.*'`.",
    background=("https://github.com/Ascend/pytorch", "https://github.com/Ascend/pytorch/issues/99"),
)
def npu_wheel_conflict(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    wheel, version = hardware.torch, installed(hardware, "torch-npu")
    if wheel is None or not version:
        return
    if wheel.kind != "cpu":
        text = f"torch_npu {version} cannot work beside torch {wheel.version}, which is built for {wheel.kind}"
    elif parse_version(version)[:2] != parse_version(wheel.version)[:2]:
        text = f"torch_npu {version} is not made for torch {wheel.version}"
    else:
        return
    yield Finding(text, advise_ascend(hardware).command, f"torch {wheel.version}, torch-npu {version}", ("npu",))
