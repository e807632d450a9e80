"""The device, its facts, its memory and the seed."""

from anytorch_compat.system import get_device as get_device
from anytorch_compat.system import get_device_info as get_device_info
from anytorch_compat.system import get_memory_info as get_memory_info
from anytorch_compat.system import memory_cleanup as memory_cleanup
from anytorch_compat.system import set_seed as set_seed

__all__ = ["get_device", "get_device_info", "get_memory_info", "memory_cleanup", "set_seed"]
