"""Cards of AMD, Intel, Huawei and Apple: device nodes, drivers, and the software beside them."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from anytorch.devices.doctor.common import (
    Finding,
    child_fact,
    diagnosis,
    first_line,
    in_container,
    installed,
    listed,
    named,
    report_of,
    true_cause,
)
from anytorch.devices.types import Facts, Level
from anytorch.devices.wheels import advise_ascend, cards_of, drivable, parse_version
from anytorch.probe.facts import Node

# --- AMD: device nodes (those of Intel cards work alike), the compute driver, integrated beside discrete ---------------


@diagnosis(
    Level.ERROR,
    "This user may not open the GPU's device node",
    symptom="`No HIP GPUs are available` or `torch.xpu.is_available()` False for you, and all is well as root; "
    "`rocminfo` says `Unable to open /dev/kfd read-write: Permission denied`.",
    evidence="`/dev/kfd` or every `/dev/dri/renderD*` exists and this user has no read-write access; the node's "
    "owning group.",
    fix="`sudo usermod -aG render $USER`, with the group that owns the node, then log in again; in a container "
    "`docker run --group-add <gid>` with the *number* of that group on this host.",
    background="https://github.com/ROCm/rocminfo/issues/34 https://github.com/ROCm/vllm/pull/893",
)
def no_permission(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    amd = bool(cards_of(hardware, "amd"))
    intel = bool(drivable(hardware, "xpu"))
    kfd = hardware.node("/dev/kfd")
    if amd and kfd is not None and not _open(kfd):
        yield _permission(kfd, in_container(hardware), ("rocm",))
    renders = [node for node in hardware.nodes if node.path.startswith("/dev/dri/renderD")]
    if (amd or intel) and renders and not any(_open(node) for node in renders):
        backends = (("rocm",) if amd else ()) + (("xpu",) if intel else ())
        yield _permission(renders[0], in_container(hardware), backends)


def _open(node: Node) -> bool:
    return node.readable and node.writable


def _permission(node: Node, container: bool, backends: tuple[str, ...]) -> Finding:
    group = node.group or (str(node.gid) if node.gid is not None else "unknown")
    if container:
        fix = f"docker run --group-add {node.gid if node.gid is not None else quote(group)} …"
    else:
        fix = f"sudo usermod -aG {quote(group)} $USER  # then log out and in again"
    rights = f"readable: {'yes' if node.readable else 'no'}, writable: {'yes' if node.writable else 'no'}"
    text = f"this user may not read and write {node.path}, which belongs to group {group} (gid {node.gid})"
    return Finding(text, fix, f"{node.path} {rights}", backends)


@diagnosis(
    Level.ERROR,
    "The AMD compute driver is not there",
    symptom="`No HIP GPUs are available` with a ROCm wheel and an AMD card on the desk.",
    evidence="An AMD card, a ROCm wheel and no `/dev/kfd`, outside a container; which kernel driver holds the card.",
    fix="`sudo modprobe amdgpu`; on kernels without KFD install AMD's `amdgpu-dkms`.",
    background="https://rocm.docs.amd.com/projects/install-on-linux/en/latest/",
)
def kfd_missing(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    wheel, cards = hardware.torch, cards_of(hardware, "amd")
    if wheel is None or wheel.kind != "rocm" or not cards or hardware.node("/dev/kfd") is not None:
        return
    if in_container(hardware) or hardware.machine.wsl or hardware.machine.system != "Linux":
        return
    yield Finding(
        f"{named(cards[0])} is present, but /dev/kfd is not: the kernel driver is {cards[0].driver or 'none'}",
        "sudo modprobe amdgpu",
        f"/dev/kfd does not exist; the card's kernel driver is {cards[0].driver or 'none'}",
        ("rocm",),
    )


@diagnosis(
    Level.WARNING,
    "An AMD processor's graphics unit is beside an AMD card",
    symptom="The program crashes at the first kernel, or the slow graphics unit is chosen because it reports the "
    "system's RAM as its own.",
    evidence="An integrated and a discrete AMD GPU, and neither `HIP_VISIBLE_DEVICES` nor `ROCR_VISIBLE_DEVICES`.",
    fix="`export HIP_VISIBLE_DEVICES=<index of the card>`. Never rank the two by free memory.",
    background="https://github.com/oobabooga/textgen/issues/7319 https://github.com/unslothai/unsloth/pull/7670",
)
def amd_two_gpus(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    cards = cards_of(hardware, "amd")
    small = [gpu for gpu in cards if gpu.integrated is True]
    big = [gpu for gpu in cards if gpu.integrated is False]
    masked = [name for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES") if name in hardware.env]
    if not small or not big or masked:
        return
    order = sorted(cards, key=lambda gpu: (gpu.index is None, gpu.index or 0, gpu.pci or ""))
    indices = listed(str(gpu.index if gpu.index is not None else order.index(gpu)) for gpu in big).replace(" ", "")
    yield Finding(
        f"{named(small[0])} (integrated) is beside {named(big[0])}, and ROCm may choose either",
        f"export HIP_VISIBLE_DEVICES={indices}",
        "neither HIP_VISIBLE_DEVICES nor ROCR_VISIBLE_DEVICES is set",
    )


# --- Intel: Level Zero, and the retired extension ---------------------------------------------------------------------


@diagnosis(
    Level.ERROR,
    "The Level Zero driver of the Intel GPU is missing",
    symptom="`torch.xpu.is_available()` is False, or `XPU device count is zero!`, with the XPU wheel and an Arc card.",
    evidence="A supported Intel GPU, an XPU wheel, and no `libze_loader.so.1` or no `libze_intel_gpu.so.1`.",
    fix="`sudo apt install libze1 libze-intel-gpu1` (Ubuntu 24.04: from Intel's graphics repository).",
    background="https://docs.pytorch.org/docs/stable/notes/get_start_xpu.html https://dgpu-docs.intel.com/",
)
def level_zero_missing(facts: Facts) -> Iterator[Finding]:
    hardware, graphics = facts.hardware, facts.hardware.graphics
    cards = drivable(hardware, "xpu")
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
    Level.ERROR,
    "Level Zero does not start",
    symptom="`torch.xpu.is_available()` is False although the driver is installed.",
    evidence="`zeInit` or `zesInit` returned something other than 0 with loader and driver in place.",
    fix="Check the permissions of `/dev/dri/renderD*` (see no-permission), then update the driver: "
    "`sudo apt install --only-upgrade libze1 libze-intel-gpu1`.",
    background="https://github.com/pytorch/pytorch/issues/148477",
)
def level_zero_failed(facts: Facts) -> Iterator[Finding]:
    hardware, graphics = facts.hardware, facts.hardware.graphics
    cards = drivable(hardware, "xpu")
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
    Level.ERROR,
    "The retired Intel extension for PyTorch is installed",
    symptom="Import errors or crashes after a torch update; security scanners complain about "
    "intel_extension_for_pytorch.",
    evidence="The distribution intel-extension-for-pytorch is installed. Its repository is archived since 2026-03-30 "
    "with `known security issues`; its last release is 2.8.0.",
    fix="`pip uninstall -y intel-extension-for-pytorch`, and use `torch.xpu`, which torch has built in.",
    background="https://github.com/intel/intel-extension-for-pytorch",
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


# --- Huawei: torch_npu, CANN, and the wheel they need -----------------------------------------------------------------


def set_env(facts: Facts) -> str:
    """The line that loads CANN, from where this machine has it: set_env.sh lies beside the folder `latest`."""
    toolkit = facts.hardware.ascend.toolkit_path or "/usr/local/Ascend/ascend-toolkit/latest"
    return f"source {quote(toolkit.rstrip('/').removesuffix('/latest') + '/set_env.sh')}"


@diagnosis(
    Level.ERROR,
    "`import torch` fails because of a device plug-in",
    needs="child",
    symptom="`RuntimeError: Failed to load the backend extension: torch_npu. You can disable extension auto-loading "
    "with TORCH_DEVICE_BACKEND_AUTOLOAD=0.`",
    evidence="`import torch` failed in a child process and worked with `TORCH_DEVICE_BACKEND_AUTOLOAD=0`; then the "
    "plug-in's own import error is the true cause (`libhccl.so: cannot open shared object file` means that CANN is "
    "not loaded).",
    fix="For torch_npu: `source /usr/local/Ascend/ascend-toolkit/set_env.sh`. To go without the plug-in: "
    "`export TORCH_DEVICE_BACKEND_AUTOLOAD=0`.",
    background="https://github.com/vllm-project/vllm-ascend/issues/152 "
    "https://docs.pytorch.org/tutorials/unstable/python_extension_autoload.html",
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
    Level.WARNING,
    "The CANN toolkit is not in this shell's environment",
    symptom="`ImportError: libhccl.so: cannot open shared object file: No such file or directory`.",
    evidence="An Ascend NPU and torch_npu, and neither `ASCEND_HOME_PATH` nor `ASCEND_TOOLKIT_HOME`, which "
    "set_env.sh exports.",
    fix="`source /usr/local/Ascend/ascend-toolkit/set_env.sh`, in every shell or in `~/.bashrc`.",
    background="https://github.com/vllm-project/vllm-ascend/issues/262",
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
    Level.ERROR,
    "torch_npu and torch do not fit together",
    symptom="`Two accelerators cannot be used at the same time in PyTorch: npu and cuda`, or undefined symbols when "
    "torch_npu is imported.",
    evidence="torch_npu is installed beside a CUDA, ROCm or XPU wheel, or its minor version is not torch's.",
    fix="Install the CPU wheel of the same version: `pip install torch==X+cpu --index-url "
    "https://download.pytorch.org/whl/cpu && pip install 'torch-npu==X.*'`.",
    background="https://github.com/Ascend/pytorch https://github.com/Ascend/pytorch/issues/99",
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


# --- Apple: the right Python, the right macOS -------------------------------------------------------------------------


@diagnosis(
    Level.ERROR,
    "Python runs under Rosetta, so MPS is not available",
    symptom="On an M-series Mac `torch.backends.mps.is_available()` is False, or pip finds no recent torch at all.",
    evidence="`sysctl.proc_translated` is 1: an x86_64 Python on arm64 hardware.",
    fix="Install an arm64 Python: `arch -arm64 /bin/zsh`, then Python from python.org, Homebrew under /opt/homebrew, "
    "or `CONDA_SUBDIR=osx-arm64 conda create -n torch python=3.12`.",
    background="https://developer.apple.com/documentation/apple-silicon/about-the-rosetta-translation-environment",
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
    Level.ERROR,
    "MPS is built into torch and cannot be used",
    needs="child",
    symptom="`torch.backends.mps.is_available()` is False; or it is True and the first allocation fails, as on "
    "virtual machines: `MPS backend out of memory`. torch blames the macOS version even where that is not the reason.",
    evidence="`mps_built` and not `mps_available` in the child, or a failed 256-byte allocation there; the macOS "
    "version.",
    fix="macOS 14 or newer is needed: `softwareupdate --install --recommended`. In a virtual machine there is no "
    "remedy: use the CPU.",
    background="https://github.com/pytorch/pytorch/issues/177819 https://github.com/actions/runner-images/issues/9918",
)
def mps_unavailable(facts: Facts) -> Iterator[Finding]:
    machine, report = facts.hardware.machine, report_of(facts, "mps")
    if machine.system != "Darwin" or machine.rosetta or not child_fact(facts, "mps_built", bool):
        return
    if child_fact(facts, "mps_available", bool) is False:
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
    Level.WARNING,
    "Operators that MPS lacks will raise",
    needs="child",
    symptom="`NotImplementedError: The operator 'aten::…' is not currently implemented for the MPS device.`",
    evidence="MPS is available and `PYTORCH_ENABLE_MPS_FALLBACK` is not 1. It only counts when set before torch is "
    "loaded.",
    fix="`export PYTORCH_ENABLE_MPS_FALLBACK=1` before Python starts.",
    background="https://github.com/pytorch/pytorch/issues/77764 https://github.com/invoke-ai/InvokeAI/pull/2508",
)
def mps_fallback_unset(facts: Facts) -> Iterator[Finding]:
    value = facts.hardware.env.get("PYTORCH_ENABLE_MPS_FALLBACK")
    if child_fact(facts, "mps_available", bool) and value != "1":
        yield Finding(
            f"PYTORCH_ENABLE_MPS_FALLBACK is {value or 'not set'}, so an operator MPS lacks raises instead of using "
            "the CPU",
            "export PYTORCH_ENABLE_MPS_FALLBACK=1",
            f"PYTORCH_ENABLE_MPS_FALLBACK is {value or 'not set'}",
        )
