"""The loop form of a kernel: for every point of some axes, an expression of loads, functions and reductions, and a store.

    for m, n:  out[m * 6144 + n] = sum(k: x[m * 4096 + k] * w[k * 6144 + n]) * rsqrt(sum(k: square(x[m * 4096 + k])) / 4096)

All emitters read this form. It is made by asking for a node's value at an index (`Reader.at`): a pointwise op asks its
arguments at the same index, a view at another one, a reduction at one with a new axis, and a tensor in memory is a load. So
views cost nothing, and the parts of a group that compute the same thing are one expression.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from anytorch.graph import ops
from anytorch.graph.indices import Index, exactly, linear
from anytorch.graph.ir import Graph, Node
from anytorch.graph.sizes import Shape, Size, SizeLike, product, row_major

# --- expressions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expr:
    """`op` is a pointwise op of `ops`, or: load (of `buffer` at `index`), constant (`value`), position (`index`), reduced,
    choose (a `where` whose branches exist only where they are chosen).

    The hash is computed once: expressions are large, and shared.
    """

    op: str
    args: tuple[Expr, ...] = ()
    dtype: str = "float32"
    value: Any = None
    buffer: int = -1
    index: Index | None = None
    reduction: Reduction | None = None

    @cached_property
    def _hash(self) -> int:
        return hash((self.op, self.args, self.dtype, self.value, self.buffer, self.index, self.reduction))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def axes(self) -> frozenset[str]:
        """The axes its value depends on."""
        found = frozenset().union(*(arg.axes for arg in self.args), self.index.axes if self.index else ())
        return found | self.reduction.axes if self.reduction else found

    @cached_property
    def reductions(self) -> frozenset[Reduction]:
        """Every reduction in it, those inside of others included."""
        inner = [*self.args, *(self.reduction.bodies if self.reduction else ())]
        found = frozenset().union(*(one.reductions for one in inner))
        return found | {self.reduction} if self.reduction else found

    def walk(self) -> Iterator[Expr]:
        """Every expression in it once, arguments first, bodies of reductions included."""
        seen: set[Expr] = set()

        def visit(one: Expr) -> Iterator[Expr]:
            if one in seen:
                return
            seen.add(one)
            for arg in one.args:
                yield from visit(arg)
            if one.reduction:
                for body in one.reduction.bodies:
                    yield from visit(body)
            yield one

        return visit(self)

    def __str__(self) -> str:
        if self.op == "load":
            return f"b{self.buffer}[{self.index}]"
        if self.op in ("constant", "position"):
            return str(self.value if self.op == "constant" else self.index)
        if self.reduction:
            return str(self.reduction)
        return f"{self.op}({', '.join(map(str, self.args))})"


@dataclass(frozen=True)
class Reduction:
    """`how` of `bodies` over `over` (names of axes): sum, max, min; or dot: the sum of the product of two bodies."""

    how: str
    bodies: tuple[Expr, ...]
    over: tuple[str, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.how, self.bodies, self.over))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def axes(self) -> frozenset[str]:
        return frozenset().union(*(body.axes for body in self.bodies)) - set(self.over)

    def __str__(self) -> str:
        return f"{self.how}({', '.join(self.over)}: {' * '.join(map(str, self.bodies))})"


@dataclass(frozen=True)
class Store:
    buffer: int
    index: Index
    value: Expr

    def __str__(self) -> str:
        return f"b{self.buffer}[{self.index}] = {self.value}"


@dataclass(frozen=True)
class Buffer:
    """A tensor in memory: which node of the graph it holds, its dtype, and how many elements it has."""

    node: int
    dtype: str
    elements: SizeLike
    written: bool = False


@dataclass(frozen=True)
class Kernel:
    """One launch. `axes` are the parallel ones; `extents` has the reduced ones too."""

    axes: tuple[str, ...]
    extents: Mapping[str, SizeLike]
    buffers: tuple[Buffer, ...]
    stores: tuple[Store, ...]

    @cached_property
    def reductions(self) -> tuple[Reduction, ...]:
        """Every reduction, those inside of others first."""
        found: dict[Reduction, None] = {}
        for store in self.stores:
            for expr in store.value.walk():
                if expr.reduction:
                    found.setdefault(expr.reduction)
        return tuple(found)

    def __str__(self) -> str:
        axes = ", ".join(f"{axis}<{self.extents[axis]}" for axis in self.axes)
        return "\n".join([f"for {axes}:", *(f"  {store}" for store in self.stores)])


def _can_be_masked(value: Expr, axes: frozenset[str]) -> bool:
    """Whether all loads in it can be masked where a position on these axes is not that of an element.

    A reduction is computed once for all who need it, chosen or not; and a load that changes with some of the axes alone
    has no room for the mask of all of them.
    """
    loads = [one.index.axes for one in value.walk() if one.op == "load" and one.index is not None]
    return not value.reductions and all(axes <= own or not axes & own for own in loads)


# --- from a group of nodes to a kernel ---------------------------------------------------------------------------------


@dataclass
class Reader:
    """Gives values of nodes at indices. `stored` are the nodes that are in memory, each with its strides and offset."""

    graph: Graph
    stored: Mapping[int, Shape]
    extents: dict[str, SizeLike] = field(default_factory=dict)
    buffers: dict[int, Buffer] = field(default_factory=dict)
    _seen: dict[tuple[Any, ...], Expr] = field(default_factory=dict)
    _around: tuple[str, ...] = ()  # the axes that the reductions around what is asked for go over
    _reduced: dict[SizeLike, list[str]] = field(default_factory=dict)

    def at(self, number: int, index: tuple[Index, ...]) -> Expr:
        """The value of a node at an index, one `Index` per dimension."""
        # A reduction inside of another one that it changes with must not go over the same axis.
        within = {axis for one in index for axis in one.axes}
        key = (number, index, self._around if within & set(self._around) else ())
        if key not in self._seen:
            self._seen[key] = self._made(number, self.graph.nodes[number], index)
        return self._seen[key]

    def buffer(self, number: int, *, written: bool = False) -> int:
        """The place of a node's buffer among the kernel's."""
        if number not in self.buffers:
            node = self.graph.nodes[number]
            self.buffers[number] = Buffer(number, node.dtype, product(node.shape), written)
        return list(self.buffers).index(number)

    def _made(self, number: int, node: Node, index: tuple[Index, ...]) -> Expr:
        if number in self.stored:
            place = linear(index, self.stored[number])
            return Expr("load", dtype=node.dtype, buffer=self.buffer(number), index=place)
        if node.op == "constant":
            value = node["value"]
            if isinstance(value, Size):
                return Expr("position", dtype=node.dtype, index=Index(start=value))
            return Expr("constant", dtype=node.dtype, value=value)
        if node.op == "iota":
            return Expr("position", dtype=node.dtype, index=index[node["dim"]])
        if node.kind == "view":
            return self._viewed(node, index)
        if node.op == "store":
            return self.at(node.args[0], index)
        if node.kind == "pointwise":
            args = tuple(self.at(arg, self._stretched(arg, index)) for arg in node.args)
            return Expr(node.op, args, node.dtype)
        if node.op == "reduce":
            return self._reduce(node, index)
        if node.op == "matmul":
            return self._matmul(node, index)
        raise NotImplementedError(f"{node.op} has no loop form of its own")

    def _stretched(self, number: int, index: Sequence[Index]) -> tuple[Index, ...]:
        """The index into a node that is broadcast to more dimensions or larger ones."""
        shape = self.graph.nodes[number].shape
        own = index[len(index) - len(shape) :]
        return tuple(Index() if size == 1 else one for size, one in zip(shape, own, strict=True))

    def _viewed(self, node: Node, index: tuple[Index, ...]) -> Expr:
        if node.op == "concat":
            return self._concat(node, index)
        (arg,) = node.args
        shape = self.graph.nodes[arg].shape
        if node.op == "permute":
            source = [Index()] * len(shape)
            for place, dim in enumerate(node["dims"]):
                source[dim % len(shape)] = index[place]
            return self.at(arg, tuple(source))
        if node.op == "expand":
            return self.at(arg, self._stretched(arg, index))
        if node.op == "slice":
            dim = node["dim"] % len(shape)
            return self.at(arg, (*index[:dim], index[dim] + node["start"], *index[dim + 1 :]))
        return self.at(arg, self.reshaped(index, node.shape, shape))

    def reshaped(self, index: Sequence[Index], new: Shape, old: Shape) -> tuple[Index, ...]:
        """The index into a tensor of shape `old` where one of shape `new` with the same elements has `index`.

        Dimensions are matched in runs with equal products, so that only what is split or merged is divided.
        """
        made: list[Index] = []
        left_new, left_old = list(zip(new, index, strict=True)), list(old)
        while left_old:
            run_new, run_old = ([left_new.pop(0)] if left_new else []), [left_old.pop(0)]
            while product(size for size, _ in run_new) != product(run_old):
                if left_new and not (left_old and _larger(product(s for s, _ in run_new), product(run_old))):
                    run_new.append(left_new.pop(0))
                elif left_old:
                    run_old.append(left_old.pop(0))
                else:
                    break
            place = linear([one for _, one in run_new], row_major([size for size, _ in run_new]))
            found: list[Index] = []
            for size in reversed(run_old[1:]):
                place, rest = place.divided(size, self.extents)
                found.append(rest)
            made += [place, *reversed(found)] if run_old[0] != 1 else [Index(), *reversed(found)]
        return tuple(made)

    def _concat(self, node: Node, index: tuple[Index, ...]) -> Expr:
        """Chosen by the position. What is not chosen may not exist: emitters mask the loads under a `choose`, and where they
        cannot, the position goes round, so that it is always one that exists."""
        dim = node["dim"] % len(node.shape)
        found: Expr | None = None
        begin: SizeLike = node.shape[dim]
        for arg in reversed(node.args):
            size = self.graph.nodes[arg].shape[dim]
            begin = begin - size
            here = Expr("position", dtype="int64", index=index[dim])
            shifted = index[dim] + -begin
            value = self.at(arg, (*index[:dim], shifted, *index[dim + 1 :]))
            if not _can_be_masked(value, shifted.axes):
                value = self.at(arg, (*index[:dim], self._round(index[dim], begin, size), *index[dim + 1 :]))
            if found is None:
                found = value
            else:
                limit = Expr("position", dtype="int64", index=Index(start=begin + size))
                found = Expr("choose", (Expr("lt", (here, limit), "bool"), value, found), node.dtype)
        assert found is not None
        return found

    def _round(self, index: Index, begin: SizeLike, size: SizeLike) -> Index:
        """(index - begin) % size, of numbers that are not negative: in C, -1 % 4 is -1."""
        if exactly(begin, size) is not None:
            ahead: SizeLike = 0
        elif isinstance(begin, int) and isinstance(size, int):
            ahead = -begin % size
        else:
            ahead = begin * size - begin
        return (index + ahead).divided(size, self.extents)[1]

    def _axis(self, extent: SizeLike, taken: Iterable[str]) -> str:
        """An axis to reduce over: reductions of one length share one, so that they can share a loop."""
        names = self._reduced.setdefault(extent, [])
        taken = set(taken)
        if taken & set(self._around):
            taken |= set(self._around)
        for name in names:
            if name not in taken:
                return name
        name = f"r{sum(map(len, self._reduced.values()))}"
        names.append(name)
        self.extents[name] = extent
        return name

    def _reduce(self, node: Node, index: tuple[Index, ...]) -> Expr:
        (arg,) = node.args
        shape = self.graph.nodes[arg].shape
        dims = {dim % len(shape) for dim in node["dims"]}
        taken = {axis for one in index for axis in one.axes}
        over: list[str] = []
        inner: list[Index] = []
        outer = list(index)
        for place, size in enumerate(shape):
            if place not in dims:
                inner.append(outer.pop(0))
                continue
            if node["keepdim"]:
                outer.pop(0)
            if size == 1:
                inner.append(Index())
                continue
            over.append(self._axis(size, {*taken, *over}))
            inner.append(Index.axis(over[-1]))
        around, self._around = self._around, (*self._around, *over)
        body = self.at(arg, tuple(inner))
        self._around = around
        how = "sum" if node["how"] == "mean" else node["how"]
        dtype = node.dtype if node.dtype not in ops.HALVES else "float32"
        made = body
        if over:
            made = Expr("reduced", dtype=dtype, reduction=_simplest(Reduction(how, (body,), tuple(over))))
        if node["how"] == "mean":
            count = product(shape[dim] for dim in dims)
            total = Expr("position", dtype=dtype, index=Index(start=count))
            made = Expr("div", (made, total), dtype)
        return made

    def _matmul(self, node: Node, index: tuple[Index, ...]) -> Expr:
        a, b = node.args
        *lead, row, column = index
        taken = {axis for one in index for axis in one.axes}
        over = self._axis(self.graph.nodes[a].shape[-1], taken)
        k = Index.axis(over)
        around, self._around = self._around, (*self._around, over)
        left = self.at(a, (*self._led(a, lead), row, k))
        right = self.at(b, (*self._led(b, lead), k, column))
        self._around = around
        dtype = node.dtype if node.dtype not in ops.HALVES else "float32"
        return Expr("reduced", dtype=dtype, reduction=Reduction("dot", (left, right), (over,)))

    def _led(self, number: int, lead: Sequence[Index]) -> tuple[Index, ...]:
        shape = self.graph.nodes[number].shape[:-2]
        own = lead[len(lead) - len(shape) :] if shape else ()
        return tuple(Index() if size == 1 else one for size, one in zip(shape, own, strict=True))


def _larger(one: SizeLike, other: SizeLike) -> bool:
    """Whether it is certainly larger. Of unknown sizes: if it has more factors."""
    if isinstance(one, int) and isinstance(other, int):
        return one > other
    return exactly(one, other) is not None


def _simplest(reduction: Reduction) -> Reduction:
    """A sum of products of two is a dot, which has instructions of its own."""
    (body,) = reduction.bodies
    if reduction.how == "sum" and body.op == "mul" and len(reduction.over) == 1:
        left, right = body.args
        (over,) = reduction.over
        if over in left.axes and over in right.axes and left.axes != right.axes:
            return Reduction("dot", (left, right), reduction.over)
    return reduction


def kernel_of(graph: Graph, outputs: Sequence[int], stored: Mapping[int, Shape]) -> Kernel:
    """The kernel that computes these nodes, which have one shape but for sizes of 1, from nodes that are in memory with the
    strides in `stored`."""
    shapes = [graph.nodes[number].shape for number in outputs]
    widest = tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*shapes, strict=True))
    reader = Reader(graph, stored)
    axes = tuple(f"i{place}" for place in range(len(widest)))
    reader.extents.update(zip(axes, widest, strict=True))
    stores = []
    for number in outputs:
        shape = graph.nodes[number].shape
        index = tuple(Index() if size == 1 else Index.axis(axis) for size, axis in zip(shape, axes, strict=False))
        value = reader.at(number, index)
        stores.append((number, linear(index, row_major(shape)), value))
    made = [Store(reader.buffer(number, written=True), place, value) for number, place, value in stores]
    used = tuple(axis for axis in axes if reader.extents[axis] != 1)
    return Kernel(used, dict(reader.extents), tuple(reader.buffers.values()), tuple(made))
