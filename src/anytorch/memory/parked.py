"""A Parameter whose values are elsewhere: the right shape, dtype and device, no memory, and an error for every use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from anytorch.errors import UsageError

# What may be asked of a parameter that is not there. Everything else would compute with values it has not got.
DESCRIBING = frozenset(
    """shape dtype device layout requires_grad grad data ndim is_leaf grad_fn names itemsize nbytes is_cpu is_meta is_sparse
    is_quantized is_nested is_cuda is_mps is_xpu is_sparse_csr is_mkldnn is_mtia retains_grad _version _backward_hooks _base
    _grad _post_accumulate_grad_hooks output_nr volatile name""".split()  # noqa: SIM905
)
# `grad` and `backward` are torch.autograd's functions: they ask for the parameter, not for its values.
ALLOWED = frozenset(
    """size dim numel nelement ndimension stride storage_offset element_size is_contiguous get_device is_floating_point
    is_complex is_signed requires_grad_ __hash__ __len__ is_inference type is_pinned has_names register_hook data_ptr
    register_post_accumulate_grad_hook untyped_storage is_shared is_tensor is_same_size is_conj is_neg
    grad backward""".split()  # noqa: SIM905
)


def described(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None, *, gone: bool = False
) -> Any:
    """Answer what can be known without the values. Raises UsageError for everything else."""
    if not describes(func):
        if gone:
            raise UsageError(
                f"{function_name(func)} was called on a weight that was freed when its fitted model was closed",
                hint="load_state_dict(…, assign=True) gives the model weights again; unfit(model) before closing keeps them",
            )
        raise UsageError(
            f"{function_name(func)} was called on a weight whose values are on another memory level",
            hint="use it inside the forward of its module, or read it through state_dict(); "
            "resident=[…] keeps a module's weights on the device, unfit(model) brings all of them back",
        )
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


class _Away:
    """What a parameter or buffer is while its values are elsewhere: made by changing its class, and undone the same way."""

    GONE = False  # for good: its fitted model was closed

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return described(func, args, kwargs, gone=cls.GONE)

    def __repr__(self: Any, *, tensor_contents: Any = None) -> str:  # type: ignore[override,unused-ignore]
        what = "Parameter" if isinstance(self, nn.Parameter) else "Buffer"
        return f"{what} of shape {tuple(self.shape)}, {self.dtype}: its values are on another memory level"


class Parked(_Away, nn.Parameter):  # type: ignore[misc]
    """It stays the same object."""


class ParkedBuffer(_Away, torch.Tensor):  # type: ignore[misc]
    """The codes of a packed layer."""


class Gone(Parked):
    GONE = True


class GoneBuffer(ParkedBuffer):
    GONE = True


PARKED = (Parked, ParkedBuffer)


def function_name(func: Callable[..., Any]) -> str:
    owner = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__") and owner is not None:
        return str(getattr(owner, "__name__", owner))
    return str(getattr(func, "__name__", func))


def describes(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return function_name(func) in DESCRIBING
    return name in ALLOWED


def park(parameter: torch.Tensor, device: torch.device) -> None:
    """Let go of a parameter's or buffer's memory. NaN is what a use that no check catches would compute with."""
    with torch.inference_mode(False), torch.no_grad():
        if isinstance(parameter, PARKED):
            return
        parameter.data = placeholder(tuple(parameter.shape), parameter.dtype, device)
    parameter.__class__ = Parked if isinstance(parameter, nn.Parameter) else ParkedBuffer


def give_up(parameter: torch.Tensor) -> None:
    """Mark a parked parameter's values as lost, so that using it raises."""
    parameter.__class__ = Gone if isinstance(parameter, nn.Parameter) else GoneBuffer


def wake(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Point a parameter at its values. Its class comes first: the other way round a reader could see Parked values."""
    parameter.__class__ = nn.Parameter if isinstance(parameter, nn.Parameter) else torch.Tensor
    parameter.data = values


_seeds: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def placeholder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One element, seen as a whole tensor."""
    key = (dtype, device)
    if key not in _seeds:
        floating = dtype.is_floating_point or dtype.is_complex
        one = torch.zeros((), dtype=torch.float32 if floating else dtype, device="cpu")
        _seeds[key] = (one.fill_(float("nan")).to(dtype) if floating else one).to(device)
    return _seeds[key].expand(shape)
