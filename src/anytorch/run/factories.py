"""Functions that make tensors on a device, and `torch.device` and `torch.Generator` themselves.

The functions are wrapped for the report, for numbers as devices, and for `pin_memory=True`. Whatever asks torch for
memory on "cuda" by another way, in C++ too, ends at the dispatcher's CUDA key, where our `empty` stands.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

from anytorch.run.ledger import Ledger
from anytorch.run.patches import Patches
from anytorch.run.place import HOST, NAME, Device, Place
from anytorch.run.tensors import Marks, program_asks

MAKERS = [
    "empty",
    "empty_permuted",
    "empty_strided",
    "ones",
    "zeros",
    "full",
    "arange",
    "range",
    "eye",
    "linspace",
    "logspace",
    "rand",
    "randn",
    "randint",
    "randperm",
    "tensor",
    "asarray",
    "scalar_tensor",
    "tril_indices",
    "triu_indices",
    "bartlett_window",
    "blackman_window",
    "hamming_window",
    "hann_window",
    "kaiser_window",
    "sparse_coo_tensor",
    "sparse_csr_tensor",
    "sparse_compressed_tensor",
    "normal",
]
LIKE = ["as_tensor", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"]
METHODS = ["new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided"]
FREQUENCIES = ("fftfreq", "rfftfreq")


def install(patches: Patches, place: Place, ledger: Ledger, marks: Marks) -> None:
    _device_constructors()  # it remembers torch's own functions: before ours are in their places
    builtins: Any = torch.jit._builtins._get_builtin_table()
    for owner, names, where in (
        (torch, MAKERS, "torch."),
        (torch, LIKE, "torch."),
        (torch.fft, FREQUENCIES, "torch.fft."),
        (torch.Tensor, METHODS, "."),
    ):
        for name in names:
            plain = getattr(owner, name)
            wrapped = _wrap(plain, f'{where}{name}(device="cuda")', place, ledger, marks, fresh=names is MAKERS)
            patches.set(owner, name, wrapped)
            if id(plain) in builtins:  # so that TorchScript goes on knowing the function
                patches.set_item(builtins, id(wrapped), builtins[id(plain)])
    _install_kernels(patches, place, ledger)
    _install_classes(patches, place, ledger)


def _wrap(plain: Any, label: str, place: Place, ledger: Ledger, marks: Marks, *, fresh: bool) -> Callable[..., Any]:
    of, host, redirect = place.of, place.host, ledger.redirect
    pins = not host and hasattr(place.module, "Stream")
    modes: Any = torch._C._len_torch_function_stack
    plain_device, on_host = torch._C.TensorBase.device.__get__, Device(HOST)
    compiling = torch.compiler.is_compiling  # notes and frames are nothing for torch's compilers

    @functools.wraps(plain)
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None:
            real = of(device)
            if real is not None:
                kwargs["device"] = real
                if compiling():
                    return plain(*args, **kwargs)
                redirect(label)
                made = plain(*args, **kwargs)
                return marks.moved.add(made) if host and type(made) is torch.Tensor else made
        pinned = kwargs.get("pin_memory") and not pins
        if pinned:
            ledger.ignore("pin_memory=True")
            kwargs["pin_memory"] = False
        made = plain(*args, **kwargs)
        if pinned:
            marks.pinned.add(made)
        if (
            host
            and (fresh or device is not None)
            and not compiling()
            and program_asks(2)
            and type(made) is torch.Tensor
        ):
            if device is not None:
                is_host = plain_device(made) == on_host
            else:
                is_host = not (marks.default_is_cuda() if modes() else marks.by_default)
            if is_host:
                marks.on_host.add(made)
        return made

    return make


def _install_kernels(patches: Patches, place: Place, ledger: Ledger) -> None:
    """`empty` for the dispatcher's CUDA key: every way to a CUDA tensor that is not wrapped ends here."""
    library = torch.library.Library("aten", "IMPL")
    patches.at_the_end(library._destroy)
    empty, strided = torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default

    def empty_here(
        size: Any,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        memory_format: Any = None,
    ) -> torch.Tensor:
        ledger.redirect("memory on cuda, asked for inside torch")
        made: torch.Tensor = empty(
            size,
            dtype=dtype,
            layout=layout,
            device=place.real(device.index if device else None),
            memory_format=memory_format,
        )
        return made

    def strided_here(
        size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
    ) -> torch.Tensor:
        ledger.redirect("memory on cuda, asked for inside torch")
        made: torch.Tensor = strided(
            size, stride, dtype=dtype, layout=layout, device=place.real(device.index if device else None)
        )
        return made

    allow: dict[str, Any] = {}
    if "allow_override" in inspect.signature(library.impl).parameters:
        allow["allow_override"] = True  # a build with CUDA has its own, for cards that are not used here
    with warnings.catch_warnings():  # it says that there was another, which is meant
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
        library.impl("empty.memory_format", empty_here, NAME.upper(), **allow)
        library.impl("empty_strided", strided_here, NAME.upper(), **allow)


