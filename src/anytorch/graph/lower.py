"""Composite ops by their parts: a softmax is a maximum, a difference, exponentials, a sum and a quotient.

The search begins with these parts, because the parts are what fuses with an op's neighbours; the whole op stays a candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container

from anytorch.graph.ir import Builder, Graph, Node
from anytorch.graph.ops import HALVES
from anytorch.graph.sizes import Shape

LOWEST, LEAST = (
    -1e30,
    1e-30,
)  # bounds of a row's maximum and sum where all of it may be masked; no other row reaches them
Lower = Callable[[Builder, Node, "list[int]"], int]


def lowered(graph: Graph, keep: Container[str] = ()) -> Graph:
    """The same graph without composite ops, but for those named in `keep`."""
    builder = Builder()
    numbers: list[int] = []
    for _, node in graph:
        args = [numbers[arg] for arg in node.args]
        rule = None if node.op in keep else RULES.get(node.op)
        numbers.append(builder.add(node.op, *args, **dict(node.attrs)) if rule is None else rule(builder, node, args))
    return builder.graph(numbers[one] for one in graph.outputs)


class Maths:
    """Arithmetic on node numbers, with Python numbers as constants. Half precision is computed in float32."""

    def __init__(self, builder: Builder) -> None:
        self.b = builder

    def __call__(self, op: str, *args: int | float, **attrs: object) -> int:
        made = [arg if isinstance(arg, int) else self.b.constant(arg, "float32") for arg in args]
        return self.b.add(op, *made, **attrs)

    def wide(self, x: int) -> int:
        return self.b.add("cast", x, dtype="float32") if self.b.nodes[x].dtype in HALVES else x

    def to(self, x: int, dtype: str) -> int:
        return x if self.b.nodes[x].dtype == dtype else self.b.add("cast", x, dtype=dtype)

    def reduce(self, how: str, x: int, dims: tuple[int, ...]) -> int:
        return self.b.add("reduce", x, how=how, dims=dims, keepdim=True)


def _softmax(builder: Builder, node: Node, args: list[int]) -> int:
    maths = Maths(builder)
    return maths.to(_softmax_of(maths, maths.wide(args[0]), node["dim"]), node.dtype)


def _softmax_of(maths: Maths, x: int, dim: int, *, masked: bool = False) -> int:
    """With `masked`, rows in which everything is minus infinity give zeros, as torch's attention does, and not NaN."""
    top = maths.reduce("max", x, (dim,))
    e = maths("exp", maths("sub", x, maths("maximum", top, LOWEST) if masked else top))
    total = maths.reduce("sum", e, (dim,))
    return maths("div", e, maths("maximum", total, LEAST) if masked else total)


def _rms_norm(builder: Builder, node: Node, args: list[int]) -> int:
    maths = Maths(builder)
    x, *weight = (maths.wide(arg) for arg in args)
    dims = tuple(range(-node["rank"], 0))
    mean = maths.reduce("mean", maths("square", x), dims)
    made = maths("mul", x, maths("rsqrt", maths("add", mean, float(node["eps"]))))
    for one in weight:
        made = maths("mul", made, one)
    return maths.to(made, node.dtype)


def _layer_norm(builder: Builder, node: Node, args: list[int]) -> int:
    maths = Maths(builder)
    x, *rest = (maths.wide(arg) for arg in args)
    dims = tuple(range(-node["rank"], 0))
    centred = maths("sub", x, maths.reduce("mean", x, dims))
    variance = maths.reduce("mean", maths("square", centred), dims)
    made = maths("mul", centred, maths("rsqrt", maths("add", variance, float(node["eps"]))))
    for op, one in zip(("mul", "add"), rest, strict=False):
        made = maths(op, made, one)
    return maths.to(made, node.dtype)


