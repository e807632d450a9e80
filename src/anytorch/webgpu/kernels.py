"""From a rule to registered kernels: an op's functional, in-place and `out=` forms share one rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.forms import KEY, op_of, resized, variants
from anytorch.webgpu.launch import to_meta
from anytorch.webgpu.oversize import halving
from anytorch.webgpu.pointwise import Rule, pair_kernel, run


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
                resized(out, torch.broadcast_shapes(*[v.shape for v in operands if isinstance(v, torch.Tensor)]))
            result = run(rule, op, operands, tuple(values[i] for i in mode_at), out, on_meta)
        return fallback(op, *args, **kwargs) if result is None else result

    if simple and not in_place and least <= 2 <= len(operand_at):
        return pair_kernel(rule, op, kernel)
    return kernel


def register_kernels(library: torch.library.Library, kernels: dict[str, Callable[..., Any]]) -> None:
    """Register kernels by the names of their overloads; what they cannot bind, even by halves, runs on the CPU."""
    for name, kernel in kernels.items():
        library.impl(name, halving(op_of(name), kernel, fallback), KEY)


RULES: dict[Any, Rule] = {}  # functional overload to rule, for the compiler that fuses them


def register_pointwise(library: torch.library.Library, op: Any, rule: Rule) -> None:
    RULES[op] = rule
    for variant in (op, *variants(op)):
        library.impl(variant, pointwise_kernel(variant, rule), KEY)
