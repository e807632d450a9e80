"""This Python: torch itself, conflicting packages, failing plug-ins and child processes, and its wheel against the cards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from shlex import quote

from anytorch.devices.doctor.common import (
    TORCH_BACKENDS,
    Finding,
    arch_list,
    diagnosis,
    first_line,
    in_container,
    installed,
    listed,
    named,
    reports,
    true_cause,
)
from anytorch.devices.types import Facts, Level
from anytorch.devices.wheels import (
    INDEX_ROOT,
    advise,
    base_version,
    cards_of,
    covers,
    drivable,
    driver_of,
    driver_suffices,
    gfx_name,
    least_driver,
    local_tag,
    parse_version,
    runs_on,
)
from anytorch.probe.facts import Gpu


@diagnosis(
    Level.ERROR,
    "torch is not installed",
    symptom="`ModuleNotFoundError: No module named 'torch'`.",
    evidence="No `torch/version.py` on this Python's path.",
    fix="The doctor prints the command for this machine, such as "
    "`pip install torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu`.",
    background="https://pytorch.org/get-started/locally/",
)
def torch_missing(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    if hardware.torch is not None or (facts.torch is not None and facts.torch.version is not None):
        return
    advice = advise(hardware)
    yield Finding(
        f"torch is not installed in {hardware.machine.executable or 'this Python'} ({hardware.machine.python})",
        advice.command or advice.why,
        advice.why,
        TORCH_BACKENDS,
    )


@diagnosis(
    Level.ERROR,
    "`import torch` fails",
    needs="child",
    symptom="`ImportError` or `OSError` at `import torch`, even with the device plug-ins switched off.",
    evidence="What `import torch` raised in a child process with `TORCH_DEVICE_BACKEND_AUTOLOAD=0`.",
    fix="Depends on the message: a missing library is installed, a mixed or damaged installation is replaced whole "
    "(`pip uninstall -y torch && pip install torch==…`); on Windows `winget install Microsoft.VCRedist.2015+.x64`.",
    background="https://pytorch.org/get-started/locally/",
)
def torch_import_failed(facts: Facts) -> Iterator[Finding]:
    if facts.torch is None or not facts.torch.import_error or facts.hardware.torch is None:
        return
    error = facts.torch.import_error
    if facts.hardware.machine.system == "Windows" and ("DLL load failed" in error or "WinError 126" in error):
        fix = "winget install Microsoft.VCRedist.2015+.x64"
    elif "libgomp.so" in error:
        fix = "sudo apt install libgomp1"
    elif "GLIBC_" in error or "GLIBCXX_" in error:
        fix = "use a newer Linux distribution: torch needs glibc 2.28 or newer"
    else:
        fix = reinstall_torch(facts)
    yield Finding(
        f"torch {facts.hardware.torch.version} cannot be imported: {true_cause(error)}",
        fix,
        error[:1000],
        TORCH_BACKENDS,
    )


def reinstall_torch(facts: Facts) -> str:
    command = advise(facts.hardware).command
    return f"pip uninstall -y torch && {command}" if command else "pip uninstall -y torch"


@diagnosis(
    Level.WARNING,
    "pynvml and nvidia-ml-py are both installed",
    symptom="`FutureWarning: The pynvml package is deprecated. Please install nvidia-ml-py instead.`, or attributes "
    "missing from `pynvml` after one of the two was updated.",
    evidence="Both distributions are installed; they write the same module, `pynvml.py`.",
    fix="`pip uninstall -y pynvml nvidia-ml-py && pip install nvidia-ml-py`.",
    background="https://github.com/lincc-frameworks/hyrax/issues/778 https://github.com/ai-dynamo/dynamo/issues/391",
)
def pynvml_twice(facts: Facts) -> Iterator[Finding]:
    old, new = installed(facts.hardware, "pynvml"), installed(facts.hardware, "nvidia-ml-py")
    if old and new:
        yield Finding(
            f"pynvml {old} and nvidia-ml-py {new} both provide the module pynvml",
            "pip uninstall -y pynvml nvidia-ml-py && pip install nvidia-ml-py",
            f"pynvml {old}, nvidia-ml-py {new}",
        )


@diagnosis(
    Level.WARNING,
    "Two installations of torch are on sys.path",
    symptom="`torch.__version__` is not the version pip lists, or undefined symbols at import.",
    evidence="A second `torch/version.py` later on sys.path: conda beside pip, or `~/.local` beside a virtual "
    "environment.",
    fix="`pip uninstall torch` in the environment that should not have it, or `export PYTHONNOUSERSITE=1`.",
    background="https://docs.python.org/3/using/cmdline.html#envvar-PYTHONNOUSERSITE",
)
def two_torches(facts: Facts) -> Iterator[Finding]:
    wheel = facts.hardware.torch
    if wheel is not None and wheel.others:
        user_site = any(".local" in path for path in wheel.others)
        yield Finding(
            f"torch {wheel.version} at {wheel.path} hides another torch at {', '.join(wheel.others)}",
            "export PYTHONNOUSERSITE=1"
            if user_site
            else f"rm -r {quote(wheel.others[0])}  # if you do not need that one",
            f"used: {wheel.path}; hidden: {', '.join(wheel.others)}",
        )


@diagnosis(
    Level.WARNING,
    "torchvision or torchaudio was built for another torch",
    symptom="`RuntimeError: operator torchvision::nms does not exist`, or undefined symbols at `import torchvision`.",
    evidence="The build tags (`+cu130`, `+cpu`) of torch and of torchvision or torchaudio differ, or torchvision's "
    "version is not the one made for this torch (0.28 for 2.13).",
    fix="`pip install 'torchvision==0.28.*' --index-url https://download.pytorch.org/whl/<tag>`.",
    background="https://github.com/pytorch/vision#installation",
)
def torchvision_mismatch(facts: Facts) -> Iterator[Finding]:
    wheel = facts.hardware.torch
    if wheel is None:
        return
    tag, version = local_tag(wheel.version), parse_version(wheel.version)
    index = f" --index-url {INDEX_ROOT}/{tag}" if tag else ""
    for name in ("torchvision", "torchaudio"):
        found = installed(facts.hardware, name)
        if not found:
            continue
        theirs = local_tag(found)
        # torchvision 0.(n+15) belongs to torch 2.n; torchaudio stopped following at 2.11.
        partner = f"0.{version[1] + 15}" if name == "torchvision" and len(version) > 1 and version[0] == 2 else None
        other = partner is not None and parse_version(found)[:2] != parse_version(partner)
        if (tag and theirs and tag != theirs) or other:
            wanted = f"{name}=={partner}.*" if other else f"{name}=={base_version(found)}+{tag}"
            yield Finding(
                f"{name} {found} was not built for torch {wheel.version}",
                f"pip install '{wanted}'{index}",
                f"torch {wheel.version}, {name} {found}",
            )


@diagnosis(
    Level.ERROR,
    "A back end's plug-in cannot be loaded",
    symptom="A device that a package promised is missing from `anytorch info`.",
    evidence="What loading the entry point of the group `anytorch.backends` raised.",
    fix="Update or reinstall the package that brings it, or leave it out: `export ANYTORCH_PLUGINS=<the ones you "
    "want>`.",
)
def plugin_broken(facts: Facts) -> Iterator[Finding]:
    errors = facts.settings.get("plugin_errors")
    if not isinstance(errors, Mapping):
        return
    owners = {p.name: p.distribution for p in facts.hardware.packages.entry_points if p.group == "anytorch.backends"}
    for name, error in errors.items():
        owner = owners.get(str(name), "")
        yield Finding(
            f"the back end {name!r}{f' of {owner}' if owner else ''} cannot be loaded: {first_line(str(error))}",
            f"pip install --upgrade --force-reinstall {quote(owner)}"
            if owner
            else f"pip uninstall the package that brings {name!r}",
            str(error)[:1000],
            (str(name),),
        )


@diagnosis(
    Level.ERROR,
    "Trying the back end killed the process",
    needs="child",
    symptom="Python dies without a message (`Segmentation fault`, `0xC0000005`) as soon as the device is used.",
    evidence="The child process that tried the back end died on a signal while it did.",
    fix="Update the driver and torch; until then `export ANYTORCH_BACKEND=cpu`.",
    background="https://github.com/pytorch/pytorch/issues/157775",
)
def backend_crashed(facts: Facts) -> Iterator[Finding]:
    for report in reports(facts):
        if report.code == "crashed":
            yield Finding(
                f"trying {report.name} killed the process: {first_line(report.error) or 'no message'}",
                "export ANYTORCH_BACKEND=cpu  # until driver and torch are updated",
                report.error[:1000],
                (report.name,),
            )


@diagnosis(
    Level.ERROR,
    "Trying the back end took too long",
    needs="child",
    symptom="The first use of the device hangs.",
    evidence="The child process had not finished with the back end when the time limit (`ANYTORCH_PROBE_TIMEOUT`) "
    "was over.",
    fix="`ANYTORCH_PROBE_TIMEOUT=600 anytorch doctor` gives it longer; a driver that hangs needs a reboot.",
)
def backend_timed_out(facts: Facts) -> Iterator[Finding]:
    for report in reports(facts):
        if report.code == "timed-out":
            yield Finding(
                f"trying {report.name} did not finish in time: {first_line(report.error) or 'the time limit was over'}",
                "ANYTORCH_PROBE_TIMEOUT=600 anytorch doctor",
                report.error[:1000],
                (report.name,),
            )


@diagnosis(
    Level.ERROR,
    "Trying the back end raised an error",
    needs="child",
    symptom="The device is listed, and the first computation on it raises.",
    evidence="The exception of a real allocation, matrix product, backward pass and copy in the child process.",
    fix="`export ANYTORCH_BACKEND=cpu` until its driver and torch are updated together. `anytorch -v doctor` shows the "
    "whole message and the traceback, `anytorch --json doctor` has them under `evidence`.",
)
def backend_failed(facts: Facts) -> Iterator[Finding]:
    for report in reports(facts):
        explained = report.name == "mps" and facts.hardware.machine.system == "Darwin"  # mps-unavailable says more
        if report.code == "failed" and not explained:
            trace = str(report.facts.get("traceback") or "").rstrip()
            yield Finding(
                f"{report.name} is present but does not compute: {first_line(report.error) or 'no message'}",
                "export ANYTORCH_BACKEND=cpu  # until its driver and torch are updated together"
                if report.name != "cpu"
                else reinstall_torch(facts),
                f"{report.error}\n{trace}" if trace else report.error,
                (report.name,),
            )


@diagnosis(
    Level.NOTE,
    "Part of the machine could not be read",
    symptom="Facts are missing from `anytorch info`.",
    evidence="A reader of the probe failed, for example on a file this user may not open.",
    fix="`anytorch --json info` shows what is missing; run as a user who may read the file.",
)
def reader_failed(facts: Facts) -> Iterator[Finding]:
    for problem in facts.hardware.problems:
        yield Finding(
            f"part of the machine could not be read: {first_line(problem)}", "anytorch --json info", problem[:1000]
        )


# --- the wheel against the cards and the driver ------------------------------------------------------------------------

INSTALL_PAGE = "https://pytorch.org/get-started/locally/"
ASCEND_NODES = "--device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc"
KIND_OF = {"cuda": "NVIDIA", "rocm": "AMD", "xpu": "Intel"}


@diagnosis(
    Level.ERROR,
    "An NVIDIA GPU is present, but torch is the CPU-only build",
    symptom="`torch.cuda.is_available()` is False; `.to('cuda')` raises "
    "`AssertionError: Torch not compiled with CUDA enabled`.",
    evidence="An NVIDIA card in PCI (vendor 0x10de, class 03) or in NVML, while `cuda`, `hip` and `xpu` are all None "
    "in `torch/version.py`.",
    fix="`pip install torch==X+cuNNN --index-url https://download.pytorch.org/whl/cuNNN`; the doctor prints the "
    "index that suits this driver and card. With uv: `uv pip install torch --torch-backend=auto`.",
    background=f"{INSTALL_PAGE} https://github.com/pytorch/pytorch/issues/85332",
)
def cpu_only_wheel(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    wheel, cards = hardware.torch, cards_of(hardware, "nvidia")
    if wheel is None or wheel.kind != "cpu" or not cards or hardware.machine.system == "Darwin":
        return
    advice = advise(hardware)
    if advice.kind != "cuda":
        return  # no published wheel covers the card: wgpu-missing speaks of the way that is left
    yield Finding(
        f"{named(cards[0])} is present, but torch {wheel.version} is the CPU-only build",
        advice.command,
        f"{wheel.path}: cuda, hip and xpu are None in version.py; {advice.why}",
        ("cuda",),
    )


@diagnosis(
    Level.ERROR,
    "The GPU and the torch wheel are of different makers",
    symptom="An AMD or Intel GPU is in the machine and `torch.cuda.is_available()` or `torch.xpu.is_available()` is "
    "False; or `RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and "
    "installed a driver from http://www.nvidia.com/Download/index.aspx` on a machine without an NVIDIA card.",
    evidence="PCI vendor 0x1002 (with a KFD node whose simd_count is above 0), 0x8086 or 0x10de beside the kind of "
    "wheel that `torch/version.py` names.",
    fix="`pip install torch==X+rocmN --index-url https://download.pytorch.org/whl/rocmN` for AMD, "
    "`pip install torch==X+xpu --index-url https://download.pytorch.org/whl/xpu` for Intel.",
    background=f"{INSTALL_PAGE} https://docs.pytorch.org/docs/stable/notes/get_start_xpu.html",
)
def wrong_wheel(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    wheel = hardware.torch
    if wheel is None or hardware.machine.system == "Darwin" or installed(hardware, "torch-npu"):
        return
    if drivable(hardware, wheel.kind):
        return  # the wheel has a card of its own here
    advice = advise(hardware)
    if advice.kind not in KIND_OF or advice.kind == wheel.kind or (wheel.kind, advice.kind) == ("cpu", "cuda"):
        return
    card = drivable(hardware, advice.kind)[0]
    built = "the CPU-only build" if wheel.kind == "cpu" else f"built for {KIND_OF[wheel.kind]} GPUs"
    yield Finding(
        f"{named(card)} is present, but torch {wheel.version} is {built}",
        advice.command,
        f"{wheel.path}: version.py names a {wheel.kind} wheel; {advice.why}",
        (advice.kind,),
    )


@diagnosis(
    Level.ERROR,
    "The NVIDIA driver is older than the torch wheel needs",
    symptom="`The NVIDIA driver on your system is too old (found version 12080). Please update your GPU driver by "
    "downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx`.",
    evidence="The driver's version (NVML, `/proc/driver/nvidia/version`) against the least one for the wheel's CUDA: "
    "580 for CUDA 13, 525.60.13 (Windows 528.33) for CUDA 12. A `cuda-compat` libcuda lifts the limit and silences "
    "this.",
    fix="Update the driver, or install the wheel of an older CUDA: "
    "`pip install torch==X+cu126 --index-url https://download.pytorch.org/whl/cu126`.",
    background="https://docs.nvidia.com/deploy/cuda-compatibility/ https://github.com/pytorch/pytorch/issues/31243",
)
def driver_too_old(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    wheel, driver = hardware.torch, driver_of(hardware)
    if wheel is None or wheel.kind != "cuda" or not wheel.cuda or not driver:
        return
    if "compat" in (hardware.nvidia.libcuda or ""):
        return
    # Inside WSL NVML speaks for the Windows driver.
    system = "Windows" if hardware.machine.wsl else hardware.machine.system
    if driver_suffices(driver, wheel.cuda, system) is not False:
        return
    need = ".".join(str(part) for part in least_driver(wheel.cuda, system) or ())
    advice = advise(hardware)
    older = advice.kind == "cuda" and not advice.needs_driver
    yield Finding(
        f"NVIDIA driver {driver} is too old for torch {wheel.version}: CUDA {wheel.cuda} needs {need} or newer",
        advice.command if older else f"install NVIDIA driver {need} or newer: https://www.nvidia.com/drivers",
        f"driver {driver}; {wheel.path}: cuda = {wheel.cuda!r}; {advice.why}",
        ("cuda",),
    )


def code_for(facts: Facts, gpu: Gpu) -> bool | None:
    """Whether the installed CUDA wheel has code for this card. By its own list if the child asked it, else by the tables."""
    wheel = facts.hardware.torch
    if wheel is None or not wheel.cuda or gpu.capability is None:
        return None
    number = gpu.capability[0] * 10 + gpu.capability[1]
    listed_codes = [(m.group(1), int(m.group(2))) for m in map(_ARCH.fullmatch, arch_list(facts)) if m]
    if listed_codes:  # compute_90 is PTX, which any newer card compiles at load time
        return any(runs_on(code, number) if kind == "sm" else code <= number for kind, code in listed_codes)
    return covers(wheel.cuda, gpu.capability, facts.hardware.machine.arch, wheel.version)


_ARCH = re.compile(r"(sm|compute)_(\d+)[a-z]?")


@diagnosis(
    Level.ERROR,
    "The torch wheel has no code for this NVIDIA card",
    symptom="`torch.cuda.is_available()` is True, then the first kernel dies with `CUDA error: no kernel image is "
    "available for execution on the device`; before it a warning `... with CUDA capability sm_120 is not compatible "
    "with the current PyTorch installation.`",
    evidence="The card's compute capability (NVML) against what the wheel was compiled for: "
    "`torch.cuda.get_arch_list()` when torch was tried, else the release table of the wheel's CUDA version.",
    fix="Install the wheel that covers it: `pip install torch==X+cuNNN --index-url "
    "https://download.pytorch.org/whl/cuNNN` (V100, P100 and GTX 10xx need cu126; sm_100 and sm_120 need cu128 or "
    "newer).",
    background="https://github.com/pytorch/pytorch/issues/150733 https://github.com/pytorch/pytorch/issues/172352",
)
def card_not_covered(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    wheel, cards = hardware.torch, cards_of(hardware, "nvidia")
    bare = [gpu for gpu in cards if code_for(facts, gpu) is False]
    if wheel is None or not bare:
        return
    advice = advise(hardware)
    others = len(bare) < len(cards)
    for gpu in bare:
        major, minor = gpu.capability or (0, 0)
        yield Finding(
            f"torch {wheel.version} has no code for {named(gpu)} (compute capability {major}.{minor})",
            advice.command if advice.kind == "cuda" else "pip install 'anytorch[webgpu]'",
            f"sm_{major}{minor} is not among what CUDA {wheel.cuda} was compiled for; {advice.why}",
            () if others else ("cuda",),
            Level.WARNING if others else None,
        )


@diagnosis(
    Level.ERROR,
    "The ROCm wheel has no code for this AMD card",
    needs="child",
    symptom="`torch.cuda.is_available()` is True, then `HIP error: invalid device function`.",
    evidence="The card's gfx name (KFD topology) against `torch.cuda.get_arch_list()` of the wheel.",
    fix="Another ROCm wheel: `pip install torch==X+rocmN --index-url https://download.pytorch.org/whl/rocmN`. "
    "Telling HSA that the card is a near relative (`HSA_OVERRIDE_GFX_VERSION=10.3.0`) is an experiment: it can "
    "compute wrongly or hang.",
    background="https://rocm.docs.amd.com/projects/install-on-linux/en/latest/reference/system-requirements.html",
)
def gfx_not_in_wheel(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    wheel, cards, codes = hardware.torch, cards_of(hardware, "amd"), arch_list(facts)
    if wheel is None or wheel.kind != "rocm" or not codes:
        return
    bare = [gpu for gpu in cards if gpu.arch and not _gfx_listed(gfx_name(gpu), codes)]
    advice = advise(hardware)
    override = hardware.env.get("HSA_OVERRIDE_GFX_VERSION")
    harmless = len(bare) < len(cards) or override is not None
    for gpu in bare:
        tail = f"; HSA_OVERRIDE_GFX_VERSION={override} passes it off as another" if override else ""
        yield Finding(
            f"torch {wheel.version} has no code for {named(gpu)} ({gfx_name(gpu)}){tail}",
            advice.command
            if advice.kind == "rocm" and wheel.version not in advice.command
            else "pip install 'anytorch[webgpu]'  # no ROCm wheel has code for it",
            f"torch.cuda.get_arch_list() is {listed(codes)}",
            () if harmless else ("rocm",),
            Level.WARNING if harmless else None,
        )


def _gfx_listed(name: str, codes: tuple[str, ...]) -> bool:
    plain = {code.split(":", 1)[0] for code in codes}
    return name in plain or f"{name[:5]}-generic" in plain  # gfx1103 runs gfx11-generic code


@diagnosis(
    Level.ERROR,
    "The container was started without the GPU",
    symptom="The host has a GPU and the container does not: `Found no NVIDIA driver on your system`, `No HIP GPUs are "
    "available`, or zero NPUs.",
    evidence="A container (`/.dockerenv`, `/run/.containerenv`, cgroup), the card in `/sys/bus/pci`, and none of its "
    "nodes under `/dev`.",
    fix="`docker run --gpus all …` for NVIDIA, `docker run --device /dev/kfd --device /dev/dri …` for AMD, "
    f"`--device /dev/dri` for Intel, `{ASCEND_NODES}` for Ascend.",
    background="https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html",
)
def container_without_gpu(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    if not in_container(hardware) or hardware.machine.wsl:
        return
    for vendor, backend, prefixes, flags in (
        ("nvidia", "cuda", ("/dev/nvidia",), "--gpus all"),
        ("amd", "rocm", ("/dev/kfd",), "--device /dev/kfd --device /dev/dri"),
        ("intel", "xpu", ("/dev/dri/renderD",), "--device /dev/dri"),
        ("huawei", "npu", ("/dev/davinci",), ASCEND_NODES),
    ):
        # A processor's small graphics unit is rarely what somebody wants in a container.
        cards = [gpu for gpu in cards_of(hardware, vendor) if not gpu.integrated]
        if cards and not any(node.path.startswith(prefixes) for node in hardware.nodes):
            yield Finding(
                f"{named(cards[0])} is in the host, but this {hardware.machine.container} container has no "
                f"{prefixes[0]}* node",
                f"docker run {flags} …",
                f"PCI lists {listed(named(gpu) for gpu in cards)}; nodes here: "
                f"{listed(node.path for node in hardware.nodes) or 'none'}",
                (backend,),
            )
