"""The forms of an op: `out=` and in-place overloads made of a functional kernel, and how they are registered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from anytorch.webgpu.tensors import aten

KEY = "PrivateUse1"


def op_of(name: str) -> Any:
    """The overload a name means: "add.Tensor", or "neg" for its default."""
    base, _, overload = name.partition(".")
    return getattr(getattr(aten, base), overload or "default")


def resized(out: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Give an `out=` tensor the right size, as torch does (with its warning if it was not empty)."""
    if out.shape != torch.Size(size):
        torch._prims_common.wrappers._maybe_resize_out(out, torch.Size(size))
    return out


def into(out: torch.Tensor | None, made: torch.Tensor) -> torch.Tensor:
    """What an `out=` form does with its functional form's result; without an `out`, the result itself."""
    if out is None:
        return made
    if not torch.can_cast(made.dtype, out.dtype):
        raise RuntimeError(f"result type {made.dtype} can't be cast to the desired output type {out.dtype}")
    return resized(out, made.shape).copy_(made)


def with_out(kernel: Callable[..., Any], outs: Sequence[str]) -> Callable[..., Any]:
    """The `out=` form of a kernel: computed beside, then copied into the arguments named `outs`."""

    def written(*args: Any, **kwargs: Any) -> Any:
        targets = [kwargs.pop(name) for name in outs]
        made = kernel(*args, **kwargs)
        for target, value in zip(targets, [made] if len(targets) == 1 else made, strict=True):
            into(target, value)
        return targets[0] if len(targets) == 1 else tuple(targets)

    return written


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
    found = [getattr(packet, op._overloadname)] if packet is not None and hasattr(packet, op._overloadname) else []
    return found + [form for form, outs in out_forms(op) if len(outs) == 1]


def register_with_out(library: torch.library.Library, op: Any, kernel: Callable[..., Any]) -> None:
    """Register a functional kernel, and its `out=` forms made of it."""
    library.impl(op, kernel, KEY)
    for form, outs in out_forms(op):
        library.impl(form, with_out(kernel, outs), KEY)
