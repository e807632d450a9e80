"""Tensors whose storage is a GPU buffer, made in pure Python.

A storage is built over a made-up address (`gpu.buffers`); the Python object of a storage lives exactly as long as the C++
one, so an attribute of it returns the buffer to the pool at the right moment. Views are torch's own: the CPU's view kernels
only compute sizes and strides, so they are used as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from anytorch.errors import OutOfMemory
from anytorch.gpu import runtime as gpu_runtime
from anytorch.gpu.buffers import OFFSET_MASK, SHIFT, Buffer
from anytorch.gpu.runtime import open_runtime
from anytorch.webgpu import accelerator

NAME = "webgpu"
KEY = "PrivateUse1"  # under which torch dispatches to it
aten = torch.ops.aten
CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

# All four are present in torch 2.11 to 2.13; `anytorch.webgpu` checks them and says so if a later torch has dropped one.
_make_storage: Any = torch._C._construct_storage_from_data_pointer
_make_tensor: Any = torch._C._acc.create_empty_tensor


def on_cpu(op: Any) -> Callable[..., Any]:
    """Call the CPU's kernel of `op` whatever device its tensors claim; only for kernels that touch no data."""
    return partial(op._handle.redispatch_boxed, CPU_KEYS)


laid_out = on_cpu(aten.set_.source_Storage_storage_offset)
_redispatch_set = aten.set_.source_Storage_storage_offset._handle.redispatch_boxed
_device: torch.device | None = None


def device() -> torch.device:
    global _device
    if _device is None:
        _device = torch.device(NAME, 0)
    return _device


class Lease(tuple[Callable[[Buffer], None], Buffer]):
    """Held by a storage; gives the buffer back when the storage dies. A tuple, because making one runs no Python code."""

    __slots__ = ()

    def __del__(self) -> None:
        give, buffer = self
        give(buffer)


def new_storage(nbytes: int) -> torch.UntypedStorage:
    storage: torch.UntypedStorage
    if nbytes == 0:
        storage = _make_storage(0, device(), 0)
        return storage
    runtime = gpu_runtime.current or open_runtime()
    try:
        buffer = runtime.take(nbytes)
    except OutOfMemory as exc:
        raise torch.OutOfMemoryError(str(exc)) from exc
    storage = _make_storage(buffer.address, _device or device(), nbytes)
    storage._anytorch = Lease((runtime.give, buffer))  # type: ignore[attr-defined]
    return storage


def _take(nbytes: int) -> int:
    """The address of a new buffer, for a tensor that C++ makes and whose end gives it back."""
    try:
        return open_runtime().take(nbytes).address
    except OutOfMemory as exc:
        raise torch.OutOfMemoryError(str(exc)) from exc


def new_tensor(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor of this geometry."""
    return sized_tensor(size, stride, dtype, storage_nbytes(size, stride, dtype))


def _sized_tensor(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, nbytes: int) -> torch.Tensor:
    """The same for a caller that knows how large the storage must be."""
    tensor: torch.Tensor = _make_tensor(_NOTHING, dtype)
    _redispatch_set(CPU_KEYS, tensor, new_storage(nbytes), 0, size, stride)
    return tensor


_NOTHING = (0,)
sized_tensor = accelerator.tensor_maker(_sized_tensor, _take)


def storage_nbytes(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    elements = 1
    for length, step in zip(size, stride, strict=True):
        if length <= 0:
            return _without_elements(size)
        elements += (length - 1) * step
    return elements * dtype.itemsize


def _without_elements(size: Sequence[int]) -> int:
    if min(size) < 0:
        raise RuntimeError(f"Trying to create tensor with negative dimension {min(size)}: {list(size)}")
    return 0


def contiguous_strides(size: Sequence[int]) -> list[int]:
    strides = [0] * len(size)
    step = 1
    for d in range(len(size) - 1, -1, -1):
        strides[d] = step
        step *= size[d] if size[d] > 1 else 1
    return strides


def new_contiguous(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return new_tensor(size, contiguous_strides(size), dtype)


def buffer_of(tensor: torch.Tensor) -> tuple[Buffer, int]:
    """A tensor's buffer and its byte offset in it. The address holds both; no storage object is made."""
    address = tensor.data_ptr()
    return open_runtime().buffers[address >> SHIFT], address & OFFSET_MASK


def is_ours(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


# --- the ops every device must have --------------------------------------------------------------------------------


def empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    memory_format: torch.memory_format | None = None,
    **_: Any,
) -> torch.Tensor:
    return _uninitialised(size, _strides(size, memory_format), dtype, device)


def _uninitialised(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype | None, device: torch.device | None
) -> torch.Tensor:
    _check_index(device)
    if dtype is torch.complex32:
        torch.empty(0, dtype=dtype, device="cpu")  # warns that support of it is experimental, once
    made = new_tensor(size, stride, dtype or torch.get_default_dtype())
    return made if not _deterministic() else _filled(made)


_deterministic = torch.are_deterministic_algorithms_enabled


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    """In deterministic mode new memory holds what shows that it was read too early, as on every device of torch's."""
    wanted: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if not wanted or not tensor.numel():
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(math.nan)
    return tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)


