"""Every op of kernel graphs, with the rule that gives its result's shape and dtype, or says why there is none. No torch.

Kinds say how the search treats an op: `pointwise` ops fuse with anything, `reduce` and `matmul` begin a loop, `view` ops
only rename elements, and a `composite` is also known by its parts (`lower`), which the search may fuse with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anytorch.errors import GraphError
from anytorch.graph.sizes import Shape, Size, SizeLike, product, words

if TYPE_CHECKING:
    from anytorch.graph.ir import Node

Attrs = Mapping[str, Any]
Rule = Callable[[Sequence["Node"], Attrs], tuple[Shape, str]]

# From the narrowest to the widest; a result takes the widest of its operands, two kinds of half precision float32.
DTYPES = ("bool", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
HALVES = ("float16", "bfloat16")
FLOATS = (*HALVES, "float32", "float64")

UNARY = (
    *("exp", "log", "sqrt", "rsqrt", "square", "reciprocal", "neg", "abs", "sin", "cos", "erf", "tanh", "sigmoid"),
    *("silu", "gelu", "gelu_tanh", "relu", "not", "floor", "log1p", "expm1"),
)
EXACT = {"neg", "abs", "square", "relu", "not", "floor"}  # of whole numbers these are whole numbers, the others floats
BINARY = ("add", "sub", "mul", "div", "pow", "maximum", "minimum")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
LOGICAL = ("and", "or")
REDUCTIONS = ("sum", "mean", "max", "min")


@dataclass(frozen=True)
class Op:
    name: str
    kind: str
    rule: Rule


def promoted(dtypes: Iterable[str]) -> str:
    """The dtype of a result of operands with these dtypes."""
    found = set(dtypes)
    if set(HALVES) <= found:
        found.add("float32")
    return max(found, key=DTYPES.index)


def broadcast(op: str, shapes: Sequence[Shape]) -> Shape:
    """The shape that all of these are stretched to, as in NumPy. Raises GraphError."""
    made: list[SizeLike] = []
    for place in range(1, max(map(len, shapes), default=0) + 1):
        sizes = {shape[-place] for shape in shapes if len(shape) >= place} - {1}
        if len(sizes) > 1:
            asked = " and ".join(map(words, shapes))
            raise GraphError(
                f"{op} of {asked} is invalid: sizes {' and '.join(map(str, sorted(sizes, key=str)))} in dimension "
                f"-{place} differ",
                hint="sizes must be equal, or one of them 1",
            )
        made.append(sizes.pop() if sizes else 1)
    return tuple(reversed(made))


def axis(op: str, dim: Any, rank: int) -> int:
    """`dim` counted from the front. Raises GraphError."""
    if not isinstance(dim, int) or isinstance(dim, bool) or not -rank <= dim < rank:
        raise GraphError(f"{op}: dim={dim} is invalid for a tensor of {rank} dimensions", hint=f"{-rank} to {rank - 1}")
    return dim % rank


def known(attrs: Attrs, op: str, *names: str) -> None:
    extra = set(attrs) - set(names)
    if extra:
        raise GraphError(f"{op} takes no {', '.join(sorted(extra))}; it takes {', '.join(names) or 'nothing'}")


def takes(nodes: Sequence[Node], op: str, least: int, most: int | None = None) -> None:
    if not least <= len(nodes) <= (most or least):
        wanted = str(least) if most in (None, least) else f"{least} to {most}"
        raise GraphError(f"{op} takes {wanted} tensors, not {len(nodes)}")


def wants_floats(nodes: Sequence[Node], op: str) -> None:
    for node in nodes:
        if node.dtype not in FLOATS:
            raise GraphError(
                f"{op} of {node.dtype}{words(node.shape)} is invalid: it needs floats", hint="cast it first"
            )


# --- rules -------------------------------------------------------------------------------------------------------------


def _input(nodes: Sequence[Node], attrs: Attrs) -> tuple[Shape, str]:
    known(attrs, "input", "shape", "dtype", "strides", "index", "name")
    shape, dtype = attrs["shape"], attrs["dtype"]
    check_dtype("new_input", dtype)
    for size in shape:
        if isinstance(size, bool) or not isinstance(size, (int, Size)) or (isinstance(size, int) and size < 0):
            raise GraphError(
                f"new_input: size {size!r} of {words(shape)} is invalid", hint="use whole numbers or names"
            )
    strides = attrs.get("strides")
    if strides is not None and len(strides) != len(shape):
        raise GraphError(
            f"new_input: {len(strides)} strides for {len(shape)} dimensions", hint="one for each dimension"
        )
    return shape, dtype


def check_dtype(op: str, dtype: Any) -> None:
    if dtype not in DTYPES:
        raise GraphError(f"{op}: unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")


def check_bytes(op: str, dtype: str, of: Sequence[str]) -> None:
    """Raise GraphError for arithmetic in int8: torch's wraps round at 128, which no kernel of ours does."""
    made = dtype == "int8" and OPS[op].kind not in ("input", "view", "gather")
    if made or (op == "reduce" and "int8" in of):
        raise GraphError(f"{op} in int8 is invalid: bytes are weights here", hint="cast them to a float first")


