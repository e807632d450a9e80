"""From PyTorch to kernel graphs: nodes of an FX graph of ATen ops, one by one. `capture.trace` does it for a function.

What has no rule here is `Untraceable`: `torch.compile` leaves such nodes to ATen and makes graphs of what lies between them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from anytorch.graph import ops
from anytorch.graph.ir import Graph
from anytorch.graph.sizes import product
from anytorch.graph.tracer import Tracer, Untraceable, dtype_of, size_of
from anytorch.graph.whole import ATTENTION, RMS_NORM

aten = torch.ops.aten
Rule = Callable[..., int]


def _pointwise(op: str) -> Rule:
    def rule(one: Tracer, node: FxNode, *args: Any) -> int:
        return one.b.add(op, *(one.operand(arg, one.beside(*args)) for arg in args))

    return rule


def _scaled(op: str) -> Rule:
    """add and sub, whose second argument may be scaled by `alpha`."""

    def rule(one: Tracer, node: FxNode, x: Any, y: Any, alpha: float = 1) -> int:
        beside = one.beside(x, y)
        other = one.operand(y, beside)
        if alpha != 1:
            other = one.b.add("mul", other, one.operand(alpha, beside))
        return one.b.add(op, one.operand(x, beside), other)

    return rule


def _reversed(op: str) -> Rule:
    def rule(one: Tracer, node: FxNode, x: Any, y: Any, alpha: float = 1) -> int:
        if alpha != 1:
            raise Untraceable("alpha")
        return one.b.add(op, one.operand(y, one.beside(x, y)), one.operand(x, one.beside(x, y)))

    return rule


def _div(one: Tracer, node: FxNode, x: Any, y: Any, rounding_mode: str | None = None) -> int:
    if rounding_mode is not None:
        raise Untraceable("a rounded quotient")
    return _pointwise("div")(one, node, x, y)


# What torch computes in place of a power by one of these numbers: the root of minus infinity is no number, its power is
# infinite.
POWERS: dict[float, tuple[str, ...]] = {
    2.0: ("square",),
    0.5: ("sqrt",),
    -0.5: ("rsqrt",),
    -1.0: ("reciprocal",),
    -2.0: ("square", "reciprocal"),
}


def _pow_by_number(one: Tracer, node: FxNode, x: Any, power: Any) -> int:
    number = one.operand(x)
    by_itself = isinstance(power, int) and power == 2  # exact for whole numbers, too
    if power not in POWERS or (one.b.nodes[number].dtype not in ops.FLOATS and not by_itself):
        return _pointwise("pow")(one, node, x, power)
    if one.b.nodes[number].dtype in ops.HALVES and len(POWERS[power]) > 1:  # torch rounds once, at the end
        number = one.b.add("cast", number, dtype="float32")
    for op in POWERS[power]:
        number = one.b.add(op, number)
    return number


def _gelu(one: Tracer, node: FxNode, x: Any, approximate: str = "none") -> int:
    return one.b.add("gelu_tanh" if approximate == "tanh" else "gelu", one.operand(x))


def _clamp(one: Tracer, node: FxNode, x: Any, low: Any = None, high: Any = None) -> int:
    number = one.operand(x)
    for op, bound in (("maximum", low), ("minimum", high)):
        if bound is not None:
            number = one.b.add(op, number, one.operand(bound, one.beside(x)))
    return number


def _reduced(how: str) -> Rule:
    def rule(one: Tracer, node: FxNode, x: Any, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> int:
        number = one.operand(x)
        if dtype is not None:
            number = one.b.add("cast", number, dtype=str(dtype).removeprefix("torch."))
        rank = len(one.b.nodes[number].shape)
        over = [dims] if isinstance(dims, int) else list(dims or range(rank))
        if not over:
            return number
        return one.b.add("reduce", number, how=how, dims=tuple(over), keepdim=True if keepdim else None)

    return rule


def _softmax(one: Tracer, node: FxNode, x: Any, dim: int, to_float: bool = False) -> int:
    if to_float:
        raise Untraceable("a softmax of half precision to float")
    return one.b.add("softmax", one.operand(x), dim=dim)


def _mm(one: Tracer, node: FxNode, a: Any, b: Any) -> int:
    return one.b.add("matmul", one.operand(a), one.operand(b))


def _addmm(one: Tracer, node: FxNode, bias: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> int:
    made = _mm(one, node, a, b)
    if alpha != 1:
        made = one.b.add("mul", made, one.operand(alpha, one.beside(a)))
    if beta == 0:
        return made
    added = one.operand(bias)
    if beta != 1:
        added = one.b.add("mul", added, one.operand(beta, one.beside(a)))
    return one.b.add("add", made, added)


def _permute(one: Tracer, node: FxNode, x: Any, dims: Sequence[int]) -> int:
    return one.b.add("permute", one.operand(x), dims=tuple(dims))


def _transpose(one: Tracer, node: FxNode, x: Any, a: int, b: int) -> int:
    order = list(range(len(one.shape(x))))
    if order:  # a single number has no dimensions, and torch takes 0 and -1 for it
        order[a], order[b] = order[b], order[a]
    return one.b.add("permute", one.operand(x), dims=tuple(order))


def _t(one: Tracer, node: FxNode, x: Any) -> int:
    return one.operand(x) if len(one.shape(x)) < 2 else _transpose(one, node, x, 0, 1)


def _to_own_shape(op: str) -> Rule:
    """Views whose result's shape says all."""

    def rule(one: Tracer, node: FxNode, x: Any, *_: Any, **__: Any) -> int:
        shape = tuple(size_of(size) for size in node.meta["val"].shape)
        number = one.operand(x)
        return number if one.b.nodes[number].shape == shape else one.b.add(op, number, shape=shape)

    return rule


