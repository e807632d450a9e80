"""Everything this device has no kernel for runs on the CPU: counted, said once per op, and forbidden on request."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from anytorch import settings
from anytorch.errors import DeviceError
from anytorch.webgpu import copies, random
from anytorch.webgpu.launch import elsewhere, expanded, once
from anytorch.webgpu.tensors import CPU_KEYS, aten, device, is_ours

# Ops of aten whose CPU tensors are not a mistake: lengths, batch sizes and the like stay on the host on every device, and
# indices may.
TAKES_HOST_TENSORS = (
    "_ctc_loss",
    "_ctc_loss_backward",
    "_pack_padded_sequence",
    "index",
    "_index_put_impl_",
    "_copy_from",
    "_to_copy",
    "copy",
    "set_",
)

FILLS = (aten.fill_.Scalar, aten.zero_.default)  # what they write is the same everywhere: they may write a place twice

# Asked before the CPU is: they compute an op of these arguments on the device, or return NotImplemented (`ops.complexes`).
detours: list[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = []
counts: Counter[str] = Counter()
_warned: set[str] = set()


class FallbackForbidden(DeviceError):
    """An op has no kernel on this device and ANYTORCH_WEBGPU_FALLBACK=error."""


class FallbackWarning(UserWarning):
    """An op runs on the CPU; issued once per op."""


@dataclass(frozen=True)
class Signature:
    """What the schema of an op says about aliasing."""

    names: tuple[str, ...]
    written: tuple[bool, ...]  # per argument
    tensors: tuple[bool, ...]  # per argument: a Tensor or Tensor?
    view: bool  # returns a view of an argument
    returned: tuple[int | None, ...]  # per result: the argument it is


@lru_cache(maxsize=4096)  # more than there are ops
def signature(op: Any) -> Signature:
    schema = op._schema
    arguments = schema.arguments
    aliases = [argument.alias_info for argument in arguments]

    def owner(of: Any) -> int | None:
        if of is None or not of.is_write:
            return None
        return next(
            (i for i, alias in enumerate(aliases) if alias is not None and alias.before_set & of.before_set), None
        )

    return Signature(
        names=tuple(argument.name for argument in arguments),
        written=tuple(alias is not None and alias.is_write for alias in aliases),
        tensors=tuple(str(a.type) in ("Tensor", "Optional[Tensor]") for a in arguments),
        view=any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns),
        returned=tuple(owner(result.alias_info) for result in schema.returns),
    )


def _on_host(op: Any, known: Signature, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call `op`. A wrapped number reaches Python kernels as a plain one, and only the packet takes it back as what it was,
    which has a say in the result's dtype."""

    def plain(i: int, value: Any) -> bool:
        return known.tensors[i] and isinstance(value, (bool, int, float, complex))

    if not any(plain(i, value) for i, value in enumerate(args)):
        return op(*args, **kwargs)
    try:
        return op.overloadpacket(*args, **kwargs)
    except RuntimeError as exc:
        if "failed to match any schema" not in str(exc):
            raise
    return op(*[torch.tensor(value) if plain(i, value) else value for i, value in enumerate(args)], **kwargs)


WIDER = {torch.complex32: torch.complex64, torch.float16: torch.float32}
NARROWER = {wide: narrow for narrow, wide in WIDER.items()}


def _in_dtypes(value: Any, dtypes: dict[torch.dtype, torch.dtype]) -> Any:
    """Tensors, and names of dtypes, exchanged for those of the dtypes given."""
    if isinstance(value, torch.Tensor):
        return value.to(dtypes.get(value.dtype, value.dtype))
    if isinstance(value, (list, tuple)):
        return type(value)(_in_dtypes(item, dtypes) for item in value)
    return dtypes.get(value, value) if isinstance(value, torch.dtype) else value


def _by_complex64(op: Any, known: Signature, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What torch's CPU kernels leave out for complex numbers of half precision, computed in float32 and rounded once."""
    wide = [_in_dtypes(value, WIDER) for value in args]
    named = {name: _in_dtypes(value, WIDER) for name, value in kwargs.items()}
    result = _on_host(op, known, wide, named)
    given = {**dict(zip(known.names, args, strict=False)), **kwargs}
    computed = {**dict(zip(known.names, wide, strict=False)), **named}
    for name, written in zip(known.names, known.written, strict=True):
        if written and isinstance(given.get(name), torch.Tensor):
            if given[name].shape != computed[name].shape:
                given[name].resize_(computed[name].shape)
            given[name].copy_(computed[name])
    return _in_dtypes(result, NARROWER)


def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `op` on the CPU with copies of its arguments, and bring back what it changed and what it returns."""
    known = signature(op)
    if known.view:  # computes sizes and strides only
        return op._handle.redispatch_boxed(CPU_KEYS, *args, **kwargs)
    if op in FILLS and expanded(args[0]):
        fallback(op, once(args[0]), *args[1:], **kwargs)
        return args[0]
    for detour in detours:
        computed = detour(op, args, kwargs)
        if computed is not NotImplemented:
            return computed
    note(str(op))
    position = {name: i for i, name in enumerate(known.names)}
    changed: list[tuple[torch.Tensor, torch.Tensor]] = []
    strict = op.namespace == "aten" and op._opname not in TAKES_HOST_TENSORS

    def to_host(i: int, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not is_ours(value):
                if strict and value.dim():
                    raise elsewhere(op, known.names[i], value)
                return value
            host = copies.to_host(value)
            if known.written[i]:
                changed.append((value, host))
            return host
        if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
            return [to_host(i, item) for item in value]
        if isinstance(value, torch.device) and value.type == device().type:
            return torch.device("cpu")
        return value

    host_args = [to_host(i, value) for i, value in enumerate(args)]
    host_kwargs = {name: to_host(position[name], value) for name, value in kwargs.items()}
    if "generator" in position and host_kwargs.get("generator") is None and position["generator"] >= len(args):
        host_kwargs["generator"] = random.host_generator()
    try:
        result = _on_host(op, known, host_args, host_kwargs)
    except NotImplementedError as exc:
        if "not implemented for 'ComplexHalf'" not in str(exc):
            raise
        try:
            result = _by_complex64(op, known, host_args, host_kwargs)
        except NotImplementedError:  # for no complex number
            raise exc from None
    for ours, host in changed:
        if ours.shape != host.shape:
            ours.resize_(host.shape)
        ours.copy_(host)

    def to_device(j: int, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            owner = known.returned[j] if j < len(known.returned) else None
            if owner is not None:
                return args[owner] if owner < len(args) else kwargs[known.names[owner]]
            return value.to(device()) if value.device.type == "cpu" else value
        if isinstance(value, (list, tuple)):
            return [to_device(j, item) for item in value]
        return value

    if isinstance(result, tuple):
        return tuple(to_device(j, value) for j, value in enumerate(result))
    return to_device(0, result)


def note(name: str) -> None:
    counts[name] += 1
    mode = settings.get("webgpu_fallback")
    if mode == "error":
        raise FallbackForbidden(
            f"{name} has no kernel on the webgpu device, and ANYTORCH_WEBGPU_FALLBACK=error forbids the CPU",
            hint="set it to warn or silent, or see docs/reference/webgpu-operators.md for what is native",
        )
    if mode == "warn" and name not in _warned:
        _warned.add(name)
        warnings.warn(
            FallbackWarning(f"{name} has no kernel on the webgpu device yet; it runs on the CPU (said once per op)"),
            stacklevel=4,
        )
