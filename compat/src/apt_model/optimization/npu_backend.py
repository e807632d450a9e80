"""One interface to CUDA, NPU and CPU."""

from anytorch_compat.backend import DeviceBackend as DeviceBackend
from anytorch_compat.backend import UnifiedDeviceManager as UnifiedDeviceManager
from anytorch_compat.backend import get_device_manager as get_device_manager
from anytorch_compat.backend import get_unified_backend as get_unified_backend
from anytorch_compat.system import get_accelerator_type as get_accelerator_type
from anytorch_compat.system import is_cuda_available as is_cuda_available
from anytorch_compat.system import is_npu_available as is_npu_available

__all__ = [
    "DeviceBackend",
    "UnifiedDeviceManager",
    "get_accelerator_type",
    "get_device_manager",
    "get_unified_backend",
    "is_cuda_available",
    "is_npu_available",
]
