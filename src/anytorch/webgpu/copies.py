"""Copies: host to device, device to host, and on the device with a change of dtype or layout."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch

from anytorch import large_pages
from anytorch.gpu.buffers import OFFSET_MASK, SHIFT
from anytorch.gpu.runtime import open_runtime
from anytorch.webgpu.launch import NoKernel
from anytorch.webgpu.pointwise import COPY, run
from anytorch.webgpu.tensors import NAME, aten, buffer_of, new_contiguous, new_tensor

# From here on a buffer copy (a memcpy) beats a kernel on a software adapter. On a GPU the kernel wins at every size: an H200
# moved 0.83 TB/s by buffer copies and 3.1 TB/s by kernels.
LARGE = 1 << 16


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU copy of a tensor of ours, with the same strides if it has no gaps, else with its dimensions in the same order:
    ops on the CPU choose their result's layout by it. Lazy conjugation and negation are done: the copy holds the values
    that the tensor shows."""
    if tensor.is_conj():
        return to_host(torch._conj(tensor)).conj_physical_()
    if tensor.is_neg():
        return to_host(torch._neg_view(tensor)).neg_()
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    if not aten.is_non_overlapping_and_dense(tensor):
        tensor = on_layout(tensor, torch.empty_like(tensor, device="meta").stride())
    host = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    large_pages.ask(host.data_ptr(), host.nbytes)  # a read waits for page faults more than for the copy
    read_into(tensor, host)
    return host


