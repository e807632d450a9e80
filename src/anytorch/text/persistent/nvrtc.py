"""CUDA C++ compiled at run time, and launched so that all its blocks run at once.

Through NVIDIA's run-time compiler (NVRTC, a library that comes with CUDA builds of torch) and the driver: no nvcc is
needed. Compiled kernels are kept in the cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from anytorch import logs, settings
from anytorch.errors import DeviceError, NativeUnavailable
from anytorch.files import replace_file
from anytorch.native import trust

log = logs.logger(__name__)

FOLDER = "cuda-kernels"  # of the cache
MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Kernel:
    """One function of a CUDA source, compiled for the current device with `sizes` as its constants.

    Raises NativeUnavailable where there is no run-time compiler, or where it refuses the source.
    """

    def __init__(self, source: Path, name: str, sizes: Mapping[str, int], device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # the driver needs torch's context
            code = _compiled(source.read_text(), tuple(sorted(sizes.items())), _architecture(device))
            module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
            _check(_driver().cuModuleLoadData(ctypes.byref(module), code))
            _check(_driver().cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))

    def blocks_at_once(self, threads: int, shared: int) -> int:
        """How many blocks of so many threads and bytes of shared memory one multiprocessor runs at the same time."""
        count = ctypes.c_int()
        with torch.cuda.device(self.device):
            _check(_driver().cuFuncSetAttribute(self._function, MOST_SHARED, shared))
            _check(
                _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    ctypes.byref(count), self._function, threads, ctypes.c_size_t(shared)
                )
            )
        return count.value

    def launch(self, blocks: int, threads: int, shared: int, argument: ctypes.Structure) -> None:
        """All blocks at once, on the current stream, or an error: never some of them, waiting for the others."""
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        with torch.cuda.device(self.device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            _check(
                _driver().cuLaunchCooperativeKernel(
                    self._function, blocks, 1, 1, threads, 1, 1, shared, stream, parameters
                )
            )


def compile_ahead(source: Path, sizes: Mapping[str, int], device: torch.device) -> None:
    """Compile for a device what a `Kernel` will need: several threads may do that at once. Raises NativeUnavailable."""
    _compiled(source.read_text(), tuple(sorted(sizes.items())), _architecture(device))


def _architecture(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise DeviceError(f"cuda: {(text.value or b'').decode()} (error {status})")


def _places() -> Iterator[str]:
    """Where NVRTC may be: beside torch, in NVIDIA's wheels, in a toolkit, or wherever the loader finds it."""
    found = Path(torch.__file__).parent
    for folder in (found / "lib", *sorted((found.parent / "nvidia").glob("*/lib")), Path("/usr/local/cuda/lib64")):
        for path in sorted(folder.glob("libnvrtc.so*")):
            yield str(path)
    major = (torch.version.cuda or "13").split(".")[0]
    yield from (f"libnvrtc.so.{major}", "libnvrtc.so")


@cache
def _nvrtc() -> Any:
    refused = ""
    for place in _places():
        try:
            return ctypes.CDLL(place)
        except OSError as exc:
            refused = str(exc)
    raise NativeUnavailable(
        f"CUDA's run-time compiler (NVRTC) was not found: {refused}",
        hint="pip install nvidia-cuda-nvrtc, of the version of torch's CUDA",
    )


@cache
def _compiled(source: str, sizes: tuple[tuple[str, int], ...], architecture: str) -> bytes:
    """Machine code, from the cache if it was compiled before: that takes seconds."""
    options = [f"--gpu-architecture={architecture}", "-std=c++17", *(f"-D{name}={value}" for name, value in sizes)]
    nvrtc = _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    key = hashlib.sha256("\n".join([source, *options, f"{major.value}.{minor.value}"]).encode()).hexdigest()
    try:
        path = trust.own_folder(settings.cache_folder(), FOLDER) / f"{key[:32]}.cubin"
        if path.exists() and not trust.refusal(path):
            return path.read_bytes()
    except OSError as exc:
        log.warning("cannot keep the compiled kernel: %s", exc)
        return _compile(nvrtc, source, options)
    log.info("compiling a kernel for %s", architecture)
    code = _compile(nvrtc, source, options)
    try:
        replace_file(path, code)
        trust.set_mode(path, trust.PRIVATE)
        trust.seal(path)
    except OSError as exc:
        log.warning("cannot keep the compiled kernel %s: %s", path, exc.strerror)
    return code


def _compile(nvrtc: Any, source: str, options: list[str]) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def checked(status: int) -> None:
        if status:
            nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise NativeUnavailable(f"CUDA's run-time compiler: {nvrtc.nvrtcGetErrorString(status).decode()}")

    checked(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"decode.cu", 0, None, None))
    try:
        given = (ctypes.c_char_p * len(options))(*(one.encode() for one in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            checked(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value)
            checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise NativeUnavailable(f"CUDA's run-time compiler refused the kernel: {log.value.decode()[-2000:]}")
        checked(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        checked(nvrtc.nvrtcGetCUBIN(program, code))
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
