"""From a rule to registered kernels: an op's functional, in-place and `out=` forms share one rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anytorch.gpu.runtime import device_memory
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.pointwise import Plan, Rule, pair_kernel, run
from anytorch.webgpu.tensors import NAME, aten

META = torch.device("meta")


def to_meta(value: Any) -> Any:
    """A tensor's shape without its data; CPU scalars keep their place in type promotion by being meta scalars too."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META)
    return value


def is_operand(argument: Any) -> bool:
    return str(argument.type) in ("Tensor", "number", "Optional[number]", "Optional[Tensor]") and not (
        argument.kwarg_only and argument.alias_info is not None
    )


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
            return call(*[to_meta(v) for v in args], **{name: to_meta(v) for name, v in kwargs.items()})

        if simple and not kwargs and len(args) >= least:
            result = run(rule, op, args, (), args[0] if in_place else None, on_meta)
        else:
            values = [*args, *defaults[len(args) :]]
            for name, value in kwargs.items():
                values[names.index(name)] = value
            operands = [values[i] for i in operand_at]
            out = values[0] if in_place else values[out_at] if out_at is not None else None
            if out_at is not None and out is not None:
                _prepare_out(out, operands)
            result = run(rule, op, operands, tuple(values[i] for i in mode_at), out, on_meta)
        return fallback(op, *args, **kwargs) if result is None else result

    if simple and not in_place and least <= 2 <= len(operand_at):
        seen: dict[Any, Plan] = device_memory()
        return pair_kernel(seen, rule, op, kernel)
    return kernel


def _prepare_out(out: torch.Tensor, operands: list[Any]) -> None:
    """Give an `out=` tensor the right size, as torch does (with its warning if it was not empty)."""
    shape = torch.broadcast_shapes(*[v.shape for v in operands if isinstance(v, torch.Tensor)])
    if out.shape != shape:
        torch._prims_common.wrappers._maybe_resize_out(out, shape)


def variants(op: Any) -> list[Any]:
    """The in-place and `out=` overloads of a functional one, found by comparing argument lists."""
    base, overload = op._schema.name.split("::")[1], op._overloadname
    found = []
    packet = getattr(aten, base + "_", None)
    if packet is not None and hasattr(packet, overload):
        found.append(getattr(packet, overload))
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    own = getattr(aten, base)
    for name in own.overloads():
        candidate = getattr(own, name)
        outs = [a for a in candidate._schema.arguments if a.kwarg_only and a.alias_info is not None]
        rest = [(a.name, str(a.type)) for a in candidate._schema.arguments if a not in outs]
        if len(outs) == 1 and rest == wanted:
            found.append(candidate)
    return found


RULES: dict[Any, Rule] = {}  # functional overload to rule, for the compiler that fuses them


def register_pointwise(library: torch.library.Library, op: Any, rule: Rule) -> None:
    RULES[op] = rule
    for variant in (op, *variants(op)):
        library.impl(variant, pointwise_kernel(variant, rule), "PrivateUse1")


def check_devices(op: str, *tensors: torch.Tensor | None) -> None:
    """Python kernels get no device check from torch."""
    for tensor in tensors:
        if tensor is not None and tensor.device.type != NAME and tensor.dim():
            raise RuntimeError(
                f"{op}: expected all tensors to be on {NAME}, but one is on {tensor.device}; move it with .to('{NAME}')"
            )