def _constant(nodes: Sequence[Node], attrs: Attrs) -> tuple[Shape, str]:
    known(attrs, "constant", "value", "dtype")
    check_dtype("constant", attrs["dtype"])
    if not isinstance(attrs["value"], (int, float, Size)):
        raise GraphError(f"constant: {attrs['value']!r} is not a number")
    return (), attrs["dtype"]


def _iota(nodes: Sequence[Node], attrs: Attrs) -> tuple[Shape, str]:
    """0, 1, 2, … along `dim`."""
    known(attrs, "iota", "shape", "dim", "dtype")
    check_dtype("iota", attrs["dtype"])
    axis("iota", attrs["dim"], len(attrs["shape"]))
    return attrs["shape"], attrs["dtype"]


def _unary(name: str) -> Rule:
    def rule(nodes: Sequence[Node], attrs: Attrs) -> tuple[Shape, str]:
        known(attrs, name)
        takes(nodes, name, 1)
        (x,) = nodes
        if name == "not":
            return x.shape, "bool"
        return x.shape, x.dtype if x.dtype in FLOATS or (name in EXACT and x.dtype != "bool") else "float32"

    return rule


def _binary(name: str) -> Rule:
    def rule(nodes: Sequence[Node], attrs: Attrs) -> tuple[Shape, str]:
        known(attrs, name)
        takes(nodes, name, 2)
        shape = broadcast(name, [node.shape for node in nodes])
        if name in COMPARISONS or name in LOGICAL:
            return shape, "bool"
        dtype = result_dtype(nodes)
        if (name == "sub" and any(node.dtype == "bool" for node in nodes)) or (name == "pow" and dtype == "bool"):
            asked = " and ".join(f"{node.dtype}{words(node.shape)}" for node in nodes)
            raise GraphError(f"{name} of {asked} is invalid: it needs numbers, not bools", hint="cast it first")
        return shape, "float32" if name == "div" and dtype not in FLOATS else dtype

    return rule


def result_dtype(nodes: Sequence[Node]) -> str:
    """As in torch: tensors with dimensions decide, others only where their kind (bool, whole, float) is higher."""

    def rank(dtype: str) -> int:
        return 2 if dtype in FLOATS else 1 if dtype.startswith("int") else 0

    kinds = [max((rank(n.dtype) for n in nodes if bool(n.shape) is wide), default=-1) for wide in (True, False)]
    deciding = [n.dtype for n in nodes if bool(n.shape) is (kinds[0] >= kinds[1])]
    return promoted(deciding)


def _where(nodes: Sequence[Node], attrs: Attrs) -> tuple[Shape, str]:
    known(attrs, "where")
    takes(nodes, "where", 3)
    if nodes[0].dtype != "bool":
        raise GraphError(f"where: the condition is {nodes[0].dtype}, not bool")
    return broadcast("where", [node.shape for node in nodes]), result_dtype(nodes[1:])


def _store(nodes: Sequence[Node], attrs: Attrs) -> tuple[Shape, str]:
    """The same value, which is written to memory here: what reads it is another kernel."""
    known(attrs, "store")
    takes(nodes, "store", 1)
    return nodes[0].shape, nodes[0].dtype


