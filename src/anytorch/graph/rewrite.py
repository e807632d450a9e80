"""Algebraic rewrites: another graph for the same function, one that fuses better. Every result passes `field.check_same`.

Each rule looks at one node of a graph of primitive ops and either builds something else or declines. A rewrite never
changes what a graph takes or gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anytorch import logs
from anytorch.errors import GraphError
from anytorch.graph.ir import Builder, Graph, Node
from anytorch.graph.ops import HALVES
from anytorch.graph.sizes import SizeLike

log = logs.logger(__name__)

Rule = Callable[["Rewriter", Node, Sequence[int]], "int | None"]


class Rewriter:
    """A graph being built from another one."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.b = graph, Builder()

    def run(self, rules: Sequence[Rule]) -> Graph:
        numbers: list[int] = []
        for _, node in self.graph:
            args = [numbers[arg] for arg in node.args]
            made = next((found for rule in rules if (found := self._tried(rule, node, args)) is not None), None)
            numbers.append(self.b.add(node.op, *args, **dict(node.attrs)) if made is None else made)
        return self.b.graph(numbers[one] for one in self.graph.outputs)

    def _tried(self, rule: Rule, node: Node, args: Sequence[int]) -> int | None:
        """What a rule makes of a node; None where it declines, or where what it builds is no graph after all."""
        try:
            return rule(self, node, args)
        except GraphError as exc:
            log.debug("a rewrite does not fit: %s", exc)
            return None

    def node(self, number: int) -> Node:
        return self.b.nodes[number]

    def through_casts(self, number: int) -> int:
        """The value before it was rounded to half precision, or widened from it."""
        while self.node(number).op == "cast" and self.node(self.node(number).args[0]).dtype in (*HALVES, "float32"):
            if self.node(number).dtype not in (*HALVES, "float32"):
                break
            (number,) = self.node(number).args
        return number


def scale_after_matmul(one: Rewriter, node: Node, args: Sequence[int]) -> int | None:
    """(x * s) @ w = (x @ w) * s, and the same for x / s, where s has one number per row.

    A norm's row scale or a softmax's denominator is then known only when the product is done, so both can share its loop.
    """
    if node.op != "matmul":
        return None
    x, factors = args[0], []
    while True:
        inner = one.through_casts(x)
        found = one.node(inner)
        split = _row_factor(one, found)
        if split is None:
            seen = _through_rows(one, found)
            if seen is None:
                break
            op, x, factor = seen
            factors.append((op, factor))
            continue
        x, factor = split
        factors.append((found.op, factor))
    # x * a * s: what does not change along a row may stand anywhere in the product.
    if not factors:
        return None
    if one.node(x).dtype != node.dtype:
        x = one.b.add("cast", x, dtype=node.dtype)
    made = one.b.add("matmul", x, args[1])
    wide = "float32" if node.dtype in HALVES else node.dtype
    if wide != node.dtype:
        made = one.b.add("cast", made, dtype=wide)
    for op, factor in reversed(factors):
        made = one.b.add(op, made, factor)
    return made if wide == node.dtype else one.b.add("cast", made, dtype=node.dtype)


def _row_factor(one: Rewriter, found: Node) -> tuple[int, int] | None:
    """(x, s) where the node is x * s or x / s and s does not change along the last dimension, possibly within x * w."""
    if found.op not in ("mul", "div"):
        return None
    left, right = found.args
    if _by_row(one, right, found.shape):
        return left, right
    if found.op == "mul" and _by_row(one, left, found.shape):
        return right, left
    if found.op != "mul":
        return None
    for inner, other in ((left, right), (right, left)):  # (x * s) * w = (x * w) * s
        product = one.node(inner)
        if product.op == "mul":
            for x, factor in (product.args, tuple(reversed(product.args))):
                if _by_row(one, factor, found.shape) and one.node(x).shape == found.shape:
                    return one.b.add("mul", x, other), factor
    return None


def _through_rows(one: Rewriter, found: Node) -> tuple[str, int, int] | None:
    """(op, x, s) where the node is a reshape of x * s or x / s that leaves rows as they are: linear layers flatten so."""
    if found.op != "reshape":
        return None
    below = one.node(one.through_casts(found.args[0]))
    if below.shape[-1:] != found.shape[-1:] or not found.shape or found.shape[-1] == 1:
        return None
    split = _row_factor(one, below)
    if split is None or one.node(split[0]).shape != below.shape or one.node(split[1]).shape != (*below.shape[:-1], 1):
        return None
    x = one.b.add("reshape", split[0], shape=found.shape)
    return below.op, x, one.b.add("reshape", split[1], shape=(*found.shape[:-1], 1))


