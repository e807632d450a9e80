"""YiRage's names. `YIRAGE_BACKEND` and `YIRAGE_LOG_LEVEL` are honoured by anytorch itself."""

from anytorch_compat import later
from anytorch_compat.advice import auto_configure_backend as auto_configure_backend
from anytorch_compat.measuring import benchmark_backends as benchmark_backends
from anytorch_compat.optimizer import BackendOptimizer as BackendOptimizer
from anytorch_compat.selection import BackendType as BackendType
from anytorch_compat.selection import get_available_backends as get_available_backends
from anytorch_compat.selection import get_backend as get_backend
from anytorch_compat.selection import set_backend as set_backend
from anytorch_compat.system import get_memory_info as get_memory_info

__getattr__ = later(
    __name__,
    {
        "new_kernel_graph": "the kernel graphs",
        "PersistentKernel": "the persistent kernel",
    },
)
__all__ = [
    "BackendOptimizer",
    "BackendType",
    "auto_configure_backend",
    "benchmark_backends",
    "get_available_backends",
    "get_backend",
    "get_memory_info",
    "set_backend",
]
