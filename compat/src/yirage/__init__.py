"""YiRage's names. `YIRAGE_BACKEND` and `YIRAGE_LOG_LEVEL` are honoured by anytorch itself."""

from anytorch_compat import needing_torch
from anytorch_compat.advice import auto_configure_backend as auto_configure_backend
from anytorch_compat.graphs import bfloat16 as bfloat16
from anytorch_compat.graphs import float16 as float16
from anytorch_compat.graphs import float32 as float32
from anytorch_compat.graphs import new_threadblock_graph as new_threadblock_graph
from anytorch_compat.measuring import benchmark_backends as benchmark_backends
from anytorch_compat.optimizer import BackendOptimizer as BackendOptimizer
from anytorch_compat.selection import BackendType as BackendType
from anytorch_compat.selection import get_available_backends as get_available_backends
from anytorch_compat.selection import get_backend as get_backend
from anytorch_compat.selection import set_backend as set_backend
from anytorch_compat.system import get_memory_info as get_memory_info

from anytorch.graph.kernel_graph import new_kernel_graph as new_kernel_graph

__getattr__ = needing_torch(__name__, {"PersistentKernel": "anytorch.text.persistent.kernel"})
__all__ = [
    "BackendOptimizer",
    "BackendType",
    "auto_configure_backend",
    "benchmark_backends",
    "bfloat16",
    "float16",
    "float32",
    "get_available_backends",
    "get_backend",
    "get_memory_info",
    "new_kernel_graph",
    "new_threadblock_graph",
    "set_backend",
]
