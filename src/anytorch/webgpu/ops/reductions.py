"""Sums, means, extremes, variances, norms: anything that folds some dimensions of a tensor away."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anytorch.gpu.plans import plans
from anytorch.gpu.wgsl.types import KINDS
from anytorch.webgpu.dtypes import name_of, usable
from anytorch.webgpu.folds import find_fold, reduce_dims
from anytorch.webgpu.kernels import op_of, register_kernels
from anytorch.webgpu.launch import NoKernel, infer
from anytorch.webgpu.tensors import aten

Chosen = tuple[str, tuple[float, ...], "str | None"]  # reducer, scalars, type to compute in


@dataclass(frozen=True)
class Reduction:
    """How an op's arguments (by name) become a fold. `choose` returns None for what the CPU must do.

    `results`: which of the reducer's results the op returns, in its order.
    """

    choose: Callable[[dict[str, Any], list[torch.dtype]], Chosen | None]
    results: tuple[int, ...] = (0,)


def _plain(name: str) -> Reduction:
    return Reduction(lambda values, dtypes: (name, (), None))


def _in_result(name: str) -> Reduction:
    """Elements are converted to the result's type first, as torch does for sums."""
    return Reduction(lambda values, dtypes: (name, (), KINDS[name_of(dtypes[0])].compute))


def _spread(name: str, results: tuple[int, ...]) -> Reduction:
    def choose(values: dict[str, Any], dtypes: list[torch.dtype]) -> Chosen:
        correction = values.get("correction")
        if correction is None:
            correction = 0.0 if values.get("unbiased") is False else 1.0
        return name, (float(correction),), "f32"

    return Reduction(choose, results)


def _norm(values: dict[str, Any], dtypes: list[torch.dtype]) -> Chosen | None:
    order = values["ord"] if "ord" in values else values["p"]
    order = 2.0 if order is None else float(order)
    known = {0.0: "norm0", 1.0: "norm1", 2.0: "norm2"}
    if order in known:
        return known[order], (), "f32"
    if math.isinf(order):
        return ("normmax" if order > 0 else "normmin"), (), "f32"
    return "normp", (order,), "f32"


OPS: dict[str, Reduction] = {
    **dict.fromkeys(("sum", "sum.dim_IntList"), _in_result("sum")),
    **dict.fromkeys(("mean", "mean.dim"), _in_result("mean")),
    **dict.fromkeys(("prod", "prod.dim_int"), _in_result("prod")),
    "nansum": _in_result("nansum"),
    **dict.fromkeys(("any", "any.dim", "any.dims"), _plain("any")),
    **dict.fromkeys(("all", "all.dim", "all.dims"), _plain("all")),
    **dict.fromkeys(("count_nonzero", "count_nonzero.dim_IntList"), _plain("count_nonzero")),
    **dict.fromkeys(("amax", "max"), _plain("amax")),
    **dict.fromkeys(("amin", "min"), _plain("amin")),
    "max.dim": Reduction(lambda values, dtypes: ("amax", (), None), (0, 1)),
    "min.dim": Reduction(lambda values, dtypes: ("amin", (), None), (0, 1)),
    "argmax": Reduction(lambda values, dtypes: ("amax", (), None), (1,)),
    "argmin": Reduction(lambda values, dtypes: ("amin", (), None), (1,)),
    "var.correction": _spread("var", (0,)),
    "std.correction": _spread("std", (0,)),
    "var_mean.correction": _spread("var", (0, 1)),
    "std_mean.correction": _spread("std", (0, 1)),
    **dict.fromkeys(("linalg_vector_norm", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype"), Reduction(_norm)),
    "logsumexp": Reduction(lambda values, dtypes: ("logsumexp", (), "f32")),
}


def _kernel(op: Any, reduction: Reduction) -> Callable[..., Any]:
    arguments = op._schema.arguments
    names = [a.name for a in arguments]
    defaults = {a.name: a.default_value if a.has_default_value() else None for a in arguments}
    indices = reduction.results
    own = id(op)

    def first_call(key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        x: torch.Tensor = values["self"]
        inferred = infer(op, *args, **kwargs)
        results = inferred if isinstance(inferred, tuple) else (inferred,)
        dtypes, size = [result.dtype for result in results], results[0].size()
        chosen = reduction.choose(values, dtypes) if usable(x.dtype, *dtypes) else None
        if chosen is None:
            raise NoKernel
        name, scalars, compute = chosen
        if name in ("amax", "amin") and not x.numel() and size.numel():
            raise RuntimeError(
                f"{op.overloadpacket}(): Expected reduction dim to be specified for input.numel() == 0. "
                "Specify the reduction dim with the 'dim' argument."
            )
        # An index asked for without its value: the value is written all the same.
        wanted = (x.dtype, dtypes[0]) if max(indices) >= len(indices) else tuple(dtypes)
        dims = _dims(op, values.get("dim"), x.dim())
        if x.numel():
            fold = find_fold(name, (x,), dims, wanted, size, scalars, compute)
            if fold is not None:
                plans[key] = fold
        return returned(reduce_dims(name, (x,), dims, wanted, size, scalars, compute))

    def returned(made: list[torch.Tensor]) -> Any:
        return made[indices[0]] if len(indices) == 1 else tuple(made)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        x = args[0]
        address = x.data_ptr()
        key: Any = (own, x.dtype, x.size(), x.stride(), address & 15 == 0)
        for value in args[1:]:
            key += (tuple(value),) if isinstance(value, list) else (value,)
        for item in kwargs.items():
            key += item
        fold = plans[key]
        return first_call(key, args, kwargs) if fold is None else returned(fold(address))

    return kernel


def _dims(op: Any, dim: Any, rank: int) -> Sequence[int]:
    """The dimensions an op's argument means, in order."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        # An empty list means no dimension to any and all, and every one to the rest.
        return () if dim is not None and op._overloadname == "dims" else range(rank)
    if isinstance(dim, int):
        return (dim % rank,) if rank else ()
    return sorted(d % rank for d in dim) if rank else ()


def _aminmax(self: torch.Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    low, _ = infer(aten.aminmax.default, self, dim=dim, keepdim=keepdim)
    if not usable(low.dtype):
        raise NoKernel
    dims = range(self.dim()) if dim is None else ((dim % self.dim(),) if self.dim() else ())
    return tuple(reduce_dims(name, (self,), dims, [low.dtype], low.size())[0] for name in ("amin", "amax"))


def register(library: torch.library.Library) -> None:
    register_kernels(library, {name: _kernel(op_of(name), reduction) for name, reduction in OPS.items()})
    register_kernels(library, {"aminmax": _aminmax})