def _cast(nodes: Sequence[Node], attrs: Attrs) -> tuple[Shape, str]:
    known(attrs, "cast", "dtype")
    takes(nodes, "cast", 1)
    check_dtype("cast", attrs["dtype"])
    return nodes[0].shape, attrs["dtype"]


def _reduce(nodes: Sequence[Node], attrs: Attrs) -> tuple[Shape, str]:
    known(attrs, "reduce", "how", "dims", "keepdim")
    takes(nodes, "reduction", 1)
    (x,) = nodes
    how = attrs["how"]
    if how not in REDUCTIONS:
        raise GraphError(f"reduction: unknown kind {how!r}; known: {', '.join(REDUCTIONS)}")
    if how == "mean":
        wants_floats(nodes, "reduction of kind mean")
    dims = {axis("reduction", dim, len(x.shape)) for dim in attrs["dims"]}
    if not dims:
        raise GraphError("reduction: no dimensions are given")
    sizes = [1 if place in dims else size for place, size in enumerate(x.shape)]
    shape = sizes if attrs.get("keepdim") else [size for place, size in enumerate(x.shape) if place not in dims]
    if how in ("max", "min") and any(x.shape[dim] == 0 for dim in dims):
        raise GraphError(f"reduction: {how} of {words(x.shape)} is invalid: there is nothing to compare")
    whole = x.dtype in ("bool", "int8", "int32") and how == "sum"
    return tuple(shape), "int64" if whole else x.dtype


def _matmul(nodes: Sequence[Node], attrs: Attrs) -> tuple[Shape, str]:
    known(attrs, "matmul")
    takes(nodes, "matmul", 2)
    a, b = nodes
    asked = f"matmul of {words(a.shape)} and {words(b.shape)} is invalid"
    if min(len(a.shape), len(b.shape)) < 2:
        raise GraphError(f"{asked}: both need two dimensions or more", hint="reshape it to a row or a column first")
    if a.shape[-1] != b.shape[-2]:
        raise GraphError(
            f"{asked}: the last size of the first, {a.shape[-1]}, is not the second-to-last of the second, {b.shape[-2]}",
            hint="[…, m, k] and […, k, n] give […, m, n]",
        )
    if a.dtype != b.dtype:
        raise GraphError(f"matmul of {a.dtype} and {b.dtype} is invalid: dtypes differ", hint="cast one of them")
    wants_floats(nodes, "matmul")
    lead = broadcast("matmul", [a.shape[:-2], b.shape[:-2]])
    return (*lead, a.shape[-2], b.shape[-1]), a.dtype


def _permute(nodes: Sequence[Node], attrs: Attrs) -> tuple[Shape, str]:
    known(attrs, "permute", "dims")
    takes(nodes, "permute", 1)
    (x,) = nodes
    dims = [axis("permute", dim, len(x.shape)) for dim in attrs["dims"]]
    if sorted(dims) != list(range(len(x.shape))):
        raise GraphError(f"permute: dims={attrs['dims']} of {words(x.shape)} is invalid: name every dimension once")
    return tuple(x.shape[dim] for dim in dims), x.dtype


def _reshape(nodes: Sequence[Node], attrs: Attrs) -> tuple[Shape, str]:
    known(attrs, "reshape", "shape")
    takes(nodes, "reshape", 1)
    (x,) = nodes
    shape = attrs["shape"]
    if product(shape) != product(x.shape):
        raise GraphError(
            f"reshape of {words(x.shape)} to {words(shape)} is invalid: {product(x.shape)} elements are not "
            f"{product(shape)}"
        )
    return shape, x.dtype


def _expand(nodes: Sequence[Node], attrs: Attrs) -> tuple[Shape, str]:
    known(attrs, "expand", "shape")
    takes(nodes, "expand", 1)
    (x,) = nodes
    shape = attrs["shape"]
    padded = (1,) * (len(shape) - len(x.shape)) + x.shape
    if len(padded) != len(shape) or any(old not in (1, new) for old, new in zip(padded, shape, strict=True)):
        raise GraphError(f"expand of {words(x.shape)} to {words(shape)} is invalid: only sizes of 1 are repeated")
    return shape, x.dtype


