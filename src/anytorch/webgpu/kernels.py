"""From a rule or a functional kernel to registered kernels: an op's functional, in-place and `out=` forms share one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from anytorch.webgpu import accelerator
from anytorch.webgpu.dtypes import cannot_cast, spoken
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.launch import NoKernel, to_meta
from anytorch.webgpu.oversize import halving
from anytorch.webgpu.pointwise import Rule, pair_kernel, plan_in_cpp, run
from anytorch.webgpu.tensors import KEY, NAME, aten, laid_out


def op_of(name: str, *otherwise: Any) -> Any:
    """The overload a name means: "add.Tensor", or "neg" for its default. `otherwise`: what to return if there is none."""
    base, _, overload = name.partition(".")
    return getattr(getattr(aten, base, *otherwise), overload or "default", *otherwise)


def resized(out: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Give an `out=` tensor the right size, as torch does (with its warning if it was not empty)."""
    if out.shape != torch.Size(size):
        torch._prims_common.wrappers._maybe_resize_out(out, torch.Size(size))
    return out


def into(out: torch.Tensor | None, made: torch.Tensor) -> torch.Tensor:
    """What an `out=` form does with its functional form's result; without an `out`, the result itself."""
    if out is None:
        return made
    if out.device.type != NAME:
        raise RuntimeError(
            f"Expected out tensor to be on the same device as the arguments, {NAME}, but it is on {out.device}"
        )
    if not torch.can_cast(made.dtype, out.dtype):
        raise cannot_cast(made.dtype, out.dtype)
    return resized(out, made.shape).copy_(made)


def with_out(kernel: Callable[..., Any], outs: Sequence[str], name: str = "") -> Callable[..., Any]:
    """The `out=` form of a kernel: computed beside, then copied into the arguments named `outs`. `name`: the overload's,
    which decides what dtypes those may have."""
    typed, truth = (name.partition(".")[0] in ops for ops in (TYPED_BY_OUT, TRUTHS))

    def written(*args: Any, **kwargs: Any) -> Any:
        targets = [kwargs.pop(out) for out in outs]
        if typed and kwargs.get("dtype") is None:
            kwargs["dtype"] = targets[0].dtype
        made = kernel(*args, **kwargs)
        pairs = list(zip(targets, [made] if len(targets) == 1 else made, strict=True))
        for out, (target, value) in zip(outs, pairs, strict=True):  # all of them before any is written
            _check_out(name, out, value.dtype, target.dtype)
        for target, value in pairs:
            into(target, value.to(target.dtype) if truth else value)
        return targets[0] if len(targets) == 1 else tuple(targets)

    return written


def _check_out(name: str, out: str, made: torch.dtype, target: torch.dtype) -> None:
    if name in EXACT and target is not made:
        raise RuntimeError(EXACT[name].format(made=spoken(made), target=spoken(target), out=out))
    op = name.partition(".")[0]
    if op in TRUTHS and target not in (torch.bool, torch.uint8):
        raise RuntimeError(f"{op} only supports bool tensor for result, got: {spoken(target)}")


# What the dtype of an `out=` tensor means to some ops; the others put into it what can be cast to it.
TYPED_BY_OUT = ("sum", "nansum", "prod", "cumsum", "cumprod")  # the one to compute in, if no other is asked for
EXACT = {  # it is the result's own, or this error
    **dict.fromkeys(
        (
            *("max.dim", "min.dim", "amax", "amin", "aminmax", "argmax", "argmin"),
            *("sort.stable", "topk", "kthvalue", "median.dim", "nanmedian.dim"),
        ),
        "Expected out tensor to have dtype {made}, but got {target} instead",
    ),
    "mode": "expected scalar type '{made}' but got '{target}' for {out} output",
}
TRUTHS = ("all", "any")  # bool or uint8, whatever the result's own is


