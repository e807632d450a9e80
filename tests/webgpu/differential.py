"""Random ops on random tensors, on the CPU and on webgpu: `python -m tests.webgpu.differential --seconds 60`.

A case is a number: it decides the op, its form (functional, in place, `out=`), dtypes, shapes, layouts (transposed, sliced,
expanded, offset, conjugated) and values (NaN, infinities, -0.0, extremes). What the CPU refuses is not a case; what the CPU
computes, the device must compute alike: dtype, shape and every element, within the dtype's rounding. `--case N` shows one.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

F = torch.nn.functional
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
REAL = (torch.bool, *INTEGERS, *FLOATS)
EVERY = (*REAL, torch.complex64)
# What a result may be off by, beside one unit of the smallest normal number.
TOLERANCE = {
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
    torch.complex64: 1e-4,
    torch.float64: 1e-6,
}
SHAPES = ((), (1,), (5,), (0,), (3, 4), (2, 3, 4), (1, 7), (6, 1), (2, 0, 3), (33, 17), (4, 1, 5), (2, 3, 2, 2), (129,))
LARGE = ((70_001,), (300, 301))
ODD = (math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, -1.0, 0.5, -2.5, 1e-30, 65504.0, 1e37, 16777217.0, 2.0**31)

View = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Case:
    """One number's choices, and what they were, for the report."""

    number: int
    told: list[str] = field(default_factory=list)
    coarsest: float = 0.0  # of its dtypes' tolerances

    def __post_init__(self) -> None:
        self.random = random.Random(self.number)
        self.generator = torch.Generator().manual_seed(self.number)

    def choose(self, *values: Any) -> Any:
        return self.random.choice(values)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def values(self, shape: tuple[int, ...], dtype: torch.dtype, tame: bool = False) -> torch.Tensor:
        if dtype is torch.bool:
            return torch.randint(0, 2, shape, generator=self.generator).bool()
        if dtype.is_complex:
            parts = [self.values(shape, torch.float32, tame=True) for _ in range(2)]
            return torch.complex(*parts)
        if dtype.is_floating_point:
            made: torch.Tensor = torch.randn(shape, generator=self.generator) * self.choose(1, 1, 10, 0.01)
            if not tame and made.numel() and self.chance(0.5):
                flat = made.view(-1)
                for _ in range(min(flat.numel(), 6)):
                    flat[self.random.randrange(flat.numel())] = self.choose(*ODD)
            return made.to(dtype)
        info = torch.iinfo(dtype)
        reach = self.choose(3, 100, 100, None)
        if reach is None and not tame:
            low, high = info.min // 2, info.max // 2
            made = torch.randint(low, high, shape, generator=self.generator).to(dtype)
            flat = made.view(-1)
            for _ in range(min(flat.numel(), 4)):
                flat[self.random.randrange(flat.numel())] = self.choose(info.min, info.max, 0, 1, info.max - 1)
            return made
        reach = reach or 3
        return torch.randint(max(info.min, -reach), reach, shape, generator=self.generator).to(dtype)

    def layout(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], View, str]:
        """A shape to be made, and the view of it that has the wanted shape."""
        kind = self.choose("plain", "plain", "transposed", "sliced", "offset", "expanded", "padded")
        rank = len(shape)
        if kind == "transposed" and rank >= 2:
            a, b = self.random.sample(range(rank), 2)
            base = list(shape)
            base[a], base[b] = base[b], base[a]
            return tuple(base), lambda t: t.transpose(a, b), kind
        if kind == "sliced" and rank:
            d, step = self.random.randrange(rank), self.choose(2, 3)
            base = list(shape)
            base[d] = shape[d] * step
            return tuple(base), lambda t: t[(slice(None),) * d + (slice(None, None, step),)], kind
        if kind == "offset" and rank:
            first = self.choose(1, 3)
            return (shape[0] + first, *shape[1:]), lambda t: t[first:], kind
        if kind == "padded" and rank:
            return (*shape[:-1], shape[-1] + 3), lambda t: t[..., 1:-2], kind
        if kind == "expanded" and rank:
            d = self.random.randrange(rank)
            return (*shape[:d], 1, *shape[d + 1 :]), lambda t: t.expand(shape), kind
        return shape, lambda t: t, "plain"

    def shape(self, least: int = 0, large: bool = True) -> tuple[int, ...]:
        if large and self.chance(0.04):
            return self.random.choice([shape for shape in LARGE if len(shape) >= least])
        return self.random.choice([shape for shape in SHAPES if len(shape) >= least])

    def tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, tame: bool = False, written: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        base, view, kind = self.layout(shape)
        while written and kind == "expanded":
            base, view, kind = self.layout(shape)
        held = self.values(base, dtype, tame)
        self.coarsest = max(self.coarsest, TOLERANCE.get(dtype, 0.0))
        lazily = dtype.is_complex and self.chance(0.3)
        self.told.append(f"{str(dtype)[6:]}{list(shape)} {kind}{' conj' if lazily else ''}")
        pair = view(held), view(held.to("webgpu"))
        return (pair[0].conj(), pair[1].conj()) if lazily else pair


