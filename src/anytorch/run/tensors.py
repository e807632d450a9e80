"""Tensors: moving them to "cuda", and what they say about where they are.

The program sees a CUDA device; torch's own code and ours see the real one. So the answers to `x.device`, `x.is_cuda` and
similar attributes depend on the caller: a frame of a module of torch's or ours gets the truth.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from typing import Any

import torch
from torch.utils._device import DeviceContext

from anytorch.run.ledger import INSIDE, Ledger
from anytorch.run.patches import Patches
from anytorch.run.place import HOST, NAME, Device, Place

SWEPT = 1024  # marks before those of gone tensors are looked for
PLAIN = (torch.Tensor, torch.nn.Parameter)
TENSOR_TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}


class Marked:
    """Tensors of which something is known that torch does not know. They are not kept alive, and not changed."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}
        self._limit = SWEPT

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._known
        known[id(tensor)] = weakref.ref(tensor)  # without a callback, which would cost as much again
        if len(known) > self._limit:
            self._sweep()
        return tensor

    def discard(self, tensor: torch.Tensor) -> None:
        self._known.pop(id(tensor), None)

    def _sweep(self) -> None:
        """Forget tensors that are gone."""
        self._known = {key: known for key, known in self._known.copy().items() if known() is not None}
        self._limit = SWEPT + 2 * len(self._known)

    def __contains__(self, tensor: object) -> bool:
        known = self._known.get(id(tensor))
        return known is not None and known() is tensor


class Marks:
    """Where the CPU stands in for CUDA, both worlds share one memory. These say on which side the program put a tensor."""

    def __init__(self) -> None:
        self.on_host = Marked()  # made without a device, or brought back by .cpu()
        self.moved = Marked()  # by .cuda(), or made with device="cuda"
        self.pinned = Marked()
        self.by_default = False  # tensors made without a device are the program's CUDA tensors

    def default_is_cuda(self) -> bool:
        """The same, where the program may have written `with torch.device("cuda"):` or "cpu"."""
        for mode in reversed(torch.overrides._get_current_function_mode_stack()):
            if isinstance(mode, DeviceContext):
                return bool(getattr(mode, "means_cuda", False))
        return self.by_default


def install(patches: Patches, place: Place, ledger: Ledger, marks: Marks) -> None:
    _install_moves(patches, place, ledger, marks)
    _install_answers(patches, place, marks)
    _install_pins(patches, place, ledger, marks)
    _install_types(patches, place, ledger, marks)


