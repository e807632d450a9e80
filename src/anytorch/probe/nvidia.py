"""The NVIDIA driver: what its kernel module says in files, then what NVML says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anytorch.probe.facts import Gpu, Nvidia
from anytorch.probe.pci import pci_address
from anytorch.probe.tree import Tree, fields, find_library, whole
from anytorch.values import dataclass

if TYPE_CHECKING:
    import ctypes

PROC = "/proc/driver/nvidia"
# NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)
# NVRM version: NVIDIA UNIX x86_64 Kernel Module  375.74  Wed Jun 14 01:39:39 PDT 2017
VERSION = r"NVRM version:.*?Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s"
NVML_VARIABLE = "ANYTORCH_NVML_LIBRARY"
FABRIC_MANAGER = "/var/run/nvidia-fabricmanager/nv-fabricmanager.pid"


def read_nvidia(
    tree: Tree, env: Mapping[str, str], *, system: str = "Linux", arch: str = "", container: bool = False
) -> tuple[Nvidia, list[Gpu]]:
    """The driver's facts, and the cards its files and NVML name.

    With a recorded root NVML is asked only when ANYTORCH_NVML_LIBRARY names one; on the real machine that variable
    replaces the library the loader would find.
    """
    files = _from_files(tree)
    named = env.get(NVML_VARIABLE)
    library = named or find_library(
        tree, env, "nvml.dll" if system == "Windows" else "libnvidia-ml.so.1", system=system, arch=arch
    )
    libcuda = find_library(tree, env, "nvcuda.dll" if system == "Windows" else "libcuda.so.1", system=system, arch=arch)
    kernel_version = tree.word("/sys/module/nvidia/version")
    if kernel_version is None:
        text = tree.text(f"{PROC}/version")
        match = re.match(VERSION, text) if text else None
        kernel_version = match.group(1) if match else None
    nvidia = Nvidia(
        kernel_version=kernel_version,
        nvml_found=library is not None,
        libcuda=libcuda,
        fabric_manager=_fabric_manager(tree, container),
    )
    if library is None or not (tree.real or named):
        return nvidia, files
    report = read_nvml(library)
    for problem in report.problems:
        tree.problem(problem)
    nvidia = replace(nvidia, nvml_code=report.code, nvml_error=report.error, driver=report.driver, cuda=report.cuda)
    return nvidia, [*files, *report.gpus]


def _from_files(tree: Tree) -> list[Gpu]:
    """Cards the kernel module lists; they are there even in sandboxes that show no PCI bus."""
    gpus = []
    for entry in tree.names(f"{PROC}/gpus")[:256]:
        found = fields(tree.text(f"{PROC}/gpus/{entry}/information"))
        address = pci_address(found.get("Bus Location")) or pci_address(entry)
        if address is None:
            continue
        uuid = found.get("GPU UUID", "")
        gpus.append(
            Gpu(
                vendor="nvidia",
                name=found.get("Model", "")[:200] or None,
                pci=address,
                driver="nvidia",
                # A card that is not initialised yet shows question marks.
                uuid=uuid if uuid.startswith("GPU-") and "?" not in uuid else None,
                minor=whole(found.get("Device Minor"), high=4096),
                sources=("proc",),
            )
        )
    return gpus


def _fabric_manager(tree: Tree, container: bool) -> bool | None:
    """True if the Fabric Manager runs; None if no NVSwitch needs one or the host's is hidden."""
    if tree.exists(FABRIC_MANAGER):
        return True
    if container or not tree.names("/proc/driver/nvidia-nvswitch/devices"):
        return None
    return False


# --- NVIDIA's management library by ctypes: it counts and names cards without starting CUDA, so forking stays safe ----

# nvmlReturn_t
SUCCESS, NOT_SUPPORTED = 0, 3
MOST_DEVICES = 256


@dataclass(frozen=True)
class NvmlReport:
    code: int | None  # what nvmlInit_v2 returned; None: the library could not be loaded
    error: str | None = None
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    problems: tuple[str, ...] = ()


def read_nvml(library: str, *, timeout_s: float = 10.0) -> NvmlReport:
    """Ask the NVML at `library`. Never raises. A library that does not answer in time is left to itself: with a card
    that fell off the bus, NVML can wait for ever."""
    import threading

    answers: list[NvmlReport] = []
    # ctypes lets go of the interpreter lock during a call, so waiting here works.
    thread = threading.Thread(target=lambda: answers.append(_ask_safely(library)), name="anytorch-nvml", daemon=True)
    try:
        thread.start()
    except RuntimeError as exc:
        return NvmlReport(None, f"{library} was not queried: {exc}")
    thread.join(timeout_s)
    return answers[0] if answers else NvmlReport(None, f"{library} did not answer within {timeout_s:g} s")


def _ask_safely(library: str) -> NvmlReport:
    try:
        return _ask(library)
    except Exception as exc:  # noqa: BLE001  (a strange library must become a reason, never an exception)
        return NvmlReport(None, f"{type(exc).__name__}: {exc}")