def read_into(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """Copy a tensor of ours without gaps to a CPU tensor of the same dtype, size and strides."""
    buffer, offset = buffer_of(tensor)
    open_runtime().read(buffer, offset, host.data_ptr(), tensor.numel() * tensor.dtype.itemsize)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor
    dense = new_contiguous(tensor.size(), tensor.dtype)
    on_device(tensor, dense)
    return dense


def narrowed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` in `dtype`, with its strides."""
    return tensor if tensor.dtype is dtype else on_device(tensor, new_tensor(tensor.size(), tensor.stride(), dtype))


def on_layout(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The same values with other strides."""
    return on_device(tensor, new_tensor(tensor.size(), stride, tensor.dtype))


def on_device(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Copy between two tensors of ours; sizes are equal or broadcast."""
    if target.numel() == 0:
        return target
    if source.shape != target.shape:
        source = source.expand(target.shape)
    if torch.complex64 in (source.dtype, target.dtype):
        return _complex(source, target)
    if source.dtype is target.dtype and source.stride() == target.stride() and source.is_contiguous():
        nbytes = source.numel() * source.dtype.itemsize
        runtime = open_runtime()
        first, second = source.data_ptr(), target.data_ptr()
        one, other = runtime.buffers[first >> SHIFT], runtime.buffers[second >> SHIFT]
        whole_words = not (first & 3 or second & 3 or nbytes & 3)
        if one is not other and whole_words and nbytes >= LARGE and runtime.adapter.software:
            runtime.copy(one, first & OFFSET_MASK, other, second & OFFSET_MASK, nbytes)
            return target
    try:
        return run(COPY, aten.copy_.default, (source,), out=target)
    except NoKernel:
        return _through_host(source, target)


def _complex(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A copy with a complex64 at one end: as real tensors with one dimension more."""
    if torch.complex128 in (source.dtype, target.dtype):
        return _through_host(source, target)
    if not target.is_complex():  # the imaginary part is dropped, as torch has warned
        return on_device(torch.view_as_real(source)[..., 0], target)
    pair = torch.view_as_real(target)
    if source.is_complex():
        on_device(torch.view_as_real(source), pair)
    else:
        on_device(source, pair[..., 0])
        pair[..., 1].zero_()
    return target


def _through_host(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """For dtypes no shader knows (complex128, float8): whole storages travel."""
    runtime = open_runtime()

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        host = torch.empty(storage.nbytes(), dtype=torch.uint8)
        runtime.read(runtime.buffers[storage.data_ptr() >> SHIFT], 0, host.data_ptr(), host.numel())
        return host

    def view(host: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        made = torch.empty(0, dtype=like.dtype)
        return made.set_(host.untyped_storage(), like.storage_offset(), like.size(), like.stride())

    held = whole(target)
    view(held, target).copy_(view(whole(source), source))
    storage = target.untyped_storage()
    runtime.write(runtime.buffers[storage.data_ptr() >> SHIFT], 0, held.data_ptr(), held.numel())
    return target


def from_host(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Upload; what is not one dense run of whole words is uploaded beside and copied on the device."""
    if source.shape != target.shape:
        source = source.expand(target.shape)
    source = source.to(target.dtype)
    if target.is_contiguous():
        source = source.contiguous()
        buffer, offset = buffer_of(target)
        nbytes = source.numel() * source.dtype.itemsize
        at_the_end = offset + nbytes == target.untyped_storage().nbytes()
        if offset % 4 == 0 and (nbytes % 4 == 0 or at_the_end):
            open_runtime().write(buffer, offset, source.data_ptr(), nbytes)
            return target
    beside = new_contiguous(target.size(), target.dtype)
    from_host(source, beside)
    return on_device(beside, target)


def copy_from(source: torch.Tensor | complex, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """aten::_copy_from. Neither tensor is on a third device: torch goes through the CPU then."""
    if not isinstance(source, torch.Tensor):  # `x.copy_(1.5)`: a wrapped number reaches Python kernels as a plain one
        return target.fill_(source)
    if source.numel() == 0:
        return target
    if source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg():
        return _copy_lazy_bits(source, target)
    if source.device.type == "cpu":
        return from_host(source, target)
    if target.device.type == "cpu":
        alike = source.dtype is target.dtype and source.size() == target.size() and source.stride() == target.stride()
        if alike and source.is_contiguous():
            read_into(source, target)
        else:
            target.copy_(to_host(source))
        return target
    if source.device.type == NAME and target.device.type == NAME:
        return on_device(source, target)
    return target.copy_(to_host(source) if source.device.type == NAME else source.cpu())


def _copy_lazy_bits(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Conjugated and negated views carry a bit instead of changed values; both ends are resolved on the host."""
    host = source.resolve_conj().resolve_neg() if source.device.type == "cpu" else to_host(source)
    values = host.to(target.dtype)
    if target.device.type == "cpu":
        return target.copy_(values)
    plain = target
    while plain.is_conj() or plain.is_neg():
        if plain.is_conj():
            values, plain = values.conj_physical(), torch._conj(plain)
        else:
            values, plain = values.neg(), torch._neg_view(plain)
    from_host(values.expand(target.shape).contiguous(), plain)
    return target


def copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if target.shape != source.shape:
        target.resize_(source.shape)
    return target.copy_(source)


# How `struct` reads one element, which takes a fraction of the time of a tensor on the host.
_CODES = {
    torch.float32: "f",
    torch.float64: "d",
    torch.float16: "e",
    torch.bool: "?",
    torch.uint8: "B",
    torch.int64: "q",
    torch.int32: "i",
    torch.int16: "h",
    torch.int8: "b",
}


def item(tensor: torch.Tensor) -> Any:
    buffer, offset = buffer_of(tensor)
    dtype = tensor.dtype
    code = _CODES.get(dtype)
    if code is not None and not tensor.is_neg():
        return struct.unpack(code, open_runtime().read_few(buffer, offset, dtype.itemsize))[0]
    held = torch.empty((), dtype=dtype)
    open_runtime().read(buffer, offset, held.data_ptr(), dtype.itemsize)
    value = held.item()
    if tensor.is_neg():
        value = -value
    return value.conjugate() if tensor.is_conj() else value


def register(library: torch.library.Library) -> None:
    library.impl("_copy_from", copy_from, "PrivateUse1")
    library.impl("_copy_from_and_resize", copy_from_and_resize, "PrivateUse1")
    library.impl("_local_scalar_dense", item, "PrivateUse1")
    # copy_ falls through these keys, but _copy_from would not: its fallback clones, which calls copy_, and so on for ever.
    for key in ("Conjugate", "Negative"):
        library.impl("_copy_from", torch.library.fallthrough_kernel, key)
