"""Scopes and values of a kernel in WGSL: every value is emitted once, in the outermost scope that has all it depends on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from anytorch.gpu.wgsl.types import load
from anytorch.graph import ops
from anytorch.graph.emit.schedule import Schedule
from anytorch.graph.emit.wgsl_functions import (
    COMPARED,
    LOGIC,
    compute_kind,
    converted,
    lanes_of,
    literal,
    operation,
    rounded,
    size_text,
)
from anytorch.graph.indices import Index, Part
from anytorch.graph.loops import Expr, Kernel, Reduction
from anytorch.graph.sizes import SizeLike, product

MOST_SUMS = 128  # of a thread, held at once


@dataclass
class Scope:
    """Lines at one depth. `axes` are those it binds; nothing is moved out of a `closed` one, which may not be entered."""

    depth: int
    axes: frozenset[str] = frozenset()
    closed: bool = False
    lines: list[str] = field(default_factory=list)
    names: dict[object, str] = field(default_factory=dict)


class Values:
    """What a worker's threads know: the outer axes, and the columns it walks along (`Schedule.spread`)."""

    def __init__(self, kernel: Kernel, schedule: Schedule, features: Collection[str]) -> None:
        self.kernel, self.schedule = kernel, schedule
        self.lanes, self.slices = schedule.lanes, schedule.slices
        self.width = self.lanes // self.slices  # columns of a block
        spread = schedule.spread.split(",")
        self.columns = tuple(axis for axis in kernel.axes if axis in spread)
        self.tiled = bool(self.columns) and self.columns[0] in schedule.blocks
        self.outer = tuple(axis for axis in kernel.axes if self.tiled or axis not in self.columns)
        # An axis of which a worker has a strip: what is read of a column then serves several rows.
        self.rows = next((axis for axis in self.outer if axis in schedule.blocks and axis not in self.columns), "")
        self.wide = "shader-int64" in features
        self.subgroups = "subgroup" in features and self.lanes > 1
        self.scopes = [Scope(1, frozenset(self.outer) - {self.rows})]
        self.count = 0
        self.rounding = False  # is half precision rounded after every op, as eager torch does?

    def reduced(self, one: Reduction) -> str:
        """The name of a reduction's value."""
        raise NotImplementedError("a kernel's reductions are written by `wgsl_reductions`")

    def _line(self, text: str) -> None:
        scope = self.scopes[-1]
        scope.lines.append("  " * scope.depth + text)

    def _new(self, letter: str = "v") -> str:
        self.count += 1
        return f"{letter}{self.count}"

    # --- scopes ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _inside(self, opening: str, axes: Collection[str] = (), *, closed: bool = False) -> Iterator[Scope]:
        """A block that begins with this line."""
        outer = self.scopes[-1]
        scope = Scope(outer.depth + 1, frozenset(axes), closed)
        self.scopes.append(scope)
        yield scope
        self.scopes.pop()
        outer.lines += ["  " * outer.depth + opening, *scope.lines, "  " * outer.depth + "}"]

    @contextmanager
    def _at(self, level: int) -> Iterator[None]:
        """What is emitted meanwhile stands in an outer scope, before the scopes in it."""
        kept, self.scopes = self.scopes, self.scopes[: level + 1]
        yield
        self.scopes = kept

    def _seen_from(self, axes: frozenset[str], reductions: Collection[Reduction]) -> int:
        """The outermost scope where all of these have the values they have here."""
        level = 0
        for number, scope in enumerate(self.scopes):
            if scope.axes & axes or any(one in scope.names for one in reductions):
                level = number
        return level

    def _closed(self) -> int:
        return max((number for number, scope in enumerate(self.scopes) if scope.closed), default=0)

    def _found(self, key: object, level: int) -> str | None:
        return next((s.names[key] for s in reversed(self.scopes[level:]) if key in s.names), None)

    def _decode(self, axes: Sequence[str], number: str, counts: Mapping[str, str]) -> None:
        """Set the axes for a point's number: the last one changes fastest."""
        rest = number
        for place, axis in enumerate(reversed(axes)):
            name = "strip" if axis == self.rows else "tile" if self.tiled and axis in self.columns else axis
            count = counts[axis]
            if place == len(axes) - 1:
                self._line(f"let {name} = {rest};")
                return
            self._line(f"let {name} = {rest} % {count};")
            left = self._new("n")
            self._line(f"let {left} = {rest} / {count};")
            rest = left

    @contextmanager
    def _over(self, axes: Sequence[str], begin: str, end: str, step: int = 1) -> Iterator[Scope]:
        """A loop over the points of these axes, by their number."""
        name = axes[0] if len(axes) == 1 else "q"
        counting = f"{name}++" if step == 1 else f"{name} += {step}u"
        with self._inside(f"for (var {name} = {begin}; {name} < {end}; {counting}) {{", axes) as scope:
            if len(axes) > 1:
                self._bind(axes, name)
            yield scope

    def _bind(self, axes: Sequence[str], number: str) -> None:
        self._decode(axes, number, {axis: size_text(self.kernel.extents[axis]) for axis in axes})

    def _length(self, axes: Sequence[str]) -> str:
        return size_text(product(self.kernel.extents[axis] for axis in axes))

    @contextmanager
    def _columns(self) -> Iterator[str]:
        """A loop over the columns of this lane, one sum each; gives a line that asks whether the column exists."""
        count = self._sums()
        with self._inside(f"for (var j = 0u; j < {count}u; j++) {{", self.columns):
            self._line(f"let own = j * {self.lanes}u + lane;" if self.lanes > 1 else "let own = j;")
            self._bind(self.columns, f"min(own, {self._length(self.columns)} - 1u)")
            yield f"if (own < {self._length(self.columns)}) {{"

    @contextmanager
    def _strip(self) -> Iterator[Scope]:
        """A loop over the rows of a worker's strip, one sum each."""
        height = self.schedule.block(self.rows)
        with self._inside(f"for (var j = 0u; j < {height}u; j++) {{", {self.rows}) as scope:
            self._line(f"let own_row = strip * {height}u + j;")
            self._line(f"let {self.rows} = min(own_row, {self._length([self.rows])} - 1u);")
            yield scope

    def _sums(self) -> int:
        length = product(self.kernel.extents[axis] for axis in self.columns)
        if not isinstance(length, int) or -(-length // self.lanes) > MOST_SUMS:
            raise NotImplementedError("a lane cannot hold a sum for each of its columns")
        return -(-length // self.lanes)

    # --- values ----------------------------------------------------------------------------------------------------------

    def kind(self, expr: Expr) -> str:
        return compute_kind(expr.dtype, self.wide)

    def index(self, index: Index) -> str:
        def text(atom: str | Part, step: SizeLike) -> str:
            if isinstance(atom, Part):
                sign = "/" if atom.how == "//" else "%"
                base = f"({self.index(atom.index)} {sign} {size_text(atom.by)})"
            else:
                base = atom
            return base if step == 1 else f"{base} * {size_text(step)}"

        said = [text(atom, step) for atom, step in index.terms]
        return f"({' + '.join([*said, *([size_text(index.start)] if index.start != 0 or not said else [])])})"

    def value(self, expr: Expr) -> str:
        """The name of an expression's value, or a literal."""
        if expr.op == "constant":
            return literal(expr.value, self.kind(expr))
        if expr.reduction:
            return self.reduced(expr.reduction)
        level = self._seen_from(expr.axes, expr.reductions)
        key = (expr, "rounded") if self.rounding else expr
        found = self._found(key, level)
        if found is not None:
            return found
        home = max(level, self._closed())
        with self._at(home):
            name = self._chosen(expr) if expr.op == "choose" else ""
            if not name:
                text = self._written(expr)
                if self.rounding and expr.op != "load":
                    text = rounded(text, expr.dtype)
                name = text
                if not text.isidentifier():  # a cast that changes nothing has a name already
                    name = self._new()
                    self._line(f"let {name} = {text};")
        self.scopes[home].names[key] = name
        return name

    def _as(self, expr: Expr, kind: str) -> str:
        return converted(self.value(expr), self.kind(expr), kind)

    def _written(self, expr: Expr) -> str:
        kind = self.kind(expr)
        if expr.op == "load":
            return self._load(expr)
        if expr.op == "position":
            assert expr.index is not None
            text = f"i32({self.index(expr.index)})"
            return text if kind == "i32" else f"{kind}({text})"
        if expr.op == "where":
            condition, first, second = expr.args
            return f"select({self._as(second, kind)}, {self._as(first, kind)}, {self._as(condition, 'bool')})"
        if expr.op == "cast":
            return self._as(expr.args[0], kind)
        if expr.op in COMPARED:
            kind = compute_kind(ops.promoted(arg.dtype for arg in expr.args), self.wide)
            kind = "i32" if kind == "bool" else kind
        elif expr.op in LOGIC:
            kind = "bool"
        return operation(expr.op, [self._as(arg, kind) for arg in expr.args], kind)

    def _load(self, expr: Expr) -> str:
        assert expr.index is not None
        place = f"p.o{expr.buffer} + {self.index(expr.index)}"
        if lanes_of(expr.dtype) > 1:
            name = self._new("a")
            self._line(f"let {name} = {place};")
            place = name
        text = load(expr.dtype, f"b{expr.buffer}", place)
        return f"({text} != 0)" if expr.dtype == "bool" else text

    def _chosen(self, expr: Expr) -> str:
        """What is not chosen may not exist, and is not computed."""
        condition, *branches = expr.args
        kind, name = self.kind(expr), self._new("c")
        chosen = self._as(condition, "bool")
        self._line(f"var {name}: {kind};")
        for branch, asked in zip(branches, (chosen, f"!({chosen})"), strict=True):
            with self._inside(f"if ({asked}) {{", closed=True):
                self._line(f"{name} = {self._as(branch, kind)};")
        return name