def _slice(one: Tracer, node: FxNode, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> int:
    length = one.shape(x)[dim]
    if step == 1 and start in (None, 0) and (end is None or end == sys.maxsize):
        return one.operand(x)
    if (
        step != 1
        or not isinstance(length, int)
        or not all(one_ is None or isinstance(one_, int) for one_ in (start, end))
    ):
        raise Untraceable("a slice with a step, or of unknown length")
    begin, stop, _ = slice(start, end).indices(length)
    if (begin, stop) == (0, length):
        return one.operand(x)
    return one.b.add("slice", one.operand(x), dim=dim, start=begin, stop=max(begin, stop))


def _select(one: Tracer, node: FxNode, x: Any, dim: int, index: Any) -> int:
    shape = one.shape(x)
    length = shape[dim]
    if not isinstance(index, int):
        raise Untraceable("a selection at a position that is computed")
    # A position beyond a size with a name was refused before: it would depend on that size.
    place = index if index >= 0 else length + index
    cut = one.b.add("slice", one.operand(x), dim=dim, start=place, stop=place + 1)
    dim %= len(shape)
    return one.b.add("reshape", cut, shape=(*shape[:dim], *shape[dim + 1 :]))


def _split(one: Tracer, node: FxNode, x: Any, sizes: Any, dim: int = 0) -> tuple[int, ...]:
    """Pieces along a dimension. Their sizes are those of the results: `sizes` is one number in `split`, else all of them."""
    made, start = [], 0
    for piece in node.meta["val"]:
        size = size_of(piece.shape[dim])
        if not isinstance(size, int):
            raise Untraceable("a split of unknown length")
        made.append(one.b.add("slice", one.operand(x), dim=dim, start=start, stop=start + size))
        start += size
    return tuple(made)


def _unbind(one: Tracer, node: FxNode, x: Any, dim: int = 0) -> tuple[int, ...]:
    return tuple(_select(one, node, x, dim, index) for index in range(len(node.meta["val"])))


def _arange(one: Tracer, node: FxNode, *bounds: Any, **__: Any) -> int:
    """arange(end), arange(start, end) and arange(start, end, step), from 0, 1, 2, …"""
    value = node.meta["val"]
    start, step = (bounds[0] if len(bounds) > 1 else 0), (bounds[2] if len(bounds) > 2 else 1)
    dtype = dtype_of(value)
    made = one.b.add("iota", shape=tuple(size_of(size) for size in value.shape), dim=0, dtype=dtype)
    if step != 1:
        made = one.b.add("mul", made, one.operand(step, dtype))
    return made if start == 0 else one.b.add("add", made, one.operand(start, dtype))


def _of_bools(op: str) -> Rule:
    def rule(one: Tracer, node: FxNode, *args: Any) -> int:
        if one.beside(*args) != "bool":
            raise Untraceable("bits of whole numbers")
        return one.b.add(op, *(one.operand(arg, "bool") for arg in args))

    return rule


def _cat(one: Tracer, node: FxNode, tensors: Sequence[Any], dim: int = 0) -> int:
    return one.b.add("concat", *(one.operand(tensor) for tensor in tensors), dim=dim)


def _same(one: Tracer, node: FxNode, x: Any, *_: Any, **__: Any) -> int:
    return one.operand(x)


def _cast(one: Tracer, node: FxNode, x: Any, *_: Any, **__: Any) -> int:
    value = node.meta["val"]
    if value.device != x.meta["val"].device:
        raise Untraceable("a move to another device")
    return one.b.add("cast", one.operand(x), dtype=dtype_of(value))


def _full(one: Tracer, node: FxNode, *args: Any, **__: Any) -> int:
    value = args[1]
    shape = tuple(size_of(size) for size in node.meta["val"].shape)
    if isinstance(value, bool):
        raise Untraceable("a tensor of one bool")
    return one.b.add("expand", one.operand(value, dtype_of(node.meta["val"])), shape=shape)


def _where(one: Tracer, node: FxNode, condition: Any, x: Any, y: Any) -> int:
    beside = one.beside(x, y)
    return one.b.add("where", one.operand(condition), one.operand(x, beside), one.operand(y, beside))


def _masked_fill(one: Tracer, node: FxNode, x: Any, mask: Any, value: Any) -> int:
    return one.b.add("where", one.operand(mask), one.operand(value, one.beside(x)), one.operand(x))


def _select_scatter(one: Tracer, node: FxNode, x: Any, value: Any, dim: int, index: Any) -> int:
    shape = one.shape(x)
    dim %= len(shape)
    length = shape[dim]
    if not isinstance(index, int) or not isinstance(length, int):
        raise Untraceable("a selection at an unknown position")
    beside = one.beside(x)
    lengths = tuple(length if place == dim else 1 for place in range(len(shape)))
    places = one.b.add("iota", shape=lengths, dim=dim, dtype="int64")
    here = one.b.add("eq", places, one.operand(index % length, "int64"))
    row = one.b.add("reshape", one.operand(value), shape=(*shape[:dim], 1, *shape[dim + 1 :]))
    if one.b.nodes[row].dtype != beside:
        row = one.b.add("cast", row, dtype=beside)
    return one.b.add("where", here, row, one.operand(x))


def _threshold_backward(one: Tracer, node: FxNode, grad: Any, x: Any, threshold: float) -> int:
    keep = one.b.add("gt", one.operand(x), one.operand(threshold, one.beside(x)))
    return one.b.add("where", keep, one.operand(grad), one.operand(0.0, one.beside(grad)))


def _attention(
    one: Tracer,
    node: FxNode,
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> int:
    if dropout:
        raise Untraceable("attention with dropout")
    rest = [] if mask is None else [one.operand(mask)]
    return one.b.add(
        "attention",
        *(one.operand(value) for value in (q, k, v)),
        *rest,
        masked=True if rest else None,
        causal="start" if causal else None,
        scale=scale,
    )


def _rms_norm(one: Tracer, node: FxNode, x: Any, shape: Sequence[int], weight: Any, eps: float) -> int:
    rest = [] if weight is None else [one.operand(weight)]
    return one.b.add("rms_norm", one.operand(x), *rest, rank=len(shape), eps=eps)


def _layer_norm(
    one: Tracer, node: FxNode, x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[int, ...]:
    """The normalized values, the means, and one over the deviations: the last two are what a backward pass reads."""
    if bias is not None and weight is None:
        raise Untraceable("a layer norm with a bias and no weight")
    number, dims = one.operand(x), tuple(range(-len(shape), 0))
    rest = [one.operand(value) for value in (weight, bias) if value is not None]
    made = one.b.add("layer_norm", number, *rest, rank=len(shape), eps=float(eps))
    mean, variance = _moments(one, number, dims)
    shifted = one.b.add("add", variance, one.b.constant(float(eps), one.b.nodes[variance].dtype))
    return made, mean, one.b.add("rsqrt", shifted)


def _fused_rms_norm(
    one: Tracer, node: FxNode, x: Any, shape: Sequence[int], weight: Any, eps: float | None
) -> tuple[int, ...]:
    """The normalized values, and one over the root of the mean square, in the dtype that torch sums in."""
    number, dims = one.operand(x), tuple(range(-len(shape), 0))
    wide = "float32" if one.b.nodes[number].dtype in ops.HALVES else one.b.nodes[number].dtype
    least = torch.finfo(getattr(torch, wide)).eps if eps is None else float(eps)
    rest = [] if weight is None else [one.operand(weight)]
    made = one.b.add("rms_norm", number, *rest, rank=len(shape), eps=least)
    widened = number if one.b.nodes[number].dtype == wide else one.b.add("cast", number, dtype=wide)
    mean = one.b.add("reduce", one.b.add("square", widened), how="mean", dims=dims, keepdim=True)
    return made, one.b.add("rsqrt", one.b.add("add", mean, one.b.constant(least, wide)))


def _moments(one: Tracer, number: int, dims: tuple[int, ...], least: int = 0) -> tuple[int, int]:
    """Mean and variance over dimensions, which stay with size 1; `least` is taken off the count."""
    if one.b.nodes[number].dtype in ops.HALVES:
        number = one.b.add("cast", number, dtype="float32")
    mean = one.b.add("reduce", number, how="mean", dims=dims, keepdim=True)
    squares = one.b.add("square", one.b.add("sub", number, mean))
    variance = one.b.add("reduce", squares, how="mean", dims=dims, keepdim=True)
    if least:
        shape = one.b.nodes[number].shape
        count = product(shape[dim] for dim in dims)
        if not isinstance(count, int) or count <= least:
            raise Untraceable("a variance of an unknown number of elements")
        variance = one.b.add("mul", variance, one.b.constant(count / (count - least), one.b.nodes[variance].dtype))
    return mean, variance


def _var_mean(
    one: Tracer, node: FxNode, x: Any, dims: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[int, ...]:
    number = one.operand(x)
    over = tuple(dims) if dims else tuple(range(len(one.b.nodes[number].shape)))
    mean, variance = _moments(one, number, over, 1 if correction is None else int(correction))
    if not keepdim:
        shapes = [tuple(size_of(size) for size in value.shape) for value in node.meta["val"]]
        variance, mean = (one.b.add("reshape", n, shape=s) for n, s in zip((variance, mean), shapes, strict=True))
    return variance, mean


SEVERAL: dict[Any, Any] = {
    aten.native_layer_norm.default: _layer_norm,
    **({aten._fused_rms_norm.default: _fused_rms_norm} if hasattr(aten, "_fused_rms_norm") else {}),  # since torch 2.9
    aten.var_mean.correction: _var_mean,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
}
RULES: dict[Any, Rule] = {
    **{
        getattr(aten, name).default: _pointwise(op)
        for name, op in {
            **{
                name: name
                for name in ("exp", "log", "sqrt", "rsqrt", "reciprocal", "neg", "abs", "sin", "cos", "erf", "tanh")
            },
            **{name: name for name in ("sigmoid", "silu", "relu", "floor", "log1p", "expm1", "maximum", "minimum")},
            "logical_not": "not",
            "logical_and": "and",
            "logical_or": "or",
            "square": "square",
        }.items()
    },
    **{
        getattr(getattr(aten, name), overload): _pointwise(name)
        for name in ("lt", "le", "gt", "ge", "eq", "ne")
        for overload in ("Tensor", "Scalar")
    },
    **{getattr(aten.mul, overload): _pointwise("mul") for overload in ("Tensor", "Scalar")},
    **{getattr(aten.pow, overload): _pointwise("pow") for overload in ("Tensor_Tensor", "Scalar")},
    aten.pow.Tensor_Scalar: _pow_by_number,
    **{
        getattr(getattr(aten, name), overload): _scaled(name)
        for name in ("add", "sub")
        for overload in ("Tensor", "Scalar")
    },
    **{getattr(aten.rsub, overload): _reversed("sub") for overload in ("Tensor", "Scalar")},
    **{getattr(aten.div, overload): _div for overload in ("Tensor", "Scalar")},
    aten.gelu.default: _gelu,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: lambda one, node, x, low: _clamp(one, node, x, low),
    aten.clamp_max.default: lambda one, node, x, high: _clamp(one, node, x, None, high),
    aten.sum.dim_IntList: _reduced("sum"),
    aten.sum.default: _reduced("sum"),
    aten.mean.dim: _reduced("mean"),
    aten.mean.default: _reduced("mean"),
    aten.amax.default: _reduced("max"),
    aten.amin.default: _reduced("min"),
    aten._softmax.default: _softmax,
    aten.mm.default: _mm,
    aten.bmm.default: _mm,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _addmm,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    **{op: _to_own_shape("reshape") for op in (aten.view.default, aten._unsafe_view.default, aten.reshape.default)},
    **{
        op: _to_own_shape("reshape")
        for op in (aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
    },
    aten.expand.default: _to_own_shape("expand"),
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.select_scatter.default: _select_scatter,
    aten.cat.default: _cat,
    **{op: _same for op in (aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default)},
    aten.lift_fresh_copy.default: _same,
    aten._to_copy.default: _cast,
    torch.ops.prims.convert_element_type.default: _cast,
    aten.full.default: _full,
    aten.where.self: _where,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.threshold_backward.default: _threshold_backward,
    aten.embedding.default: lambda one, node, table, ids, *_: one.b.add(
        "embedding", one.operand(table), one.operand(ids)
    ),
    aten.scaled_dot_product_attention.default: _attention,
    ATTENTION: lambda one, node, q, k, v, mask=None, causal=False, scale=None: _attention(
        one, node, q, k, v, mask, 0.0, causal, scale=scale
    ),
    RMS_NORM: _rms_norm,
    **{getattr(aten.arange, overload): _arange for overload in ("default", "start", "start_step")},
    aten.scalar_tensor.default: lambda one, node, value, **_: one.operand(value, dtype_of(node.meta["val"])),
    **{getattr(aten, f"bitwise_{op}").Tensor: _of_bools(op) for op in ("and", "or")},
    aten.bitwise_not.default: _of_bools("not"),
}


EVERY: dict[Any, Any] = {**RULES, **SEVERAL}


def traced(module: GraphModule) -> Graph:
    """A whole FX graph of ATen ops as one kernel graph. Raises Untraceable."""
    tracer = Tracer(EVERY)
    outputs: list[int] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            tracer.input(node)
        elif node.op == "output":
            returned = node.args[0]
            outputs = [tracer.numbers[one] for one in (returned if isinstance(returned, (list, tuple)) else [returned])]
        elif node.op == "call_function":
            tracer.add(node)
        else:
            raise Untraceable(f"{node.op} {node.target}")
    return tracer.b.graph(outputs)


def is_traceable(node: FxNode) -> bool:
    """Whether this node can be part of a kernel graph, whatever stands around it."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], FxNode) and node.args[0].target in SEVERAL and is_traceable(node.args[0])
    tracer = Tracer(EVERY)
    try:
        for source in node.all_input_nodes:
            if not isinstance(source.meta.get("val"), torch.Tensor):
                return False
            tracer.input(source)
        tracer.add(node)
    except Untraceable:
        return False
    return True