def _ask(library: str) -> NvmlReport:
    import ctypes

    try:
        nvml = ctypes.CDLL(library)
    except OSError as exc:
        return NvmlReport(None, str(exc))
    code = _call(nvml, "nvmlInit_v2")
    if code is None:
        return NvmlReport(None, f"{library} has no nvmlInit_v2")
    if code != SUCCESS:
        return NvmlReport(code, _words(nvml, code))
    problems: list[str] = []
    try:
        gpus = [_device(nvml, handle, index) for index, handle in handles(nvml, problems)]
        return NvmlReport(
            SUCCESS,
            driver=text(nvml, "nvmlSystemGetDriverVersion"),
            cuda=_cuda_version(nvml),
            gpus=tuple(gpus),
            problems=tuple(problems),
        )
    finally:
        _call(nvml, "nvmlShutdown")


def handles(nvml: ctypes.CDLL, problems: list[str]) -> Iterator[tuple[int, ctypes.c_void_p]]:
    """The index and the handle of every device that can be opened; the others are named in `problems`."""
    import ctypes

    count = ctypes.c_uint(0)
    returned = _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    if returned != SUCCESS:
        problems.append(f"NVML cannot count the devices: {_words(nvml, returned)}")
        return
    for index in range(min(count.value, MOST_DEVICES)):
        handle = ctypes.c_void_p()
        returned = _call(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        if returned == SUCCESS:
            yield index, handle
        else:
            problems.append(f"NVML cannot open device {index}: {_words(nvml, returned)}")


def _device(nvml: ctypes.CDLL, handle: ctypes.c_void_p, index: int) -> Gpu:
    import ctypes

    class PciInfo(ctypes.Structure):  # nvmlPciInfo_t
        _fields_ = (
            ("bus_id_legacy", ctypes.c_char * 16),
            ("domain", ctypes.c_uint),
            ("bus", ctypes.c_uint),
            ("device", ctypes.c_uint),
            ("device_id", ctypes.c_uint),  # device << 16 | vendor
            ("subsystem_id", ctypes.c_uint),
            ("bus_id", ctypes.c_char * 32),
        )

    pci, major, minor, number = PciInfo(), ctypes.c_int(0), ctypes.c_int(0), ctypes.c_uint(0)
    has_pci = _call(nvml, "nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci)) == SUCCESS
    has_capability = (
        _call(nvml, "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor)) == SUCCESS
    )
    has_number = _call(nvml, "nvmlDeviceGetMinorNumber", handle, ctypes.byref(number)) == SUCCESS
    total, free, unified = memory(nvml, handle)
    return Gpu(
        vendor="nvidia",
        name=text(nvml, "nvmlDeviceGetName", handle),
        pci=pci_address(pci.bus_id.decode("utf-8", "replace")) if has_pci else None,
        device_id=pci.device_id >> 16 if has_pci and pci.device_id else None,
        uuid=text(nvml, "nvmlDeviceGetUUID", handle),
        index=index,
        capability=(major.value, minor.value) if has_capability else None,
        minor=number.value if has_number else None,
        total=total,
        free=free,
        unified=unified,
        sources=("nvml",),
    )


def memory(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> tuple[int | None, int | None, bool | None]:
    """(total, free, unified). Version 1 counts what the driver reserves as used, so version 2 is asked first."""
    import ctypes

    class MemoryV2(ctypes.Structure):  # nvmlMemory_v2_t
        _fields_ = (
            ("version", ctypes.c_uint),
            ("total", ctypes.c_ulonglong),
            ("reserved", ctypes.c_ulonglong),
            ("free", ctypes.c_ulonglong),
            ("used", ctypes.c_ulonglong),
        )

    class MemoryV1(ctypes.Structure):  # nvmlMemory_t
        _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))

    newer = MemoryV2(version=ctypes.sizeof(MemoryV2) | 2 << 24)
    older = MemoryV1()
    answer: MemoryV1 | MemoryV2 = newer
    returned = _call(nvml, "nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(newer))
    if returned != SUCCESS:
        answer = older
        returned = _call(nvml, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(older))
    if returned == SUCCESS:
        return int(answer.total) or None, int(answer.free), None
    # GB10 and Tegra have no memory of their own and say so (kubernetes-sigs/dra-driver-nvidia-gpu issue 1073).
    return None, None, True if returned == NOT_SUPPORTED else None


def _cuda_version(nvml: ctypes.CDLL) -> tuple[int, int] | None:
    import ctypes

    number = ctypes.c_int(0)
    for name in ("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion"):
        if _call(nvml, name, ctypes.byref(number)) == SUCCESS and number.value > 0:
            return number.value // 1000, number.value % 1000 // 10  # 13000 is CUDA 13.0
    return None


def _call(nvml: ctypes.CDLL, name: str, *arguments: Any) -> int | None:
    """An nvmlReturn_t, or None if this library is too old (or too new) to have that function."""
    function = getattr(nvml, name, None)
    return None if function is None else int(function(*arguments))


def text(nvml: ctypes.CDLL, name: str, *arguments: Any) -> str | None:
    import ctypes

    buffer = ctypes.create_string_buffer(256)
    # nvmlReturn_t f(…, char* text, unsigned int length)
    if _call(nvml, name, *arguments, buffer, ctypes.c_uint(len(buffer) - 1)) != SUCCESS:
        return None
    return buffer.value.decode("utf-8", "replace") or None


def _words(nvml: ctypes.CDLL, code: int | None) -> str:
    import ctypes

    describe = getattr(nvml, "nvmlErrorString", None)
    if describe is None or code is None:
        return f"code {code}"
    describe.restype = ctypes.c_char_p  # const char* nvmlErrorString(nvmlReturn_t)
    words = describe(code)
    return words.decode("utf-8", "replace") if words else f"code {code}"