Run = Callable[[Case], tuple[Any, Any]]
OPS: dict[str, Run] = {}


def both(function: Callable[..., Any], pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[Any, Any]:
    """The results on the CPU and on the device; an exception is a result."""
    outcomes: list[Any] = []
    for side in (0, 1):
        try:
            made = function(*[pair[side] for pair in pairs])
            outcomes.append(made if isinstance(made, (tuple, list)) else [made])
        except Exception as exc:  # noqa: BLE001  (told, or what the CPU does as well)
            outcomes.append(exc)
            if side == 0:
                break
    return outcomes[0], outcomes[-1]


def broadcast(case: Case, count: int) -> list[tuple[int, ...]]:
    """Shapes that can be computed with each other."""
    whole = case.shape()
    found = [whole]
    for _ in range(count - 1):
        shape = [1 if case.chance(0.2) and n else n for n in whole]
        found.append(tuple(shape[case.choose(0, 0, 0, *range(len(shape) + 1)) :]))
    return found


def pointwise(
    name: str, function: Callable[..., Any], count: int, dtypes: tuple[torch.dtype, ...], tame: bool = False
) -> None:
    """An elementwise op, in each of its forms; operands of one dtype mostly, of several at times, or a number."""

    def run(case: Case) -> tuple[Any, Any]:
        dtype = case.choose(*dtypes)
        shapes = broadcast(case, count)
        form = case.choose("plain", "plain", "plain", "in place", "out", "number")
        case.told.append(form)
        pairs = [case.tensor(shapes[0], dtype, tame, written=form == "in place")]
        for shape in shapes[1:]:
            other = dtype if case.chance(0.75) else case.choose(*dtypes)
            pairs.append(case.tensor(shape, other, tame))
        if form == "number" and count == 2:
            number = case.choose(0, 1, -1, 3, 2.5, -0.5, True, 300, 2**31, 1e10, math.nan, math.inf)
            case.told.append(repr(number))
            return both(lambda a: function(a, number), pairs[:1])
        in_place = getattr(torch.Tensor, f"{name}_", None)
        if form == "in place" and in_place is not None:
            return both(in_place, pairs)
        if form == "out":
            size: Any = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
            target = dtype if case.chance(0.6) else case.choose(*EVERY)
            out = case.tensor(tuple(size), target, written=True)
            return both(lambda *given: function(*given[:-1], out=given[-1]), [*pairs, out])
        return both(function, pairs)

    OPS[name] = run


UNARY_ANY = ("neg", "abs", "sgn", "square", "logical_not", "isnan", "isinf", "isfinite", "nan_to_num", "sign", "relu")
UNARY_ROUND = ("floor", "ceil", "trunc", "round", "frac", "signbit")
UNARY_FLOAT = (
    "exp", "expm1", "log1p", "log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh", "sigmoid",
    "erf", "erfc", "asinh", "atan", "sinc", "lgamma", "digamma", "exp2", "acos", "asin", "sinh", "cosh", "atanh",
)  # fmt: skip
BINARY = ("add", "sub", "mul", "eq", "ne", "logical_and", "logical_or", "logical_xor", "true_divide")
BINARY_REAL = ("maximum", "minimum", "fmax", "fmin", "lt", "le", "gt", "ge")
DIVISIONS = ("floor_divide", "remainder", "fmod")  # tame: of 3e38 by 0.001 the CPU's vectors make NaN
BINARY_FLOAT = ("atan2", "hypot", "copysign", "xlogy", "logaddexp", "logaddexp2", "heaviside", "nextafter", "ldexp")
BITS = ("bitwise_and", "bitwise_or", "bitwise_xor")

for _name in UNARY_ANY:
    pointwise(_name, getattr(torch, _name), 1, EVERY)
for _name in UNARY_ROUND:
    pointwise(_name, getattr(torch, _name), 1, REAL)
for _name in UNARY_FLOAT:
    pointwise(_name, getattr(torch, _name), 1, REAL)
for _name in BINARY:
    pointwise(_name, getattr(torch, _name), 2, EVERY)
for _name in BINARY_REAL:
    pointwise(_name, getattr(torch, _name), 2, REAL)
for _name in DIVISIONS:
    pointwise(_name, getattr(torch, _name), 2, REAL, tame=True)
for _name in BINARY_FLOAT:
    pointwise(_name, getattr(torch, _name), 2, (*FLOATS, torch.int32, torch.int64))
for _name in BITS:
    pointwise(_name, getattr(torch, _name), 2, (torch.bool, *INTEGERS))
for _name in ("gcd", "lcm"):
    pointwise(_name, getattr(torch, _name), 2, INTEGERS, tame=True)
pointwise("bitwise_not", torch.bitwise_not, 1, (torch.bool, *INTEGERS))
pointwise("pow", torch.pow, 2, (*INTEGERS, *FLOATS), tame=True)
pointwise("addcmul", torch.addcmul, 3, (*INTEGERS, *FLOATS), tame=True)
pointwise("clamp", torch.clamp, 3, (*INTEGERS, *FLOATS))
pointwise("lerp", torch.lerp, 3, FLOATS, tame=True)


def op(least: int, dtypes: tuple[torch.dtype, ...], tame: bool = False) -> Callable[[Any], Any]:
    """An op of one tensor of at least that rank: what is decorated chooses the rest and returns what to call."""

    def register(make: Any) -> Any:
        def run(case: Case) -> tuple[Any, Any]:
            shape, dtype = case.shape(least), case.choose(*dtypes)
            function = make(case, shape, dtype)
            return both(function, [case.tensor(shape, dtype, tame)])

        OPS[make.__name__] = run
        return make

    return register


def _dim(case: Case, shape: tuple[int, ...]) -> int:
    dim = case.random.randrange(-len(shape), len(shape)) if shape else case.choose(0, -1)
    case.told.append(f"dim {dim}")
    return dim


def fold(name: str, dtypes: tuple[torch.dtype, ...], tame: bool) -> None:
    function = getattr(torch, name)
    if name in ("median", "nanmedian", "kthvalue"):  # the CPU's are wrong for an expanded tensor
        selected = function

        def function(t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            made = selected(t.contiguous(), *((1,) if name == "kthvalue" else ()), *args, **kwargs)
            return made[0] if isinstance(made, tuple) else made  # of equal elements any is the place

    if name == "mode":  # of equal elements any is the place

        def function(t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return torch.mode(t, *args, **kwargs)[0]

    def run(case: Case) -> tuple[Any, Any]:
        shape, dtype = case.shape(), case.choose(*dtypes)
        pair = case.tensor(shape, dtype, tame)
        form = case.choose("whole", "dim", "dim", "keepdim")
        if form == "whole":
            return both(function, [pair])
        dim = _dim(case, shape)
        return both(lambda t: function(t, dim=dim, keepdim=form == "keepdim"), [pair])

    OPS[name] = run


for _name in ("sum", "nansum", "mean", "any", "all", "count_nonzero", "amax", "amin", "argmax", "argmin", "max", "min"):
    fold(_name, EVERY if _name in ("sum", "mean", "any", "all") else REAL, tame=_name in ("sum", "mean", "nansum"))
for _name in ("prod", "median", "nanmedian", "mode", "kthvalue"):
    fold(_name, REAL, tame=True)
for _name in ("var", "std", "logsumexp"):
    fold(_name, FLOATS, tame=True)


def along(name: str, dtypes: tuple[torch.dtype, ...], function: Callable[[torch.Tensor, int], Any]) -> None:
    def run(case: Case) -> tuple[Any, Any]:
        shape, dtype = case.shape(), case.choose(*dtypes)
        dim = _dim(case, shape)
        return both(lambda t: function(t, dim), [case.tensor(shape, dtype, name in TAME)])

    OPS[name] = run


TAME = ("cumsum", "cumprod", "logcumsumexp", "softmax", "log_softmax", "norm")
along("cumsum", EVERY, torch.cumsum)
along("cumprod", (*INTEGERS, torch.float32), torch.cumprod)
along("logcumsumexp", (torch.float32,), torch.logcumsumexp)
along("cummax", REAL, lambda t, d: torch.cummax(t, d)[0])
along("cummin", REAL, lambda t, d: torch.cummin(t, d)[0])
along("softmax", FLOATS, torch.softmax)
along("log_softmax", FLOATS, torch.log_softmax)
along("sort", REAL, lambda t, d: torch.sort(t, dim=d, stable=True))
along("argsort", REAL, lambda t, d: torch.argsort(t, dim=d, stable=True, descending=True))
along("topk", REAL, lambda t, d: torch.topk(t, min(2, t.size(d) if t.dim() else 1), d)[0])
along("flip", EVERY, lambda t, d: t.flip(d))
along("roll", EVERY, lambda t, d: t.roll(3, d))
along("diff", EVERY, lambda t, d: t.diff(dim=d))
along("unbind", EVERY, lambda t, d: t.unbind(d))
along("norm", FLOATS, lambda t, d: t.norm(dim=d))
along("cat", EVERY, lambda t, d: torch.cat([t, t.narrow(d, 0, t.size(d) // 2), t], d))
along("stack", EVERY, lambda t, d: torch.stack([t, t * 2], d))
along("unique_consecutive", REAL, lambda t, d: torch.unique_consecutive(t, return_counts=True))
along("repeat_interleave", EVERY, lambda t, d: t.repeat_interleave(2, d))
along("chunked copy", EVERY, lambda t, d: [part.contiguous() for part in t.chunk(3, d)])


@op(0, EVERY, tame=True)
def convert(case: Case, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[..., Any]:
    target = case.choose(*EVERY)
    case.told.append(f"to {target}")
    # Floats beyond an integer's range are converted to anything, on the CPU too.
    if target in INTEGERS and dtype not in (torch.bool, *INTEGERS):
        limit = 100.0
        return lambda t: (t.real if t.is_complex() else t).nan_to_num(0.0).abs().clamp(max=limit).to(target)
    return lambda t: t.to(target)


@op(0, EVERY)
def copy_into(case: Case, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[..., Any]:
    target = case.choose(dtype, *((torch.int64, torch.float32) if dtype in INTEGERS else (dtype,)))
    out = case.tensor(shape, target, written=True)

    def copy(t: torch.Tensor) -> list[torch.Tensor]:
        written = out[t.device.type != "cpu"]
        written.copy_(t)
        return [written]

    return copy


@op(1, REAL)
def masked(case: Case, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[..., Any]:
    mask = case.tensor(shape, torch.bool)
    kind = case.choose("select", "fill", "where", "nonzero", "index", "put", "scatter")
    case.told.append(kind)

    def run(t: torch.Tensor) -> Any:
        m = mask[t.device.type != "cpu"]
        made = {
            "select": lambda: t.masked_select(m),
            "fill": lambda: t.masked_fill(m, 3),
            "where": lambda: torch.where(m, t, t.flip(0)),
            "nonzero": lambda: m.nonzero(),
            "index": lambda: t[m],
            "put": lambda: t.clone().index_put_((m,), t.new_full((), 1)),
            "scatter": lambda: t.clone().masked_scatter_(m, t.flip(0)),
        }
        return made[kind]()

    return run


@op(1, EVERY)
def indexed(case: Case, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[..., Any]:
    dim = case.random.randrange(len(shape))
    kind = case.choose("select", "gather", "take", "index", "negative", "two", "copy", "fill", "put")
    dtype_of = case.choose(torch.int64, torch.int64, torch.int32)
    case.told.append(f"{kind} dim {dim} {dtype_of}")
    length, whole = max(1, shape[dim]), max(1, math.prod(shape))
    flat = torch.randint(0, length, (7,), generator=case.generator).to(dtype_of)
    like = torch.randint(0, length, shape, generator=case.generator)
    spot = torch.randint(-whole, whole, (3, 4), generator=case.generator)
    only = torch.randperm(length, generator=case.generator)[: max(1, length // 2)]

    def run(t: torch.Tensor) -> Any:
        def at(index: torch.Tensor) -> torch.Tensor:
            return index.to(t.device)

        def after(index: torch.Tensor) -> Any:
            return (*(slice(None),) * dim, index)

        made = {
            "select": lambda: t.index_select(dim, at(flat)),
            "gather": lambda: t.gather(dim, at(like)),
            "take": lambda: t.take(at(spot)),
            "index": lambda: t[after(at(flat))],
            "negative": lambda: t[after(at(flat.long()) - length)],
            "two": lambda: t[at(flat.long()) % t.size(0)][..., None, ::2],
            "copy": lambda: t.clone().index_copy_(dim, at(only), t.index_select(dim, at(only)) * 2),
            "fill": lambda: t.clone().index_fill_(dim, at(only), 1),
            "put": lambda: (
                t.clone().index_put_((at(only),), t.index_select(dim, at(only)) + 1)
                if not dim
                else t.clone().scatter_(dim, at(like[..., :1]), 1)
            ),
        }
        return made[kind]()

    return run


@op(1, (*INTEGERS, *FLOATS), tame=True)
def combined(case: Case, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[..., Any]:
    dim = case.random.randrange(len(shape))
    kind = case.choose("index_add", "scatter_add", "amax", "amin", "prod", "mean", "put", "bincount")
    case.told.append(f"{kind} dim {dim}")
    length = max(1, shape[dim])
    flat = torch.randint(0, length, (shape[dim],), generator=case.generator)
    like = torch.randint(0, length, shape, generator=case.generator)
    include = case.chance(0.5)

    def run(t: torch.Tensor) -> Any:
        a, b = flat.to(t.device), like.to(t.device)
        if kind == "index_add":
            return t.clone().index_add_(dim, a, t, alpha=2)
        if kind == "scatter_add":
            return t.clone().scatter_add_(dim, b, t)
        if kind == "put" and not dim:
            return t.clone().index_put_((a,), t, accumulate=True)
        if kind == "bincount":
            return torch.bincount(b.reshape(-1), minlength=3)
        return t.clone().scatter_reduce_(dim, b, t, kind, include_self=include)

    return run


@op(2, (*INTEGERS, *FLOATS, torch.complex64), tame=True)
def product(case: Case, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[..., Any]:
    kind = case.choose("matmul", "addmm", "mv", "outer", "einsum", "linear", "trace")
    case.told.append(kind)

    def run(t: torch.Tensor) -> Any:
        square = t @ t.mT
        made = {
            "matmul": lambda: square,
            "addmm": lambda: torch.addmm(
                square.reshape(-1, t.size(-2))[: t.size(-2)], *[square.reshape(-1, t.size(-2))[: t.size(-2)]] * 2
            ),
            "mv": lambda: t @ t.reshape(-1, t.size(-1))[0],
            "outer": lambda: torch.outer(t.reshape(-1)[:50], t.reshape(-1)[:40]),
            "einsum": lambda: torch.einsum("...ij,...kj->...ki", t, t),
            "linear": lambda: F.linear(t, t.reshape(-1, t.size(-1))[:3]),
            "trace": lambda: t.reshape(-1, t.size(-1)).trace(),
        }
        return made[kind]()

    return run


@op(2, EVERY)
def shaped(case: Case, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[..., Any]:
    kind = case.choose(
        "tril", "triu", "repeat", "rot90", "diag", "unfold", "pad", "reshape", "movedim", "stride", "view"
    )
    k = case.choose(-2, 0, 1)
    case.told.append(f"{kind} {k}")
    made: dict[str, Callable[[torch.Tensor], Any]] = {
        "tril": lambda t: t.tril(k),
        "triu": lambda t: t.triu(k),
        "repeat": lambda t: t.repeat(2, *(1,) * (t.dim() - 1)),
        "rot90": lambda t: t.rot90(k),
        "diag": lambda t: t.diagonal(k).clone(),
        "unfold": lambda t: t.unfold(-1, 2, 1).clone() * 1,
        "pad": lambda t: F.pad(t, (1, 2), value=1),
        "reshape": lambda t: t.reshape(-1).clone(),
        "movedim": lambda t: t.movedim(0, -1).contiguous(),
        "stride": lambda t: t[..., ::2].contiguous(),
        "view": lambda t: t.contiguous().view(torch.uint8) if not t.is_conj() else t.real.clone(),
    }
    return made[kind]


@op(1, FLOATS, tame=True)
def bucketed(case: Case, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[..., Any]:
    kind = case.choose("bucketize", "searchsorted", "isin", "histc", "layer_norm", "gelu", "cdist", "clamp_min")
    case.told.append(kind)
    made: dict[str, Callable[[torch.Tensor], Any]] = {
        "bucketize": lambda t: torch.bucketize(t, t.flatten().sort()[0], right=True),
        "searchsorted": lambda t: torch.searchsorted(t.sort(-1)[0], t),
        "isin": lambda t: torch.isin(t, t.flatten()[:3]),
        "histc": lambda t: torch.histc(t.float(), 5, -2, 2),
        "layer_norm": lambda t: F.layer_norm(t, t.shape[-1:]),
        "gelu": F.gelu,
        "cdist": lambda t: torch.cdist(t.reshape(1, -1, 1)[:, :9].float(), t.reshape(1, -1, 1)[:, :9].float()),
        "clamp_min": lambda t: t.clamp_min(0),
    }
    return made[kind]


def different(expected: torch.Tensor, found: torch.Tensor, tolerance: float, loose: bool) -> str:
    """Why two results are not the same; "" if they are."""
    if found.dtype is not expected.dtype or found.shape != expected.shape:
        return f"{found.dtype} {list(found.shape)} for {expected.dtype} {list(expected.shape)}"
    if found.device.type != "webgpu":
        return f"it is on {found.device}"
    a, b = expected.detach().resolve_conj(), found.detach().cpu()
    if not (a.is_floating_point() or a.is_complex()):
        wrong = a != b
    else:
        if a.is_complex():
            a, b = torch.view_as_real(a), torch.view_as_real(b.resolve_conj())
        share = max(tolerance, TOLERANCE[expected.dtype]) * (10 if loose else 1)
        a, b = a.double(), b.double()
        size = a.abs().nan_to_num(0.0, 0.0, 0.0)
        if loose and size.numel():  # a sum's error is of the size of what was summed
            size = size.clamp(min=float(size.max()) * 0.1, max=None)
        near = (a - b).abs() <= size * share + 1e-25 + (share * 0.1 if loose else 0)
        wrong = ~((a == b) | (a.isnan() & b.isnan()) | near)
        largest = torch.finfo(expected.dtype).max  # near infinity the CPU's vectors are there early: cosh(89)
        beyond = (a.isinf() | b.isinf()) & (torch.minimum(a.abs(), b.abs()) > largest / 2) & (a.sign() == b.sign())
        wrong &= ~beyond
    if not bool(wrong.any()):
        return ""
    place = tuple(wrong.nonzero()[0].tolist())
    return f"{int(wrong.sum())} of {wrong.numel()}, at {place}: {b[place].item()!r} for {a[place].item()!r}"


LOOSE = {
    "sum",
    "mean",
    "nansum",
    "prod",
    "var",
    "std",
    "logsumexp",
    "cumsum",
    "cumprod",
    "logcumsumexp",
    "softmax",
    "log_softmax",
}
LOOSE |= {
    "norm",
    "product",
    "combined",
    "bucketed",
    "addcmul",
    "lerp",
    "pow",
    "lgamma",
    "digamma",
    "sinc",
    "sin",
    "cos",
}
LOOSE |= {
    "remainder",
    "fmod",
    "true_divide",
    "mul",
    "ldexp",
    "atanh",
    "acos",
    "logaddexp",
    "logaddexp2",
    "log_softmax",
    "reciprocal",
}


def examine(number: int, only: str = "") -> tuple[str, str, str]:
    """The op of a case, what was different ("": nothing), and the case in words."""
    case = Case(number)
    name = only or case.choose(*sorted(OPS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, found = OPS[name](case)
    told = ", ".join(case.told)
    if isinstance(expected, Exception):
        return name, "", told
    if isinstance(found, Exception):
        return name, f"raises {type(found).__name__}: {str(found)[:160]}", told
    for have, want in zip(found, expected, strict=True):
        if isinstance(want, torch.Tensor):
            why = different(want, have, case.coarsest, name in LOOSE)
            if why:
                return name, why, told
    return name, "", told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int)
    parser.add_argument("--op", default="")
    chosen = parser.parse_args()
    import anytorch.webgpu  # noqa: F401  (registers the device)

    if chosen.case is not None:
        print(*examine(chosen.case, chosen.op), sep="\n")
        return 0
    end, number = time.monotonic() + chosen.seconds, chosen.first
    wrong: Counter[str] = Counter()
    while time.monotonic() < end:
        name, why, told = examine(number, chosen.op)
        if why:
            wrong[name] += 1
            if wrong[name] <= 4:
                print(f"case {number}: {name}: {why}\n    {told}", flush=True)
        number += 1
    print(f"{number - chosen.first} cases, {sum(wrong.values())} different: {dict(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
