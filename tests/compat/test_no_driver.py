"""No documented name initialises CUDA in the caller's process: the tripwire of the research page (section 3, level 3).

torch's own entry to the driver is replaced by an exception, and the mock NVML library shows two H200s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

ASK = """
import warnings
import torch

def tripwire(*args, **kwargs):
    raise SystemError("the driver was initialised in the parent")

# The two ways torch reaches the driver: counting devices, and initialising the context.
torch._C._cuda_getDeviceCount = tripwire
torch._C._cuda_init = tripwire
torch.cuda._lazy_init = tripwire

import anytorch
from anytorch_compat.backend import DeviceBackend, get_device_manager
from anytorch_compat.selection import get_available_backends, get_backend, set_backend
from anytorch_compat.system import *
from anytorch.devices.choose import survey

seen = [c.name for c in survey("never").devices if c.backend == "cuda"]
with warnings.catch_warnings():
    warnings.simplefilter("ignore", anytorch.DeviceFallbackWarning)
    get_best_device(), get_device(prefer_npu=True), resolve_device("cuda:0")
    get_device_info(), get_memory_info(), get_memory_info("cuda")
    get_accelerator_type(), is_cuda_available(), is_npu_available()
    get_available_backends(), set_backend("cuda"), get_backend()
    memory_cleanup(), set_seed(1)
    for backend in (DeviceBackend("cuda:0"), DeviceBackend(torch.device("cuda:1"))):
        backend.device, backend.device_type, backend.is_available(), backend.device_count()
        backend.get_device_name(), backend.get_device_properties(), backend.get_memory_summary()
        backend.memory_allocated(), backend.memory_reserved(), backend.max_memory_allocated()
        backend.empty_cache(), backend.synchronize()
    manager = get_device_manager()
    manager.get_all_devices(), manager.get_best_device(), manager.get_device_summary(), manager.cleanup_all()
summary = DeviceBackend("cuda:0").get_memory_summary()
reason = get_memory_info("cuda")["reason"]
answer(seen=seen, initialized=torch.cuda.is_initialized(), total=summary["total"], reason=reason)
"""


@pytest.mark.long
def test_tripwire(nvml_stub: Any, run_script: Callable[..., dict[str, Any]]) -> None:
    told = run_script(ASK, nvml_stub.env())
    assert told["seen"] == ["NVIDIA H200", "NVIDIA H200"]  # the cards were seen all the same
    assert told["initialized"] is False
    assert told["total"] == 143771 << 20  # told by NVML, not by CUDA
    assert "CPU" in told["reason"] or "cpu" in told["reason"]  # the wheel here is CPU-only, and that is the reason told