def _check_index(wanted: torch.device | None) -> None:
    if wanted is not None and wanted.index:
        raise RuntimeError(
            f"{wanted} does not exist: there is one webgpu device per process, webgpu:0; "
            "ANYTORCH_WEBGPU_ADAPTER chooses which GPU it is"
        )


def _strides(size: Sequence[int], memory_format: torch.memory_format | None) -> Sequence[int]:
    if memory_format in (None, torch.contiguous_format, torch.preserve_format):
        return contiguous_strides(size)
    assert memory_format is not None
    return torch.empty(size, device="meta", memory_format=memory_format).stride()


def empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> torch.Tensor:
    if len(size) != len(stride):
        raise RuntimeError(
            f"mismatch in length of strides and shape: dimensionality of sizes ({len(size)}) must match dimensionality of "
            f"strides ({len(stride)})"
        )
    if min(stride, default=0) < 0:
        raise RuntimeError(f"negative strides are not supported at the moment, got strides: {list(stride)}")
    return _uninitialised(size, stride, dtype, device)


def resize(tensor: torch.Tensor, size: Sequence[int], memory_format: torch.memory_format | None = None) -> torch.Tensor:
    if memory_format is None and tensor.shape == torch.Size(size):  # a view keeps its strides, as on every device
        return tensor
    stride = _strides(size, memory_format)
    elements = math.prod(size)
    needed = int((elements + tensor.storage_offset()) * tensor.dtype.itemsize) if elements else 0
    storage = tensor.untyped_storage()
    held = storage.nbytes() // tensor.dtype.itemsize
    if needed > storage.nbytes():
        grown = new_storage(needed)
        if storage.nbytes():
            runtime = open_runtime()
            old = runtime.buffers[storage.data_ptr() >> SHIFT]
            new = runtime.buffers[grown.data_ptr() >> SHIFT]
            runtime.copy(old, 0, new, 0, min(-(-storage.nbytes() // 4) * 4, new.nbytes))
        storage = grown
    result: torch.Tensor = laid_out(tensor, storage, tensor.storage_offset(), size, stride)
    fresh = elements + tensor.storage_offset() - held
    if fresh > 0 and elements and _deterministic():
        _filled(result.as_strided((fresh,), (1,), held))
    return result


VIEWS = ("as_strided", "view", "_reshape_alias", "unfold", "view_as_real", "view_as_complex")


def register(library: torch.library.Library) -> None:
    kernels: dict[str, Callable[..., Any]] = {
        **{name: on_cpu(getattr(aten, name).default) for name in VIEWS},
        "set_.source_Storage_storage_offset": laid_out,
        "set_.source_Storage": lambda t, held: laid_out(t, held, 0, (held.nbytes() // t.dtype.itemsize,), (1,)),
        "set_.source_Tensor": lambda t, u: laid_out(t, u.untyped_storage(), u.storage_offset(), u.size(), u.stride()),
        "set_": lambda t: laid_out(t, new_storage(0), 0, (0,), (1,)),
        "empty.memory_format": empty,
        "empty_strided": empty_strided,
        "resize_": resize,
    }
    for name, kernel in kernels.items():
        library.impl(name, kernel, KEY)
    _patch_storage_constructor()


def _patch_storage_constructor() -> None:
    """torch.UntypedStorage(n, device="webgpu") would crash: no C++ allocator is registered for the device.

    deepcopy, torch.load and storage.to() use it.
    """
    original: Any = torch.UntypedStorage.__new__

    def construct(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None and torch.device(device).type == NAME:
            if args and not isinstance(args[0], int):  # a sequence of bytes
                return torch.tensor(list(args[0]), dtype=torch.uint8).to(NAME).untyped_storage()
            return new_storage(args[0] if args else 0)
        return original(cls, *args, **kwargs) if device is None else original(cls, *args, device=device, **kwargs)

    torch.UntypedStorage.__new__ = construct  # type: ignore[method-assign]