def _by_row(one: Rewriter, number: int, shape: Sequence[SizeLike]) -> bool:
    own = one.node(number).shape
    return len(own) == len(shape) and own[-1] == 1 and shape[-1] != 1


def column_scales_after_matmul(one: Rewriter, node: Node, args: Sequence[int]) -> int | None:
    """x @ (w * s) = (x @ w) * s for one s per column, and x @ (w * g) = (x * g) @ w for one g per row.

    Normed keys and weights with scales are then multiplied as they lie in memory. Looks through views: w is often wᵀ.
    """
    if node.op != "matmul":
        return None
    number, views = args[1], []
    while (found := one.node(number)).op == "cast" or _keeps_matrices(one, found):
        if found.op != "cast":
            views.append(found)
        (number,) = found.args
    factors: list[int] = []
    while one.node(number).op == "mul":
        split = _thin_factor(one, one.node(number))
        if split is None:
            break
        number, factor = split
        factors.append(factor)
    w = one.through_casts(number)
    if not factors or one.node(w).dtype != node.dtype:
        return None
    rank = len(one.node(w).shape)
    shown = [_shown(one, one.b.add("reshape", f, shape=_filled(one.node(f).shape, rank)), views) for f in factors]
    w = _shown(one, w, views)
    x, wide = args[0], "float32" if node.dtype in HALVES else node.dtype
    by_row = [f for f in shown if one.node(f).shape[-2] != 1]
    if by_row:
        x = one.through_casts(x)
        x = x if one.node(x).dtype == wide else one.b.add("cast", x, dtype=wide)
        for factor in by_row:
            own = len(one.node(factor).shape)
            turned = one.b.add("permute", factor, dims=(*range(own - 2), own - 1, own - 2))
            x = one.b.add("mul", x, turned)
        x = x if wide == node.dtype else one.b.add("cast", x, dtype=node.dtype)
    made = one.b.add("matmul", x, w)
    made = made if wide == node.dtype else one.b.add("cast", made, dtype=wide)
    for factor in shown:
        if factor not in by_row:
            made = one.b.add("mul", made, factor)
    if one.node(made).shape != node.shape:
        return None
    return made if wide == node.dtype else one.b.add("cast", made, dtype=node.dtype)


def _keeps_matrices(one: Rewriter, found: Node) -> bool:
    """Whether it is a view that keeps the last two dimensions as they are, or swaps them."""
    if found.op == "permute":
        rank = len(found.shape)
        return tuple(dim % rank for dim in found["dims"]) == (*range(rank - 2), rank - 1, rank - 2)
    return found.op == "reshape" and len(found.shape) >= 2 and one.node(found.args[0]).shape[-2:] == found.shape[-2:]


def _thin_factor(one: Rewriter, found: Node) -> tuple[int, int] | None:
    """(w, s) where the node is w * s and s is the same along the last dimension or along the one before it."""
    for w, factor in (found.args, tuple(reversed(found.args))):
        own = _filled(one.node(factor).shape, len(found.shape))
        if one.node(w).shape == found.shape and len(found.shape) >= 2 and (own[-1] == 1) != (own[-2] == 1):
            return w, factor
    return None


def _filled(shape: Sequence[SizeLike], rank: int) -> tuple[SizeLike, ...]:
    return (*(1 for _ in range(rank - len(shape))), *shape)


def _shown(one: Rewriter, number: int, views: Sequence[Node]) -> int:
    """The views of another tensor, the last one first, taken of one with the same last dimensions, or 1 in their place."""
    for view in reversed(views):
        shape = one.node(number).shape
        if view.op == "permute":
            number = one.b.add("permute", number, dims=view["dims"])
            continue
        lead = view.shape[:-2]
        if all(size == 1 for size in shape[:-2]):
            lead = tuple(1 for _ in lead)
        number = one.b.add("reshape", number, shape=(*lead, *shape[-2:]))
    return number


