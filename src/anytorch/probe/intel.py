"""Intel graphics: which are built in, and what Level Zero's system management says when it is asked."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from anytorch.probe.facts import Gpu

if TYPE_CHECKING:
    import ctypes

LEVEL_ZERO_VARIABLE = "ANYTORCH_LEVEL_ZERO_LIBRARY"
SUCCESS = 0  # ZE_RESULT_SUCCESS


def describe_intel(gpus: list[Gpu]) -> list[Gpu]:
    """Intel's integrated graphics always sit at device 2 of the first bus; cards sit on others."""
    described = []
    for gpu in gpus:
        if gpu.vendor == "intel" and gpu.pci is not None:
            integrated = gpu.pci.endswith(":00:02.0") and gpu.pci.startswith("0000:")
            gpu = replace(gpu, integrated=integrated, unified=integrated)
        described.append(gpu)
    return described


def read_level_zero(library: str) -> tuple[int | None, int | None]:
    """(what zesInit returned, number of devices). Never raises; None: not known.

    This loads Intel's compute driver, which takes long and has been seen to crash, so the probe calls it only when
    ANYTORCH_LEVEL_ZERO_LIBRARY names the loader; the child process may call it freely.
    """
    import ctypes

    try:
        loader = ctypes.CDLL(library)
        code = int(loader.zesInit(ctypes.c_uint32(0))) & 0xFFFFFFFF  # ze_result_t zesInit(zes_init_flags_t)
        return code, _devices(loader) if code == SUCCESS else None
    except (OSError, AttributeError):
        return None, None  # no such library, or no Level Zero


def _devices(loader: ctypes.CDLL) -> int | None:
    import ctypes

    count = ctypes.c_uint32(0)
    # ze_result_t zesDriverGet(uint32_t* count, zes_driver_handle_t* drivers)
    if loader.zesDriverGet(ctypes.byref(count), None) != SUCCESS or count.value > 64:
        return None
    drivers = (ctypes.c_void_p * max(1, count.value))()
    if loader.zesDriverGet(ctypes.byref(count), drivers) != SUCCESS:
        return None
    total = 0
    for driver in drivers[: count.value]:
        devices = ctypes.c_uint32(0)
        # ze_result_t zesDeviceGet(zes_driver_handle_t, uint32_t* count, zes_device_handle_t* devices)
        if loader.zesDeviceGet(ctypes.c_void_p(driver), ctypes.byref(devices), None) == SUCCESS:
            total += devices.value
    return total