def _install_classes(patches: Patches, place: Place, ledger: Ledger) -> None:
    """`torch.device(0)`, `torch.Generator("cuda")`, `torch.Stream(device="cuda")`. None of these classes can be given other
    contents, so the program gets a class of ours in its place, which makes nothing but real ones (or torch.cuda's) and calls
    every real one its instance. torch's own code, which keeps tables by these classes and compares types, gets the real
    class: the module's `__getattr__` sees who asks.
    """
    plain_generator: Any = torch.Generator
    streams = all(place.has(name) for name in ("Stream", "Event", "stream", "current_stream"))

    class InPlaceOf(type):
        """The class of a class that stands in another's place, `plain`."""

        plain: Any

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, cls.plain)

        def __subclasscheck__(cls, other: Any) -> bool:
            return other is cls or issubclass(other, cls.plain)

        def __eq__(cls, other: object) -> bool:  # type(x) == torch.device
            return other is cls or other is cls.plain

        def __hash__(cls) -> int:
            return hash(cls.plain)

    class OfDevices(InPlaceOf):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and args[0].__class__ is int and not kwargs:
                return Device(NAME, args[0])
            return Device(*args, **kwargs)

    class OfGenerators(InPlaceOf):
        def __call__(cls, device: Any = "cpu") -> Any:
            real = place.of(device)
            if real is None:
                return plain_generator(device)
            ledger.redirect('torch.Generator("cuda")')
            try:
                return plain_generator(real)
            except RuntimeError:  # a device written in Python has none of its own, and takes the CPU's
                return plain_generator()

    class OfStreams(InPlaceOf):
        """torch.Stream and torch.Event: those of torch.cuda, which are ours where the device has none."""

        def __call__(cls, device: Any = None, *args: Any, **kwargs: Any) -> Any:
            real = place.of(device)
            if not kwargs.keys().isdisjoint(("stream_id", "device_type")) or (device is not None and real is None):
                return cls.plain(device, *args, **kwargs) if device is not None else cls.plain(*args, **kwargs)
            ledger.redirect(f"torch.{cls.__name__}()")
            if streams:
                return cls.plain(real or place.real(), *args, **kwargs)
            named: Any = getattr(torch.cuda, cls.__name__)
            return named(device, *args, **kwargs) if cls.__name__ == "Stream" else named(*args, **kwargs)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, (cls.plain, getattr(torch.cuda, cls.__name__)))

    plain_streams: Any = {"Stream": torch.Stream, "Event": torch.Event}
    shown: dict[str, tuple[Any, Any]] = {
        **{
            name: (OfStreams(name, (), {"__module__": "torch", "plain": plain}), plain)
            for name, plain in plain_streams.items()
        },
        "Generator": (
            OfGenerators("Generator", (), {"__module__": "torch", "plain": plain_generator}),
            plain_generator,
        ),
        "device": (OfDevices("device", (), {"__module__": "torch", "plain": Device}), Device),
    }
    builtins: Any = torch.jit._builtins._get_builtin_table()
    plain_getattr: Any = vars(torch)["__getattr__"]

    def answer(name: str) -> Any:
        found = shown.get(name)
        if found is None:
            with warnings.catch_warnings():  # torch.has_cuda & co.: torch silences its own uses by the calling module
                warnings.filterwarnings("ignore", ".*is deprecated, please use", UserWarning)
                return plain_getattr(name)
        return found[0] if program_asks(2) else found[1]

    patches.set(torch, "__getattr__", answer)
    for name, (ours, plain) in shown.items():
        patches.remove(torch, name)
        if id(plain) in builtins:
            patches.set_item(builtins, id(ours), builtins[id(plain)])