def split_products(parts: int) -> Rule:
    """x @ w as a sum of `parts` products over shorter rows, each computed by others than the next: few rows and columns
    alone do not keep a large device busy."""

    def rule(one: Rewriter, node: Node, args: Sequence[int]) -> int | None:
        if node.op != "matmul":
            return None
        x, w = args
        *lead, m, k = one.node(x).shape
        if one.node(w).shape[:-2] or not isinstance(k, int) or k % parts or k // parts < 64:
            return None
        wide = "float32" if node.dtype in HALVES else node.dtype
        x, w = (number if wide == node.dtype else one.b.add("cast", number, dtype=wide) for number in (x, w))
        n, rank = one.node(w).shape[-1], len(lead) + 2
        rows = one.b.add("reshape", x, shape=(*lead, m, parts, k // parts))
        rows = one.b.add("permute", rows, dims=(rank - 1, *range(rank - 1), rank))  # [parts, ..., m, k / parts]
        columns = one.b.add("reshape", w, shape=(parts, *(1 for _ in lead), k // parts, n))
        made = one.b.add("store", one.b.add("matmul", rows, columns))
        made = one.b.add("reduce", made, how="sum", dims=(0,))
        return made if wide == node.dtype else one.b.add("cast", made, dtype=node.dtype)

    return rule


def split_softmax(parts: int) -> Rule:
    """softmax(x) @ v in `parts` parts of the rows of v, each with a maximum and a sum of its own; then all are joined.

    Looks for what `scale_after_matmul` leaves: (exp(x - max(x)) @ v) / sum(exp(x - max(x))).
    """

    def rule(one: Rewriter, node: Node, args: Sequence[int]) -> int | None:
        found = _softmax_product(one, node, args)
        if found is None:
            return None
        x, v, bound, least = found
        *lead, n, t = one.node(x).shape
        *v_lead, _, d = one.node(v).shape
        if not isinstance(t, int) or t % parts or t // parts < 16 or len(v_lead) != len(lead):
            return None
        rank = len(lead)
        pieces = one.b.add("reshape", x, shape=(*lead, n, parts, t // parts))
        pieces = one.b.add(
            "permute", pieces, dims=(*range(rank), rank + 1, rank, rank + 2)
        )  # [..., parts, n, t / parts]
        top = one.b.add("reduce", pieces, how="max", dims=(-1,), keepdim=True)
        shift = top if bound is None else one.b.add("maximum", top, bound)
        e = one.b.add("exp", one.b.add("sub", pieces, shift))
        total = one.b.add("reduce", e, how="sum", dims=(-1,), keepdim=True)
        values = one.b.add("reshape", v, shape=(*v_lead, parts, t // parts, d))
        wide = one.node(x).dtype
        half = one.node(v).dtype
        weights = e if half == wide else one.b.add("cast", one.b.add("cast", e, dtype=half), dtype=wide)
        values = values if half == wide else one.b.add("cast", values, dtype=wide)
        made = one.b.add("matmul", weights, values)  # [..., parts, n, d]
        made, total, shift = (one.b.add("store", number) for number in (made, total, shift))
        most = one.b.add("reduce", shift, how="max", dims=(rank,), keepdim=True)
        scale = one.b.add("exp", one.b.add("sub", shift, most))
        joined, sums = (
            one.b.add("reduce", one.b.add("mul", number, scale), how="sum", dims=(rank,)) for number in (made, total)
        )
        return one.b.add("div", joined, sums if least is None else one.b.add("maximum", sums, least))

    return rule


def _softmax_product(one: Rewriter, node: Node, args: Sequence[int]) -> tuple[int, int, int | None, int | None] | None:
    """(x, v, bound, least) where the node divides exp(x - max(x)) @ v by the sum of exp(x - max(x)); the maximum may be
    bounded from below by `bound`, the sum by `least`."""
    if node.op != "div":
        return None
    product = one.node(one.through_casts(args[0]))
    total, least = _bounded(one, args[1])
    if product.op != "matmul" or one.node(total).op != "reduce" or one.node(total)["how"] != "sum":
        return None
    e = one.through_casts(product.args[0])
    if one.through_casts(one.node(total).args[0]) != e or one.node(e).op != "exp":
        return None
    shifted = one.node(one.node(e).args[0])
    if shifted.op != "sub":
        return None
    x, shift = shifted.args
    top, bound = _bounded(one, shift)
    most = one.node(top)
    if most.op != "reduce" or most["how"] != "max" or most.args[0] != x:
        return None
    return x, product.args[1], bound, least


def _bounded(one: Rewriter, number: int) -> tuple[int, int | None]:
    """(value, bound) of maximum(value, bound); (value, None) of anything else."""
    found = one.node(one.through_casts(number))
    if found.op == "maximum" and one.node(found.args[1]).op == "constant":
        return found.args[0], found.args[1]
    return one.through_casts(number), None


def rewritten(graph: Graph, *rules: Rule) -> Graph:
    """The graph after these rewrites, one after another."""
    for rule in rules or (scale_after_matmul, column_scales_after_matmul):
        graph = Rewriter(graph).run([rule])
    return graph
