"""The raw calls of wgpu-native's C library, through wgpu-py's own binding of it.

wgpu-py's public API costs 57 µs of CPU per dispatch; the same calls made directly cost 3. Everything private of wgpu-py
that we touch is named in this file, and checked when it is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from anytorch.errors import AnytorchError, DeviceLost, OutOfMemory

try:
    import wgpu as wgpu
    import wgpu.backends.wgpu_native
    from wgpu.backends.wgpu_native import _api
    from wgpu.backends.wgpu_native._ffi import ffi as ffi
    from wgpu.backends.wgpu_native._ffi import lib as lib

    error_handler = _api.error_handler
    _checked = (lib.wgpuComputePassEncoderSetImmediates, _api.libf.wgpuDeviceCreateShaderModuleTrusted)
except ModuleNotFoundError as exc:  # pragma: no cover - not installed
    raise ImportError(f"{exc}; run: pip install 'anytorch[webgpu]'") from exc
except (ImportError, AttributeError) as exc:  # pragma: no cover - another wgpu than the one we were written for
    raise ImportError(
        f"anytorch's WebGPU runtime was written for wgpu 0.32 and cannot use the one installed: {exc}; "
        "run: pip install 'anytorch[webgpu]'"
    ) from exc

NULL = ffi.NULL
STORAGE = int(wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST)
UPLOAD = int(wgpu.BufferUsage.MAP_WRITE | wgpu.BufferUsage.COPY_SRC)
READBACK = int(wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST)


class ShaderError(AnytorchError):
    """A shader of ours does not compile: a defect of ours, never of the user's."""


class BindingTooLarge(AnytorchError):
    """A buffer exceeds what one binding may cover, and the kernel was given no windows into it."""


class GpuError(AnytorchError):
    """The device refused a command."""


@contextmanager
def raising(doing: str) -> Iterator[None]:
    """Turn what wgpu would log into our exceptions: OutOfMemory, DeviceLost or GpuError."""
    error_handler.capture(doing)
    try:
        yield
    finally:
        error = error_handler.release(doing)
    if error is not None:
        raise translated(doing, *error)


def translated(doing: str, kind: str, message: str) -> AnytorchError:
    words = message.strip().splitlines()
    short = "; ".join(line.strip() for line in words if line.strip())[:600]
    lowered = message.lower()
    if "outofmemory" in kind.lower().replace(" ", "") or "not enough memory" in lowered or "out of memory" in lowered:
        return OutOfMemory(f"webgpu: {doing}: {short}", hint="free tensors, use a smaller batch, or quantize the model")
    if "device is lost" in lowered or "device lost" in lowered:
        return DeviceLost(f"webgpu: {doing}: {short}", hint=LOST_HINT)
    return GpuError(f"webgpu: {doing}: {short}")


LOST_HINT = (
    "the driver reset the GPU (a dispatch that ran too long, a driver update, the card went away); "
    "its tensors are gone: restart the process, or call anytorch.webgpu.reset() and load the model again"
)


def shader_module(device: Any, source: str) -> Any:
    """Compile WGSL without run-time bounds checks: our kernels check their own bounds, once per thread."""
    encoded = source.encode()
    text = ffi.new("char[]", encoded)
    wgsl = ffi.new("WGPUShaderSourceWGSL *")
    wgsl.chain.next = NULL
    wgsl.chain.sType = lib.WGPUSType_ShaderSourceWGSL
    wgsl.code.data = text
    wgsl.code.length = len(encoded)
    descriptor = ffi.new("WGPUShaderModuleDescriptor *")
    descriptor.nextInChain = ffi.cast("WGPUChainedStruct *", wgsl)
    descriptor.label.data = NULL
    descriptor.label.length = 0
    # H: WGPUShaderModule f(WGPUDevice device, WGPUShaderModuleDescriptor const * descriptor, WGPUShaderRuntimeChecks)
    handle = _api.libf.wgpuDeviceCreateShaderModuleTrusted(device._internal, descriptor, 0)
    return _api.GPUShaderModule("", handle, device)
