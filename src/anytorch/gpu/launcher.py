"""The launch path in C++ (`code/launcher/`), where it can be had; Python computes the same without it.

The library is compiled or carried like our other native code, and calls nothing by name: it is handed the addresses of
Python's stable C interface and of WebGPU's functions, and its own functions become Python's by `PyCFunction_NewEx`. So one
file serves every Python. It works for one runtime at a time, the open one (`attach`).
"""

from __future__ import annotations

import ctypes
import struct
import sys
import sysconfig
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from anytorch import logs, native, settings
from anytorch.errors import NativeUnavailable
from anytorch.gpu.native import BindingTooLarge, ffi, lib

log = logs.logger(__name__)

# In the order of handed_in.h.
PYTHON = (
    *("Py_IncRef", "Py_DecRef", "PyLong_FromLongLong", "PyLong_AsLongLong", "PyLong_AsDouble", "PyFloat_AsDouble"),
    *("PyTuple_New", "PyTuple_SetItem", "PyTuple_GetItem", "PyTuple_Size"),
    *("PyList_New", "PyList_Append", "PyList_GetItem", "PyList_Size"),
    *("PyBytes_FromStringAndSize", "PyBytes_AsString", "PyBytes_Size", "PyCapsule_New", "PyCapsule_GetPointer"),
    *("PyObject_Call", "PyObject_CallFunctionObjArgs", "PyObject_CallNoArgs"),
    *("PyErr_Occurred", "PyErr_Clear", "PyErr_SetString", "PyErr_Fetch", "PyErr_Restore", "PyDict_Size"),
    "PyErr_ExceptionMatches",
)
OBJECTS = (None, int, float, bool, tuple, list, TypeError, BindingTooLarge)
WEBGPU = (
    lib.wgpuComputePassEncoderSetPipeline,
    lib.wgpuComputePassEncoderSetBindGroup,
    lib.wgpuComputePassEncoderSetImmediates,
    lib.wgpuComputePassEncoderDispatchWorkgroups,
)


class _Method(ctypes.Structure):
    """A PyMethodDef."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


class Launcher:
    """The library's functions, which are described where they are defined."""

    plan: Callable[..., Any]
    launch: Callable[..., None]
    tensor: Callable[..., Any]
    add: Callable[[Any, int, int, int], None]
    remove: Callable[[int], None]
    pin: Callable[[int, int], None]
    returned: Callable[[], list[Any]]
    reused: Callable[[], int]
    forget_groups: Callable[[], None]
    forget_plans: Callable[[], None]
    use_pass: Callable[[int], None]
    watch: Callable[[bool], None]
    refill: Callable[[int], int]
    attach: Callable[..., None]

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.use_python(addresses(PYTHON), objects(OBJECTS), _array([address(one) for one in WEBGPU]))
        at = ctypes.addressof(_Method.in_dll(library, "methods"))
        while name := _Method.from_address(at).name:
            setattr(self, name.decode(), builtin(at))
            at += ctypes.sizeof(_Method)


def addresses(names: Sequence[str]) -> Any:
    """The addresses of functions of Python's C interface, as an array."""
    return _array([ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0 for name in names])


def objects(held: Sequence[Any]) -> Any:
    """The addresses of objects, as an array; whoever keeps them keeps the objects."""
    return _array([id(one) for one in held])


def _array(numbers: Sequence[int]) -> Any:
    return (ctypes.c_void_p * len(numbers))(*numbers)


def address(pointer: Any) -> int:
    """The address that a pointer of cffi's holds."""
    return int(ffi.cast("uintptr_t", pointer))


def builtin(method: int, itself: Any = None) -> Any:
    """A function of Python's, made of the PyMethodDef at an address, which must stay."""
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.argtypes, make.restype = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p], ctypes.py_object
    return make(method, itself, None)


def capsule(pointer: int) -> Any:
    make = ctypes.pythonapi.PyCapsule_New
    make.argtypes, make.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object
    return make(pointer, None, None)


@lru_cache(maxsize=1)
def load() -> Launcher | None:
    """The launcher of this process; None where it is switched off, cannot be built, or this Python is laid out otherwise."""
    if not settings.get("webgpu_native"):
        return None
    if why := _unfit():
        log.info("webgpu launches from Python: %s", why)
        return None
    try:
        library = native.load(
            "launcher", [Path(__file__).parent / "code" / "launcher" / "launcher.cpp"], level="baseline"
        )
    except (NativeUnavailable, OSError) as exc:  # OSError: there is neither a cache nor a temporary folder to build in
        log.info("webgpu launches from Python: %s", exc)
        return None
    return Launcher(library)


def _unfit() -> str:
    """Why this Python cannot be served, in words; "" if it can. Of an object the library reads the type, no more."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "it needs CPython with its global lock"
    if struct.calcsize("P") != 8 or any(not hasattr(ctypes.pythonapi, name) for name in PYTHON):
        return "it needs 64-bit addresses and Python's stable C interface"
    if ctypes.c_void_p.from_address(id(1.5) + 8).value != id(float):
        return "objects of this Python have another layout"
    return ""
