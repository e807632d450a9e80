"""New tensors and elementwise ops by the C++ launcher (`gpu.launcher`), where it can be had; else Python does the same.

It reads tensors by torch's stable C functions (`aoti_torch_get_sizes`, …, promised to compiled extensions) and makes them by
DLPack. What it needs to know of torch beyond that, where in a tensor's Python object the C++ one is, is found by
looking, and checked on several tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.nn import Parameter

from anytorch import logs
from anytorch.gpu import launcher
from anytorch.gpu.plans import plans

log = logs.logger(__name__)

READERS = (  # in the order of launcher.cpp's structure
    *("aoti_torch_get_data_ptr", "aoti_torch_get_dim", "aoti_torch_get_sizes", "aoti_torch_get_strides"),
    "aoti_torch_get_dtype",
)
INTEGER, UNSIGNED, FLOAT, BFLOAT, COMPLEX, BOOLEAN = 0, 1, 2, 4, 5, 6  # DLPack's codes
DTYPES = {
    torch.float32: (FLOAT, 32),
    torch.float16: (FLOAT, 16),
    torch.bfloat16: (BFLOAT, 16),
    torch.float64: (FLOAT, 64),
    torch.int64: (INTEGER, 64),
    torch.int32: (INTEGER, 32),
    torch.int16: (INTEGER, 16),
    torch.int8: (INTEGER, 8),
    torch.uint8: (UNSIGNED, 8),
    torch.bool: (BOOLEAN, 8),
    torch.complex64: (COMPLEX, 64),
}


class _Dtype(ctypes.Structure):
    _fields_ = [("dtype", ctypes.c_void_p), ("code", ctypes.c_uint64), ("bits", ctypes.c_uint64)]


@lru_cache(maxsize=1)
def _launcher() -> launcher.Launcher | None:
    """The launcher if it can read this torch's tensors, else None."""
    found = launcher.load()
    if found is None:
        return None
    if _handle_offset() is None or not hasattr(torch._C, "_from_dlpack") or _readers() is None:
        log.info("webgpu launches from Python: the memory layout of tensors of torch %s is unknown", torch.__version__)
        return None
    return found


def _handle_offset() -> int | None:
    """Where in a tensor's Python object the address of its C++ one is; None if it is nowhere we know."""
    tried = [torch.empty(0), torch.ones(2, 3).t(), Parameter(torch.zeros(1)), torch.zeros((), dtype=torch.int64)]
    for offset in (16, 24):  # right behind the head of every object; earlier versions of torch have a flag there first
        if all(ctypes.c_int64.from_address(id(one) + offset).value == one._cdata for one in tried):
            return offset
    return None


@lru_cache(maxsize=1)
def _readers() -> Any:
    """The addresses of the functions that read a tensor, tried on one; None if they are not there, or answer otherwise."""
    library = ctypes.CDLL(torch._C.__file__)  # finds what it was linked with, too
    try:
        functions = [getattr(library, name) for name in READERS]
    except AttributeError:
        return None
    one, offset = torch.empty_strided((3, 5), (7, 1), dtype=torch.float16), _handle_offset()
    if offset is None:
        return None
    found: list[Any] = []
    for function in functions:
        function.argtypes, value = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int64(0)
        if function(id(one) + offset, ctypes.addressof(value)):
            return None
        found.append(value.value)
    pairs = [list((ctypes.c_int64 * 2).from_address(found[i])) for i in (2, 3)]
    if (found[0], found[1], pairs) != (one.data_ptr(), 2, [[3, 5], [7, 1]]):
        return None
    return (ctypes.c_void_p * len(functions))(*[ctypes.cast(one, ctypes.c_void_p).value for one in functions])


def tensor_maker(plain: Callable[..., torch.Tensor], take: Callable[[int], int]) -> Callable[..., torch.Tensor]:
    """What makes a tensor of (size, stride, dtype, nbytes): C++, or `plain` where there is none.

    `take` gives the address of a new buffer of so many bytes.
    """
    found = _launcher()
    if found is None:
        return plain
    kept = (torch.Tensor, Parameter, torch._C._from_dlpack, take, plain)
    dtypes = (_Dtype * len(DTYPES))(*[_Dtype(id(dtype), *code) for dtype, code in DTYPES.items()])
    use = found.library.use_tensors
    use.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    use(_readers(), _handle_offset(), launcher.objects(kept), dtypes, len(DTYPES))
    plans.also_cleared.append(found.forget_plans)
    return found.tensor


def kernel(
    otherwise: Callable[..., Any], plan_of: Callable[..., Any], operands: Sequence[int], in_place: bool
) -> Callable[..., Any]:
    """`otherwise`, an elementwise kernel of at least and at most so many operands, with its known calls made by C++.

    `plan_of(*args)` gives the plan of a call that `otherwise` has just answered, as C++ knows it, or None.
    """
    found = _launcher()
    if found is None:
        return otherwise
    make, method = found.library.kernel_of, ctypes.c_void_p()
    make.argtypes = [ctypes.py_object, ctypes.py_object, *[ctypes.c_uint32] * 2, ctypes.c_int, ctypes.c_void_p]
    make.restype = ctypes.c_void_p
    op = make(otherwise, plan_of, *operands, in_place, ctypes.addressof(method))
    made: Callable[..., Any] = launcher.builtin(method.value or 0, launcher.capsule(op))
    return made
