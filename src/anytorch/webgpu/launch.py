"""Between torch's tensors and the one launch path (`gpu.launch`): what every family of kernels shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import Parameter

from anytorch.gpu.buffers import SHIFT
from anytorch.gpu.launch import Kernel, Plan, grid, plan_of
from anytorch.gpu.plans import plans
from anytorch.webgpu.tensors import NAME, contiguous_strides, sized_tensor, storage_nbytes


class NoKernel(Exception):
    """Raised by a kernel that cannot compute these arguments: the op runs on the CPU (`kernels.register_kernels`)."""


META = torch.device("meta")
Result = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int]


def check_devices(op: Any, *tensors: torch.Tensor | None) -> None:
    """Raise if a tensor is on another device: kernels in Python get no check from torch. A CPU scalar may come along."""
    for tensor in tensors:
        if tensor is not None and tensor.device.type != NAME and tensor.dim():
            raise elsewhere(op, "a tensor", tensor)


def elsewhere(op: Any, name: str, tensor: torch.Tensor) -> RuntimeError:
    """The error of an argument on another device. It begins as torch's does, which programs look for."""
    return RuntimeError(
        f"Expected all tensors to be on the same device, but got {name} is on {tensor.device}, different from other tensors "
        f"on {NAME}:0 (in {op}); move it with .to('{NAME}')"
    )


def expanded(tensor: torch.Tensor) -> bool:
    """Whether it has several elements in one place, along a dimension without steps."""
    return any(length > 1 and not step for length, step in zip(tensor.size(), tensor.stride(), strict=True))


def once(tensor: torch.Tensor) -> torch.Tensor:
    """Each place of an expanded tensor's memory once."""
    for d, (length, step) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)):
        if length > 1 and not step:
            tensor = tensor.narrow(d, 0, 1)
    return tensor


def check_writable(tensor: torch.Tensor) -> None:
    """Raise torch's own error where a tensor that is to be written is an expanded one."""
    if expanded(tensor):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


_dense = torch.ops.aten.is_non_overlapping_and_dense


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors' spans of memory overlap."""
    if one.data_ptr() >> SHIFT != other.data_ptr() >> SHIFT:
        return False  # nearly always: tensors of different buffers
    if not (one.device.type == other.device.type == NAME and one.numel() and other.numel()):
        return False
    first, second = ((t.data_ptr(), storage_nbytes(t.size(), t.stride(), t.dtype)) for t in (one, other))
    return first[0] < sum(second) and second[0] < sum(first)


def check_apart(target: torch.Tensor, *read: torch.Tensor | None) -> None:
    """Raise torch's own error where a tensor that is to be written shares memory with one that is read. As in torch, tensors
    with gaps are let through: whether their elements meet is hard to say."""
    shared = [tensor for tensor in read if tensor is not None and overlap(target, tensor)]
    if shared and any(_dense(tensor) for tensor in shared) and _dense(target):
        raise RuntimeError(
            "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory "
            "location. Please clone() the tensor before performing the operation."
        )


def check_partly(target: torch.Tensor, read: Sequence[Any]) -> None:
    """`check_apart` for ops that go from element to element: they may read just what they write, but no other part of it."""
    for tensor in read:
        if isinstance(tensor, torch.Tensor) and not (
            tensor.data_ptr() == target.data_ptr()
            and tensor.size() == target.size()
            and tensor.stride() == target.stride()
        ):
            check_apart(target, tensor)