def _rope(builder: Builder, node: Node, args: list[int]) -> int:
    maths = Maths(builder)
    x, cos, sin = (maths.wide(arg) for arg in args)
    shape = builder.nodes[x].shape
    half = shape[-1] // 2
    last = len(shape) - 1
    if node["interleaved"]:
        pairs = builder.add("reshape", x, shape=(*shape[:-1], half, 2))
        parts = [builder.add("slice", pairs, dim=last + 1, start=n, stop=n + 1) for n in (0, 1)]
        first, second = (builder.add("reshape", part, shape=(*shape[:-1], half)) for part in parts)
    else:
        first = builder.add("slice", x, dim=last, start=0, stop=half)
        second = builder.add("slice", x, dim=last, start=half, stop=shape[-1])
    turned = [
        maths("sub", maths("mul", first, cos), maths("mul", second, sin)),
        maths("add", maths("mul", second, cos), maths("mul", first, sin)),
    ]
    if node["interleaved"]:
        columns = [builder.add("reshape", one, shape=(*shape[:-1], half, 1)) for one in turned]
        made = builder.add("reshape", builder.add("concat", *columns, dim=last + 1), shape=shape)
    else:
        made = builder.add("concat", *turned, dim=last)
    return maths.to(made, node.dtype)


def _attention(builder: Builder, node: Node, args: list[int]) -> int:
    """Query heads that share keys get a dimension of their own, [b, groups, shared, n, d], over which keys are stretched."""
    maths = Maths(builder)
    q, k, v, *rest = args
    b, heads, n, width = builder.nodes[q].shape
    _, groups, t, _ = builder.nodes[k].shape
    out_width = builder.nodes[v].shape[3]
    assert isinstance(heads, int) and isinstance(groups, int) and isinstance(width, int)
    shared = heads // groups
    rows = builder.add("reshape", q, shape=(b, groups, shared, n, width))
    keys = builder.add("reshape", k, shape=(b, groups, 1, t, width))
    scores = maths.wide(builder.add("matmul", rows, builder.add("permute", keys, dims=(0, 1, 2, 4, 3))))
    scale = float(node["scale"]) if node["scale"] is not None else 1 / math.sqrt(width)
    scores = maths("mul", scores, scale)
    left = list(rest)
    if node["masked"]:
        mask = _by_groups(builder, left.pop(0), groups, shared)
        if builder.nodes[mask].dtype == "bool":
            scores = maths("where", mask, scores, -math.inf)
        else:
            scores = maths("add", scores, maths.wide(mask))
    keep = _kept(maths, node, (b, n, t), left[0] if left else None)
    if keep is not None:
        scores = maths("where", keep, scores, -math.inf)
    masked = keep is not None or bool(node["masked"])
    weights = maths.to(_softmax_of(maths, scores, 4, masked=masked), node.dtype)
    made = builder.add("matmul", weights, builder.add("reshape", v, shape=(b, groups, 1, t, out_width)))
    return builder.add("reshape", made, shape=(b, heads, n, out_width))


def _by_groups(builder: Builder, mask: int, groups: int, shared: int) -> int:
    """A mask that stretches to [b, heads, n, t], as one that stretches to [b, groups, shared, n, t]."""
    shape = builder.nodes[mask].shape
    if len(shape) < 3:
        return mask
    *lead, heads, n, t = shape
    split = (1, 1) if heads == 1 else (groups, shared)
    return builder.add("reshape", mask, shape=(*lead, *split, n, t))


def _kept(maths: Maths, node: Node, sizes: Shape, lengths: int | None) -> int | None:
    """Which scores order and lengths allow: bools that stretch to [b, groups, shared, n, t]; None if all."""
    b, n, t = sizes
    columns = maths.b.add("iota", shape=(t,), dim=0, dtype="int64")
    rows = maths.b.add("iota", shape=(n, 1), dim=0, dtype="int64")
    ends = None
    if lengths is not None:
        ends = maths.b.add("cast", maths.b.add("reshape", lengths, shape=(b, 1, 1, 1, 1)), dtype="int64")
    causal = node["causal"]
    if causal == "end":
        # The last row sees everything; with lengths, everything that counts.
        total = maths.b.constant(t, "int64") if ends is None else ends
        return maths("le", columns, maths("add", rows, maths("sub", total, maths.b.constant(n, "int64"))))
    keep = None if ends is None else maths("lt", columns, ends)
    if causal == "start":
        ahead = maths("le", columns, rows)
        keep = ahead if keep is None else maths("and", keep, ahead)
    return keep


RULES: dict[str, Lower] = {
    "softmax": _softmax,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "rope": _rope,
    "attention": _attention,
}