def _slice(nodes: Sequence[Node], attrs: Attrs) -> tuple[Shape, str]:
    known(attrs, "slice", "dim", "start", "stop")
    takes(nodes, "slice", 1)
    (x,) = nodes
    dim = axis("slice", attrs["dim"], len(x.shape))
    start, stop, size = attrs["start"], attrs["stop"], x.shape[dim]
    bounds = (0, start, stop, size)
    numbers = [one for one in bounds if isinstance(one, int)]
    if numbers != sorted(numbers):
        raise GraphError(f"slice {start}:{stop} of dimension {dim} of {words(x.shape)} is invalid: it is outside")
    return (*x.shape[:dim], stop - start, *x.shape[dim + 1 :]), x.dtype


def _concat(nodes: Sequence[Node], attrs: Attrs) -> tuple[Shape, str]:
    known(attrs, "concat", "dim")
    if not nodes:
        raise GraphError("concat takes at least one tensor")
    first = nodes[0]
    dim = axis("concat", attrs["dim"], len(first.shape))
    for node in nodes[1:]:
        others = (*first.shape[:dim], *first.shape[dim + 1 :])
        if len(node.shape) != len(first.shape) or (*node.shape[:dim], *node.shape[dim + 1 :]) != others:
            raise GraphError(
                f"concat of {words(first.shape)} and {words(node.shape)} in dimension {dim} is invalid: other sizes differ"
            )
    length: SizeLike = 0
    for node in nodes:
        length = length + node.shape[dim]
    return (*first.shape[:dim], length, *first.shape[dim + 1 :]), promoted(node.dtype for node in nodes)


def _embedding(nodes: Sequence[Node], attrs: Attrs) -> tuple[Shape, str]:
    known(attrs, "embedding")
    takes(nodes, "embedding", 2)
    table, ids = nodes
    if len(table.shape) != 2 or ids.dtype not in ("int32", "int64"):
        raise GraphError(
            f"embedding of a table {table.dtype}{words(table.shape)} by {ids.dtype}{words(ids.shape)} is invalid",
            hint="the table is [rows, width], the ids are int32 or int64",
        )
    return (*ids.shape, table.shape[1]), table.dtype


def _softmax(nodes: Sequence[Node], attrs: Attrs) -> tuple[Shape, str]:
    known(attrs, "softmax", "dim")
    takes(nodes, "softmax", 1)
    wants_floats(nodes, "softmax")
    axis("softmax", attrs["dim"], len(nodes[0].shape))
    return nodes[0].shape, nodes[0].dtype


def _norm(op: str, most: int) -> Rule:
    """Over the last `rank` dimensions, times a weight, plus a bias."""

    def rule(nodes: Sequence[Node], attrs: Attrs) -> tuple[Shape, str]:
        known(attrs, op, "rank", "eps")
        takes(nodes, op, 1, most)
        wants_floats(nodes, op)
        x, *rest = nodes
        rank = attrs["rank"]
        if not isinstance(rank, int) or not 1 <= rank <= len(x.shape):
            raise GraphError(f"{op} of {words(x.shape)} over its last {rank} dimensions is invalid")
        over = x.shape[len(x.shape) - rank :]
        for node in rest:
            if node.shape != over:
                raise GraphError(
                    f"{op} of {words(x.shape)} is invalid: a weight or bias of {words(node.shape)} is not of the "
                    f"normalized shape {words(over)}"
                )
        if not isinstance(attrs["eps"], (int, float)) or not attrs["eps"] >= 0:
            raise GraphError(f"{op}: eps={attrs['eps']} is invalid: use a number that is not negative")
        return x.shape, result_dtype(nodes)

    return rule