def _install_moves(patches: Patches, place: Place, ledger: Ledger, marks: Marks) -> None:
    plain_to: Any = torch.Tensor.to
    plain_cpu: Any = torch.Tensor.cpu
    of, host, redirect, moved, frame = place.of, place.host, ledger.redirect, marks.moved, sys._getframe

    def moved_here(tensor: torch.Tensor, real: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """To the stand-in's device. Between host and CUDA a move is a copy, which programs rely on, so it is one here."""
        if not host or tensor in moved or type(tensor) not in PLAIN:
            return plain_to(tensor, real, *args, **kwargs)
        name = frame(2).f_globals.get("__name__", "")
        if name.startswith(INSIDE) or name == "torch":
            if tensor in marks.on_host and len(args) < 3:  # a module's buffer, say
                kwargs["copy"] = True
            return plain_to(tensor, real, *args, **kwargs)
        if len(args) < 3:
            kwargs["copy"] = True
        return moved.add(plain_to(tensor, real, *args, **kwargs))

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        where = args[0] if args else kwargs.get("device")
        kind = where.__class__
        if kind is Device or kind is str or kind is int:
            real = of(where)
            if real is not None:
                redirect('.to("cuda")')
                kwargs.pop("device", None)
                return moved_here(self, real, args[1:], kwargs)
            if host and (where == HOST if kind is str else getattr(where, "type", "") == HOST) and program_asks(2):
                return back(self, plain_to(self, *args, **kwargs))
        return plain_to(self, *args, **kwargs)

    def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        real = of(device) if device is not None else place.real()
        if real is None:
            raise RuntimeError(f"Invalid device, must be cuda device, but got {device}")
        redirect(".cuda()")
        return moved_here(self, real, (), {"non_blocking": non_blocking, **kwargs})

    def back(source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """What `.cpu()` gives: on CUDA a copy, which later work on the device leaves alone."""
        if result is source and type(source) in PLAIN and source not in marks.on_host:
            result = source.clone()
        return marks.on_host.add(result)

    def cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = plain_cpu(self, *args, **kwargs)
        return back(self, result) if program_asks(2) else result

    patches.set(torch.Tensor, "to", to)
    patches.set(torch.Tensor, "cuda", cuda)
    if host:
        patches.set(torch.Tensor, "cpu", cpu)
    _install_module_moves(patches, place, marks)


def _install_module_moves(patches: Patches, place: Place, marks: Marks) -> None:
    """Modules move in place, parameters and all. Where the CPU stands in, only these calls say on which side they are."""
    module: Any = torch.nn.Module
    plain_to, plain_cuda, plain_cpu = module.to, module.cuda, module.cpu

    def settle(self: torch.nn.Module, *, on_host: bool) -> torch.nn.Module:
        note: Any = marks.on_host.add if on_host else marks.on_host.discard
        for tensor in (*self.parameters(), *self.buffers()):
            note(tensor)
        return self

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        where = args[0] if args else kwargs.get("device", kwargs.get("tensor"))
        if where.__class__ is int:  # torch reads a number as the accelerator's, and the CPU is none
            where = Device(NAME, where)
            if args:
                args = (where, *args[1:])
            else:
                kwargs["device"] = where
        moved = plain_to(self, *args, **kwargs)
        if not place.host or not program_asks(2):
            return moved
        if isinstance(where, torch.Tensor):
            return settle(moved, on_host=where in marks.on_host)
        if isinstance(where, (str, Device)):
            on_cuda = place.of(where) is not None
            return settle(moved, on_host=not on_cuda) if on_cuda or Device(where).type == HOST else moved
        return moved

    def cuda(self: torch.nn.Module, device: Any = None) -> Any:
        return settle(plain_cuda(self, device), on_host=False)

    def cpu(self: torch.nn.Module) -> Any:
        moved = plain_cpu(self)
        return settle(moved, on_host=True) if program_asks(2) else moved

    patches.set(module, "to", to)
    if place.host:
        patches.set(module, "cuda", cuda)
        patches.set(module, "cpu", cpu)


def program_asks(depth: int) -> bool:
    """True if the frame `depth` above is neither torch's nor ours."""
    name = sys._getframe(depth).f_globals.get("__name__", "")
    return not (name.startswith(INSIDE) or name == "torch")


def _install_answers(patches: Patches, place: Place, marks: Marks) -> None:
    base: Any = torch._C.TensorBase
    plain_device, plain_is_cuda, plain_index = base.device.__get__, base.is_cuda.__get__, torch.Tensor.get_device
    kind, host, shown_of, on_host, frame = place.kind, place.host, place.shown_of, marks.on_host, sys._getframe

    def device(self: torch.Tensor) -> Any:
        real = plain_device(self)
        if real.type != kind:
            return real
        name = frame(1).f_globals.get("__name__", "")
        if name.startswith(INSIDE) or name == "torch" or (host and self in on_host):
            return real
        return shown_of.get(real, real)

    def is_cuda(self: torch.Tensor) -> Any:
        if plain_device(self).type != kind:
            return plain_is_cuda(self)
        name = frame(1).f_globals.get("__name__", "")
        if name.startswith(INSIDE) or name == "torch":
            return plain_is_cuda(self)
        return not (host and self in on_host)

    def get_device(self: torch.Tensor) -> Any:
        real = plain_device(self)
        if real.type != kind or not program_asks(2) or (host and self in on_host):
            return plain_index(self)
        return shown_of[real].index

    patches.set(torch.Tensor, "device", property(device))
    patches.set(torch.Tensor, "is_cuda", property(is_cuda))
    patches.set(torch.Tensor, "get_device", get_device)
    if not host:  # its .cpu() is the host's for certain
        return
    plain_numpy: Any = torch.from_numpy

    def from_numpy(array: Any) -> torch.Tensor:
        return marks.on_host.add(plain_numpy(array))

    patches.set(torch, "from_numpy", from_numpy)


def _install_pins(patches: Patches, place: Place, ledger: Ledger, marks: Marks) -> None:
    """Page-locked memory is torch's own where the device has it (XPU, NPU); elsewhere ordinary memory is as good."""
    if not place.host and hasattr(place.module, "Stream"):
        return
    plain_pinned: Any = torch.Tensor.is_pinned

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        ledger.ignore("pin_memory()")
        return marks.pinned.add(self)

    def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
        return self in marks.pinned or bool(plain_pinned(self))

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        ledger.ignore("record_stream()")

    patches.set(torch.Tensor, "pin_memory", pin_memory)
    patches.set(torch.Tensor, "is_pinned", is_pinned)
    patches.set(torch.Tensor, "record_stream", record_stream)
    loader = torch.utils.data.DataLoader
    plain_init: Any = loader.__init__
    signature = inspect.signature(plain_init)

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)  # pin_memory may be given by its place
        if given.arguments.get("pin_memory"):
            ledger.ignore("DataLoader(pin_memory=True)")
            given.arguments["pin_memory"] = False
        given.arguments.pop("pin_memory_device", None)
        plain_init(*given.args, **given.kwargs)

    patches.set(loader, "__init__", initialise)


class _TensorType(type):
    """The class of torch.cuda.FloatTensor and similar: calling one makes a tensor, isinstance looks at dtype and device."""

    dtype: torch.dtype
    place: Place

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        where = cls.place.real()
        if not args:
            return torch.empty(0, dtype=cls.dtype, device=where)
        if all(isinstance(size, int) for size in args):
            return torch.empty(args, dtype=cls.dtype, device=where)
        if isinstance(args[0], torch.Size):
            return torch.empty(args[0], dtype=cls.dtype, device=where)
        return torch.as_tensor(args[0], dtype=cls.dtype).to(where)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype == cls.dtype and value.device.type == cls.place.kind


def _install_types(patches: Patches, place: Place, ledger: Ledger, marks: Marks) -> None:
    plain_type: Any = torch.Tensor.type
    plain_default: Any = torch.set_default_tensor_type
    made: dict[str, Any] = {}
    for name, dtype in TENSOR_TYPES.items():
        body = {"dtype": dtype, "place": place, "is_cuda": True, "__module__": "torch.cuda"}
        made[name] = _TensorType(name, (), body)
        patches.set(torch.cuda, name, made[name])
    names = {dtype: name for name, dtype in TENSOR_TYPES.items()}

    def cuda_type(wanted: Any) -> Any:
        """One of ours, by itself or by name; None for anything else."""
        if isinstance(wanted, str) and wanted.startswith("torch.cuda."):
            return made.get(wanted.rpartition(".")[2])
        return wanted if isinstance(wanted, _TensorType) else None

    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            told = str(plain_type(self))
            ours = self.device.type == place.kind and self not in marks.on_host and self.dtype in names
            ours = ours and program_asks(2)
            return f"torch.cuda.{names[self.dtype]}" if ours else told
        wanted = cuda_type(dtype)
        if wanted is None:
            return plain_type(self, dtype, non_blocking, **kwargs)
        ledger.redirect(".type(torch.cuda.…Tensor)")
        copied = place.host and self not in marks.moved
        moved: torch.Tensor = self.to(place.real(), wanted.dtype, non_blocking, copied)
        return marks.moved.add(moved) if place.host else moved

    def set_default_tensor_type(kind: Any) -> None:
        wanted = cuda_type(kind)
        if wanted is None:
            torch.set_default_device(None)
            plain_default(kind)
            return
        ledger.redirect("torch.set_default_tensor_type(torch.cuda.…Tensor)")
        torch.set_default_dtype(wanted.dtype)
        torch.set_default_device(NAME)

    patches.set(torch.Tensor, "type", type_)
    patches.set(torch, "set_default_tensor_type", set_default_tensor_type)