def in_place(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The in-place form of a kernel: computed beside, then copied over its first argument."""

    def changed(first: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return first.copy_(kernel(first, *args, **kwargs))

    return changed


def out_forms(op: Any) -> list[tuple[Any, list[str]]]:
    """The `out=` overloads of a functional op, with the names of their outputs."""
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    found = []
    for name in op.overloadpacket.overloads():
        candidate = getattr(op.overloadpacket, name)
        arguments = candidate._schema.arguments
        outs = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        rest = [(a.name, str(a.type)) for a in arguments if a.name not in outs]
        if outs and rest == wanted and len(outs) == len(op._schema.returns):
            found.append((candidate, outs))
    return found


def variants(op: Any) -> list[Any]:
    """The in-place overload of a functional op, if there is one, and its `out=` overloads with one output."""
    packet = getattr(aten, op._schema.name.split("::")[1] + "_", None)
    named = getattr(packet, op._overloadname, None) if packet is not None else None
    # pow.Scalar has a number for its base, pow_.Scalar for its exponent
    found = [named] if named is not None and _types(named) == _types(op) else []
    return found + [form for form, outs in out_forms(op) if len(outs) == 1]


def _types(op: Any) -> list[str]:
    return [str(argument.type) for argument in op._schema.arguments]


def is_operand(argument: Any) -> bool:
    return str(argument.type) in ("Tensor", "number", "Optional[number]", "Optional[Tensor]") and not (
        argument.kwarg_only and argument.alias_info is not None
    )


def _broadcast(values: Sequence[Any]) -> torch.Size | None:
    """The shape of what is computed from the tensors among the values; None if their shapes do not fit."""
    try:
        shape: torch.Size = torch.broadcast_shapes(*[v.shape for v in values if isinstance(v, torch.Tensor)])
    except RuntimeError:
        return None
    return shape


def refused(call: Any, args: Sequence[Any], kwargs: dict[str, Any], shaped: bool) -> None:
    """Raise what torch raises on the CPU for these dtypes and numbers, which meta kernels let through: True as an alpha, the
    difference of two masks. Asked with tensors that have no elements, so it costs a call and nothing else; where the shapes
    do not fit (`shaped`) with tensors of these, for torch's own words: nothing is computed then."""

    def without_elements(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if shaped:
            return torch.empty(value.shape, dtype=value.dtype, device="cpu")
        shape = (*(1,) * (value.dim() - 1), 0) if value.dim() else ()
        return torch.ones(shape, dtype=value.dtype, device="cpu")

    try:
        call(*[without_elements(v) for v in args], **{name: without_elements(v) for name, v in kwargs.items()})
    except NotImplementedError:  # the CPU lacks the dtype, not the op a meaning
        return


# The largest number that the CPU puts into each dtype; of small integers, into each of them. float64 holds all.
LARGEST = {
    **{dtype: torch.finfo(dtype).max for dtype in (torch.float16, torch.bfloat16, torch.float32)},
    torch.float64: float("inf"),
    **dict.fromkeys((torch.int8, torch.uint8, torch.int16), 127),
    torch.int32: (1 << 31) - 1,
    torch.int64: (1 << 63) - 1,
}


def refused_beyond(op: Any, tensor: torch.Tensor, numbers: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise what torch raises on the CPU for numbers that the tensor's dtype cannot hold. Asked at every call that has such
    numbers: a plan, which asks when it is made, serves all numbers of a type."""
    largest = LARGEST.get(tensor.dtype, 65504.0)
    if any(isinstance(value, (int, float)) and not -largest <= value <= largest for value in numbers):
        # The packet, as a number may stand in a tensor's place.
        refused(op.overloadpacket, (tensor, *numbers), kwargs, shaped=False)


def pointwise_kernel(op: Any, rule: Rule) -> Callable[..., Any]:
    """A kernel for one overload of an elementwise op."""
    arguments = op._schema.arguments
    names = [a.name for a in arguments]
    operand_at = [i for i, a in enumerate(arguments) if is_operand(a)]
    mode_at = [i for i in range(len(arguments)) if i not in operand_at]
    defaults = [a.default_value if a.has_default_value() else None for a in arguments]
    out_at = next((i for i, a in enumerate(arguments) if a.kwarg_only and a.alias_info is not None), None)
    if out_at is not None:
        mode_at.remove(out_at)
    in_place = out_at is None and arguments[0].alias_info is not None and arguments[0].alias_info.is_write
    simple = not mode_at and out_at is None

    tensor_at = [i for i, a in enumerate(arguments) if str(a.type) == "Tensor"]
    least = len(names) - 1 if rule.short is not None else len(names)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        def on_meta() -> Any:
            # A wrapped number arrives as a plain one even where the schema says Tensor, and only some ops take it back so:
            # the packet finds the overload for numbers, which promotes alike.
            wrapped = any(i < len(args) and not isinstance(args[i], torch.Tensor) for i in tensor_at)
            call = op.overloadpacket if wrapped else op
            shape = _broadcast((*args, *kwargs.values()))
            refused(call, args, kwargs, shaped=shape is None or (in_place and shape != args[0].shape))
            if any(isinstance(v, torch.Tensor) and v.is_complex() for v in args):
                return None  # no shader's; and meta kernels refuse what the CPU takes: abs of complex numbers into such
            return call(*[to_meta(v) for v in args], **{name: to_meta(v) for name, v in kwargs.items()})

        try:
            if simple and not kwargs and len(args) >= least:
                return run(rule, op, args, (), args[0] if in_place else None, on_meta)
            values = [*args, *defaults[len(args) :]]
            for name, value in kwargs.items():
                values[names.index(name)] = value
            operands = [values[i] for i in operand_at]
            out = values[0] if in_place else values[out_at] if out_at is not None else None
            if out_at is not None and out is not None:
                shape = _broadcast(operands)
                if shape is None:
                    on_meta()  # raises
                    raise NoKernel
                if out.shape != shape:
                    resized(out, shape)
                    rest = {name: to_meta(value) for name, value in kwargs.items() if name != names[out_at]}
                    stride = op.overloadpacket(*[to_meta(v) for v in args], **rest).stride()  # as without an `out`
                    laid_out(out, out.untyped_storage(), out.storage_offset(), shape, stride)
            return run(rule, op, operands, tuple(values[i] for i in mode_at), out, on_meta)
        except NoKernel:
            return fallback(op, *args, **kwargs)

    made = pair_kernel(rule, op, kernel) if simple and not in_place and least <= 2 <= len(operand_at) else kernel
    if not simple:
        return made
    return accelerator.kernel(made, partial(plan_in_cpp, rule, op, in_place), (least, len(operand_at)), in_place)


def has_kernel(op: Any, key: str = KEY) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def register_kernels(library: torch.library.Library, kernels: dict[str, Callable[..., Any]]) -> None:
    """Register kernels by the names of their overloads, and the `out=` forms made of them that have no entry of their own.
    What they cannot bind, even by halves, runs on the CPU."""
    for name, kernel in kernels.items():
        op = op_of(name)
        whole = halving(op, kernel, fallback)
        library.impl(op, whole, KEY)
        for form, outs in out_forms(op):
            if form.name().removeprefix("aten::") not in kernels:
                library.impl(form, with_out(whole, outs, name), KEY)


RULES: dict[Any, Rule] = {}  # functional overload to rule: ops that are computed element by element


def register_pointwise(library: torch.library.Library, op: Any, rule: Rule) -> None:
    RULES[op] = rule
    register_forms(library, op, partial(pointwise_kernel, rule=rule))


def register_forms(library: torch.library.Library, op: Any, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Register what `make` makes of each form of a functional op."""
    for variant in (op, *variants(op)):
        library.impl(variant, make(variant), KEY)
