"""Sums, means, extremes, variances, norms: anything that folds some dimensions of a tensor away, and the running ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anytorch.gpu.plans import plans
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl.scan import BLOCK, SCANS, THREADS, Scan, render, render_prefixes
from anytorch.gpu.wgsl.types import KINDS
from anytorch.webgpu.copies import contiguous, narrowed, on_device
from anytorch.webgpu.dtypes import name_of, usable, word_dtype
from anytorch.webgpu.folds import find_fold, part_states, reduce_dims
from anytorch.webgpu.kernels import op_of, register_kernels
from anytorch.webgpu.launch import NoKernel, infer, launch, without_elements
from anytorch.webgpu.rows import row_geometry
from anytorch.webgpu.tensors import aten, new_contiguous

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
        if not values["self"].is_floating_point():
            raise RuntimeError("std and var only support floating point and complex dtypes")
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
        if not x.numel():
            return without_elements(op, args, kwargs)
        _check_once(values.get("dim"), x.dim())
        if isinstance(values.get("ord"), complex):
            raise RuntimeError("linalg.vector_norm: Expected a non-complex scalar as the order of norm.")
        inferred = infer(op, *args, **kwargs)
        results = inferred if isinstance(inferred, tuple) else (inferred,)
        dtypes, size = [result.dtype for result in results], results[0].size()
        chosen = reduction.choose(values, dtypes) if usable(x.dtype, *dtypes) else None
        if chosen is None:
            raise NoKernel
        name, scalars, compute = chosen
        # An index asked for without its value: the value is written all the same.
        wanted = (x.dtype, dtypes[0]) if max(indices) >= len(indices) else tuple(dtypes)
        dims = _dims(op, values.get("dim"), x.dim())
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
        if not x.dtype.is_floating_point:  # the default dtype may be what the result is
            key += (torch.get_default_dtype(),)
        fold = plans[key]
        return first_call(key, args, kwargs) if fold is None else returned(fold(address))

    return kernel


def _check_once(dims: Any, rank: int) -> None:
    """Raise torch's own error for a dimension that is named twice."""
    if isinstance(dims, (list, tuple)) and rank:
        counted = [d % rank for d in dims if -rank <= d < rank]
        for d in counted:
            if counted.count(d) > 1:
                raise RuntimeError(f"dim {d} appears multiple times in the list of dims")


def _dims(op: Any, dim: Any, rank: int) -> Sequence[int]:
    """The dimensions an op's argument means, in order."""
    if rank > 64:  # torch keeps them in the bits of a word
        raise RuntimeError("only tensors with up to 64 dims are supported")
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        # An empty list means no dimension to any and all, and every one to the rest.
        return () if dim is not None and op._overloadname == "dims" else range(rank)
    if isinstance(dim, int):
        return (dim % rank,) if rank else ()
    return sorted(d % rank for d in dim) if rank else ()


def _aminmax(self: torch.Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    if not self.numel():
        return without_elements(aten.aminmax.default, (self,), {"dim": dim, "keepdim": keepdim})
    low, _ = infer(aten.aminmax.default, self, dim=dim, keepdim=keepdim)
    if not usable(low.dtype):
        raise NoKernel
    dims = range(self.dim()) if dim is None else ((dim % self.dim(),) if self.dim() else ())
    return tuple(reduce_dims(name, (self,), dims, [low.dtype], low.size())[0] for name in ("amin", "amax"))


# --- along a dimension that stays ----------------------------------------------------------------------------------------


MOST_PARTS = 512
ENOUGH_ROWS = 256  # as many workgroups keep a GPU busy; fewer rows are cut into parts


def scan(
    name: str, self: torch.Tensor, dim: int, dtypes: Sequence[torch.dtype], compute: str | None = None
) -> list[torch.Tensor]:
    """The running fold `name` of `self` along `dim`: one new contiguous tensor per dtype. The dtypes must be usable()."""
    written = [new_contiguous(self.shape, word_dtype(dtype)) for dtype in dtypes]
    if self.numel():
        x, reducer, compute = contiguous(self), SCANS[name], compute or _own(self.dtype)
        rows, length, inner = row_geometry(self, dim)
        group = not open_runtime().adapter.software and length > 64 and rows < 16_384
        parts, chunk = split(rows, length) if group else (1, length)
        kernel = Scan(reducer, name_of(x.dtype), tuple(name_of(t.dtype) for t in written), compute, group, parts > 1)
        prefixes = []
        if parts > 1:
            prefixes = [part_states(reducer, x.view(rows // inner, length, inner), (1,), parts, chunk, compute)]
            numbers: dict[str, Any] = {"head": (rows, parts), "placed": 0, "writable": 1}
            key = ("prefixes", reducer, compute)
            launch(key, lambda kernel: render_prefixes(*kernel[1:]), prefixes, -(-rows // THREADS), **numbers)
        groups = rows * parts if group else -(-rows * parts // THREADS)
        numbers = {"head": (rows, length, inner, parts, chunk), "writable": kernel.writable}
        launch(kernel, render, [x, *written, *prefixes], groups, **numbers)
    return [narrowed(t, dtype) for t, dtype in zip(written, dtypes, strict=True)]


def _own(dtype: torch.dtype) -> str:
    return KINDS[name_of(dtype)].compute


def split(rows: int, length: int) -> tuple[int, int]:
    """Parts of a row and their length, whole blocks, for rows too few to keep a GPU busy."""
    blocks = -(-length // BLOCK)
    parts = max(1, min(ENOUGH_ROWS // rows, blocks // 4, MOST_PARTS))
    chunk = -(-blocks // parts) * BLOCK
    return -(-length // chunk), chunk


def _accumulate(op: Any, name: str) -> Callable[..., Any]:
    def kernel(self: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
        result = infer(op, self, dim, dtype=dtype).dtype
        if not usable(self.dtype, result):
            raise NoKernel
        compute = _own(result)
        lossless = name == "cumsum" and compute == "f32"
        return scan("lossless cumsum" if lossless else name, self, dim, [result], compute)[0]

    return kernel


def _extreme(name: str) -> Callable[..., None]:
    def kernel(self: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, dim: int) -> None:
        if not usable(self.dtype, torch.int64):
            raise NoKernel
        made = scan(name, self, dim, [self.dtype, torch.int64])
        for target, value in zip((values, indices), made, strict=True):
            on_device(value, target)

    return kernel


def _logcumsumexp(self: torch.Tensor, dim: int) -> Any:
    if not self.is_floating_point() or not usable(self.dtype):
        raise NoKernel
    return scan("logcumsumexp", self, dim, [self.dtype])[0]


KERNELS: dict[str, Callable[..., Any]] = {
    **{name: _kernel(op_of(name), reduction) for name, reduction in OPS.items()},
    "aminmax": _aminmax,
    "cumsum": _accumulate(aten.cumsum.default, "cumsum"),
    "cumprod": _accumulate(aten.cumprod.default, "cumprod"),
    "_cummax_helper": _extreme("cummax"),
    "_cummin_helper": _extreme("cummin"),
    "_logcumsumexp": _logcumsumexp,
}


def register(library: torch.library.Library) -> None:
    register_kernels(library, KERNELS)