def _rope(nodes: Sequence[Node], attrs: Attrs) -> tuple[Shape, str]:
    """x [..., n, d] turned by angles whose cos and sin are [..., n, d / 2]."""
    known(attrs, "rope", "interleaved")
    takes(nodes, "rope", 3)
    wants_floats(nodes, "rope")
    x, cos, sin = nodes
    width = x.shape[-1] if x.shape else None
    if not isinstance(width, int) or width % 2:
        raise GraphError(f"rope of {words(x.shape)} is invalid: the last size must be a known even number")
    wanted = (*x.shape[:-1], width // 2)
    for node in (cos, sin):
        if broadcast("rope", [wanted, node.shape]) != wanted:
            raise GraphError(
                f"rope of {words(x.shape)} by {words(node.shape)} is invalid: cos and sin must stretch to {words(wanted)}"
            )
    return x.shape, x.dtype


def _attention(nodes: Sequence[Node], attrs: Attrs) -> tuple[Shape, str]:
    """q [b, heads, n, d], k and v [b, kv_heads, t, d]; then a mask that is added or, of bools, keeps; then lengths [b]."""
    known(attrs, "attention", "causal", "scale", "masked", "counted")
    more = bool(attrs.get("masked")) + bool(attrs.get("counted"))
    takes(nodes, "attention", 3 + more)
    q, k, v = nodes[:3]
    wants_floats(nodes[:3], "attention")
    asked = f"attention of q {words(q.shape)}, k {words(k.shape)} and v {words(v.shape)} is invalid"
    if not len(q.shape) == len(k.shape) == len(v.shape) == 4:
        raise GraphError(f"{asked}: each has 4 dimensions", hint="[batch, heads, positions, width]")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise GraphError(f"{asked}: batch, key positions or widths differ")
    heads, groups = q.shape[1], k.shape[1]
    if not isinstance(heads, int) or not isinstance(groups, int) or heads % groups:
        raise GraphError(f"{asked}: {heads} query heads cannot share {groups} key heads evenly")
    if not isinstance(q.shape[3], int):
        raise GraphError(f"{asked}: the width of a head must be a known number")
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise GraphError(f"{asked}: dtypes {q.dtype}, {k.dtype} and {v.dtype} differ", hint="cast them")
    rest = list(nodes[3:])
    if attrs.get("masked"):
        scores = (*q.shape[:3], k.shape[2])
        mask = rest.pop(0)
        if broadcast("attention", [scores, mask.shape]) != scores:
            raise GraphError(f"{asked}: a mask of {words(mask.shape)} does not stretch to {words(scores)}")
    if attrs.get("counted") and (rest[0].shape != (q.shape[0],) or rest[0].dtype not in ("int32", "int64")):
        raise GraphError(
            f"{asked}: lengths are {rest[0].dtype}{words(rest[0].shape)}, not whole numbers, one per batch row"
        )
    if attrs.get("causal") not in (None, False, "start", "end"):
        raise GraphError(f"attention: causal={attrs['causal']!r} is invalid; known: False, 'start', 'end'")
    return (*q.shape[:3], v.shape[3]), q.dtype


def _handwritten(nodes: Sequence[Node], attrs: Attrs) -> tuple[Shape, str]:
    """What a kernel of `handwritten` computes of its arguments; `part` is the match that says what that is."""
    known(attrs, "handwritten", "kernel", "at", "part")
    result = getattr(attrs.get("part"), "result", None)
    if result is None:
        raise GraphError("handwritten is invalid: only a search puts such nodes into a graph")
    return result.shape, result.dtype


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op("input", "input", _input),
        Op("constant", "input", _constant),
        Op("iota", "pointwise", _iota),
        *(Op(name, "pointwise", _unary(name)) for name in UNARY),
        *(Op(name, "pointwise", _binary(name)) for name in (*BINARY, *COMPARISONS, *LOGICAL)),
        Op("where", "pointwise", _where),
        Op("cast", "pointwise", _cast),
        Op("store", "pointwise", _store),
        Op("reduce", "reduce", _reduce),
        Op("matmul", "matmul", _matmul),
        Op("permute", "view", _permute),
        Op("reshape", "view", _reshape),
        Op("expand", "view", _expand),
        Op("slice", "view", _slice),
        Op("concat", "view", _concat),
        Op("embedding", "gather", _embedding),
        Op("softmax", "composite", _softmax),
        Op("rms_norm", "composite", _norm("rms_norm", 2)),
        Op("layer_norm", "composite", _norm("layer_norm", 3)),
        Op("rope", "composite", _rope),
        Op("attention", "composite", _attention),
        Op("handwritten", "composite", _handwritten),
    )
}