def result_of(size: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> Result:
    """A plan's `result`: what it takes to make a new tensor of this geometry; contiguous unless told otherwise."""
    strides = tuple(contiguous_strides(size) if stride is None else stride)
    return tuple(size), strides, dtype, storage_nbytes(size, strides, dtype)


def made_by(plan: Plan, addresses: Sequence[int], *more: int) -> torch.Tensor:
    """Launch a plan into its result, a new tensor; `more` are the addresses of what it binds after that."""
    made = sized_tensor(*plan.result)
    plan((*addresses, made.data_ptr(), *more))
    return made


def launch(
    kernel: Kernel,
    render: Callable[[Kernel], str],
    tensors: Sequence[torch.Tensor],
    groups: int,
    *,
    placed: int = 1,
    writable: int | None = None,
    head: tuple[int | float, ...] = (),
    tail: tuple[int | float, ...] = (),
    site: int = 0,
) -> None:
    """Run a kernel that its own numbers describe. It is told the places of the first `placed` tensors and, unless told
    otherwise, writes the others, which start their buffers. `site` is the op's number if it reports (`faults`)."""
    key = (kernel, head, tail, site)
    plan = plans[key]
    if plan is None:
        if writable is None:
            writable = ((1 << len(tensors)) - 1) & -(1 << placed)
        places = [tensor.dtype.itemsize for tensor in tensors[:placed]]
        unplaced = len(tensors) - placed
        plan = plans[key] = plan_of(
            kernel, render, grid(groups), places, writable, unplaced=unplaced, head=head, tail=tail, site=site
        )
    plan([tensor.data_ptr() for tensor in tensors])


def plan_over(
    count: int,
    kernel: Kernel,
    render: Callable[[Kernel], str],
    places: Sequence[int],
    writable: int,
    workgroup: int,
    per_thread: int = 1,
    **more: Any,
) -> Plan:
    """The plan of a kernel whose threads share `count` elements: it is told how many there are, and how many threads a row
    of workgroups has."""
    x, y = grid(-(-count // (per_thread * workgroup)))
    return plan_of(kernel, render, (x, y), places, writable, head=(count, x * workgroup), **more)


def to_meta(value: Any) -> Any:
    """A tensor's shape without its data; CPU scalars keep their place in type promotion by being meta scalars too."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META)
    return [to_meta(item) for item in value] if isinstance(value, list) else value


def infer(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What `op` returns for these arguments, as meta tensors: sizes, strides and dtypes by torch's own meta kernels, which
    also raise torch's own errors."""
    named = [(name, _mark(value)) for name, value in kwargs.items()]
    key = (op, torch.get_default_dtype(), *[_mark(value) for value in args], *named)  # what integers may become
    made = plans[key]
    if made is None:
        try:
            made = op(*[to_meta(v) for v in args], **{name: to_meta(v) for name, v in kwargs.items()})
        except (RuntimeError, ValueError, IndexError):
            let_the_cpu_refuse(op, args, kwargs)
            raise
        plans[key] = made
    return made


FEW = 1 << 22  # elements: more are not made on the CPU for the sake of an error's words


def let_the_cpu_refuse(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise what the CPU raises for tensors like these, of zeros; return if it takes them. Called before an error of our own
    or of torch's meta kernels, some of which word it in their own way: what programs match is the CPU's."""

    def on_host(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu").zero_()
        return [on_host(item) for item in value] if isinstance(value, (list, tuple)) else value

    values = (*args, *kwargs.values())
    tensors = [t for value in values for t in (value if isinstance(value, (list, tuple)) else (value,))]
    if sum(t.numel() for t in tensors if isinstance(t, torch.Tensor)) <= FEW:
        op(*[on_host(value) for value in args], **{name: on_host(value) for name, value in kwargs.items()})


def without_elements(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What `op` makes of a tensor without elements, which is the CPU's to say: there is nothing to compute, or an error."""

    def on_host(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")

    made = op(*[on_host(v) for v in args], **{name: on_host(v) for name, v in kwargs.items()})
    return made.to(NAME) if isinstance(made, torch.Tensor) else tuple(value.to(NAME) for value in made)


def _mark(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.size(), value.stride()
    return tuple([_mark(item) for item in value]) if isinstance(value, (list, tuple)) else (type(value), value)


# --- when an op may be computed at once instead of being taken apart into ops that autograd and others know ------------

_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_grad = torch.is_grad_enabled


def unwatched(*tensors: torch.Tensor | None) -> bool:
    """True if no gradient is wanted, and no mode, transform or tensor subclass must see the ops this one is made of.

    Nor is any a lazily negated view: an op registered above autograd gets those as they are.
    """
    if _modes() or forward_ad._current_level >= 0 or _transform() is not None:
        return False
    grad = _grad()
    for tensor in tensors:
        if tensor is not None:
            kind = type(tensor)
            if (
                (grad and tensor.requires_grad)
                or tensor.is_neg()
                or (kind is not torch.Tensor and kind is not Parameter)
            ):
                return False
    return True
