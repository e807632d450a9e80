"""Reductions of a kernel in WGSL: by one thread, or by the lanes of a worker together, which fold what they found pairwise.

What changes with a reduced axis and not with the columns is computed once, by the lane whose turn it is, and reaches the
others through shared memory. Sums that depend on a maximum as `sharing` says are scaled anew when it grows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from anytorch.graph import ops
from anytorch.graph.emit.schedule import Schedule
from anytorch.graph.emit.sharing import maxima, together
from anytorch.graph.emit.wgsl_functions import compute_kind, joined, neutral
from anytorch.graph.emit.wgsl_values import Scope, Values
from anytorch.graph.loops import Expr, Kernel, Reduction
from anytorch.graph.sizes import product

BLOCK = 64  # terms that are summed before they are added to the sum of the others: errors then grow far slower


def plain(expr: Expr) -> Iterator[Reduction]:
    """The reductions in an expression, those inside of others too, but for what exists only where it is chosen."""
    if expr.reduction:
        for body in expr.reduction.bodies:
            yield from plain(body)
        yield expr.reduction
    for arg in expr.args[:1] if expr.op == "choose" else expr.args:
        yield from plain(arg)


class Reductions(Values):
    def __init__(self, kernel: Kernel, schedule: Schedule, features: Collection[str]) -> None:
        super().__init__(kernel, schedule, features)
        self.folds: dict[tuple[str, str], None] = {}
        self.stages: list[str] = []
        self.arrays = False  # is a sum kept for each of a lane's columns?

    def _is_row(self, one: Reduction) -> bool:
        """Whether it is computed once per worker, from its point and its columns only."""
        return one.axes <= set(self.kernel.axes) and not self._closed()

    def _is_wide(self, one: Reduction) -> bool:
        """Whether it changes with the columns."""
        return bool(one.axes & set(self.columns))

    def reduced(self, one: Reduction) -> str:
        """The name of a reduction's value, computed with all that can share its loop."""
        level = self._seen_from(one.axes, {r for body in one.bodies for r in body.reductions})
        row = self._is_row(one)
        found = self._found(one, 0 if row else level)
        if found is not None:
            return found
        rounding, self.rounding = self.rounding, False
        with self._at(0 if row else max(level, self._closed())):
            bound = frozenset().union(*(scope.axes for scope in self.scopes))
            if row:
                bound |= set(self.kernel.axes)
            done = [key for scope in self.scopes for key in scope.names if isinstance(key, Reduction)]
            group = together(self.kernel, one, done, bound)
            self._first(group, bound)
            if row and self.lanes > 1:
                self._together(group)
            else:
                self._alone(group, row)
            name = self.scopes[-1].names[one]
        self.rounding = rounding
        return name

    def _first(self, group: Sequence[Reduction], bound: frozenset[str]) -> None:
        """Compute what these need and their loop does not change."""
        inner = {found for one in group for body in one.bodies for found in plain(body)} - set(group)
        for one in self.kernel.reductions:
            if one in inner and one.axes <= bound and not any(r in group for b in one.bodies for r in b.reductions):
                self.reduced(one)

    def _kind_of(self, one: Reduction) -> str:
        body = one.bodies[0]
        if one.how == "sum" and body.dtype not in ops.FLOATS:
            return compute_kind("int64", self.wide)
        kind = self.kind(body)
        if kind == "bool":
            raise NotImplementedError(f"{one.how} of bools has no form in WGSL")
        return kind

    def _declared(self, one: Reduction, row: bool) -> str:
        """A variable that holds the reduction so far; for columns that are walked along, one for each of a lane's."""
        name, kind = self._new("s"), self._kind_of(one)
        start = neutral(one.how, kind)
        if row and self.rows in one.axes:
            count = self.schedule.block(self.rows)
        elif row and self._is_wide(one) and not self.tiled:
            self.arrays = True
            count = self._sums()
        else:
            self._line(f"var {name} = {start};")
            return name
        self._line(f"var {name}: array<{kind}, {count}>;")
        self._line(f"for (var j = 0u; j < {count}u; j++) {{ {name}[j] = {start}; }}")
        return f"{name}[j]"

    def _body(self, one: Reduction) -> str:
        kind = self._kind_of(one)
        texts = [self._as(body, kind) for body in one.bodies]
        return " * ".join(texts) if one.how == "dot" else texts[0]

    def _update(self, one: Reduction, names: Mapping[Reduction, str], scaled: Collection[Reduction]) -> None:
        """Take one more term. `scaled` are the maxima whose growth this sum must follow here."""
        name, body = names[one], self._body(one)
        if any(one in maxima(other, list(names)) for other in names):
            self._grow(one, name, body)
            return
        factors = "".join(f" * {self._scale(top)}" for top in maxima(one, list(names)) if top in scaled)
        if one.how in ("sum", "dot"):
            self._line(f"{name} = {name}{factors} + {body};")
        else:
            self._line(f"{name} = {joined(one.how, self._kind_of(one), name, body)};")

    def _grow(self, one: Reduction, name: str, body: str) -> None:
        """A maximum that sums in its loop are scaled by."""
        grown, safe, scale = self._new("m"), self._new("m"), self._new("m")
        self._line(f"let {grown} = maximum_f32({name}, {body});")
        # Where everything so far is masked the maximum is -inf, and -inf - -inf is not a number: nothing is scaled then.
        self._line(f"let {safe} = select({grown}, 0.0, is_inf({grown}) && {grown} < 0.0);")
        self._line(f"let {scale} = exp_f32({name} - {safe});")
        self._line(f"{name} = {grown};")
        scope = self.scopes[-1]
        scope.names[one] = safe  # what sums in this loop subtract
        scope.names[one, "scale"] = scale

    def _scale(self, top: Reduction) -> str:
        found = self._found((top, "scale"), 0)
        assert found is not None
        return found

    def _alone(self, group: Sequence[Reduction], row: bool) -> None:
        """One thread's loop, or nest of loops."""
        over = group[0].over
        names = {one: self._declared(one, row) for one in group}
        # Of columns that are walked along, all sums are updated in one loop within.
        many = [one for one in group if names[one].endswith("]")]
        few = [one for one in group if one not in many]
        if not many and not any(maxima(one, group) for one in group):
            self._in_blocks(group, over, names)
        else:
            with self._over(over, "0u", self._length(over)):
                for one in few:
                    self._update(one, names, group)
                if many:
                    with self._columns():
                        for one in many:
                            self._update(one, names, group)
        for one, name in names.items():
            self.scopes[-1].names[one] = name

    def _in_blocks(self, group: Sequence[Reduction], over: Sequence[str], names: Mapping[Reduction, str]) -> None:
        length = self._length(over)
        known = product(self.kernel.extents[axis] for axis in over)
        if (isinstance(known, int) and known <= 2 * BLOCK) or all(one.how in ("max", "min") for one in group):
            with self._over(over, "0u", length):
                for one in group:
                    self._update(one, names, ())
            return
        with self._inside(f"for (var begin = 0u; begin < {length}; begin += {BLOCK}u) {{"):
            parts = {one: self._declared(one, False) for one in group}
            with self._over(over, "begin", f"min(begin + {BLOCK}u, {length})"):
                for one in group:
                    self._update(one, parts, ())
            for one in group:
                self._line(f"{names[one]} = {joined(one.how, self._kind_of(one), names[one], parts[one])};")

    # --- reductions that lanes share -------------------------------------------------------------------------------------

    def _together(self, group: Sequence[Reduction]) -> None:
        """All lanes of a worker: each takes every n-th term of what is the row's, and all terms of its columns."""
        over = group[0].over
        wide = [one for one in group if self._is_wide(one)]
        own = [one for one in group if one not in wide]
        names = {one: self._declared(one, True) for one in group}
        if any(self.rows in one.axes for one in group):
            self._in_strips(over, own, wide, names)
        elif not wide and not any(maxima(one, group) for one in group):
            if self._even(over):  # as many rounds for every lane, which a compiler can unroll
                with self._inside(f"for (var base = 0u; base < {self._length(over)}; base += {self.lanes}u) {{", over):
                    self._bind(over, "(base + lane)")
                    for one in own:
                        self._update(one, names, ())
            else:
                with self._over(over, "lane", self._length(over), self.lanes):
                    for one in own:
                        self._update(one, names, ())
        else:
            self._in_rounds(over, own, wide, names)
        plain_sums = all(one.how in ("sum", "dot") and self._kind_of(one) == "f32" for one in wide)
        if self.slices > 1 and not (plain_sums and not any(maxima(one, group) for one in wide)):
            raise NotImplementedError("slices share plain sums only")
        for one in group:
            name = names[one]
            if one in wide and self.slices > 1:
                with self._strip() if self.rows in one.axes else nullcontext():
                    self._line(f"{name} = across_slices({name}, lane);")
            elif one in own and self.rows in one.axes:
                with self._strip():
                    self._line(f"{name} = {self._folded(one, name)};")
            elif one in own and not any(one in maxima(other, group) for other in group):
                name = self._new("s")
                self._line(f"let {name} = {self._folded(one, names[one])};")
            self.scopes[-1].names[one] = name

    def _folded(self, one: Reduction, text: str) -> str:
        how, kind = "sum" if one.how == "dot" else one.how, self._kind_of(one)
        self.folds.setdefault((how, kind))
        return f"fold_{how}_{kind}({text}, lane)"

    def _in_strips(
        self,
        over: Sequence[str],
        own: Sequence[Reduction],
        wide: Sequence[Reduction],
        names: Mapping[Reduction, str],
    ) -> None:
        """The sums of all rows of a strip, in rounds of a term for each lane."""
        if any(one.how not in ("sum", "dot") or maxima(one, list(names)) for one in names):
            raise NotImplementedError("only plain sums are taken for the rows of a strip")
        length = self._length(over)
        with self._inside(f"for (var base = 0u; base < {length}; base += {self.lanes}u) {{", over):
            self._line(f"let live = base + lane < {length};")
            self._bind(over, f"min(base + lane, {length} - 1u)")
            if own:
                with self._each_row(own):
                    for one in own:
                        term = f"select({neutral(one.how, self._kind_of(one))}, {self._body(one)}, live)"
                        self._line(f"{names[one]} = {names[one]} + {term};")
            if not wide:
                return
            staged = self._staged(over, wide)
            self._line("workgroupBarrier();")
            parts = {one: self._declared(one, True) for one in wide}
            with self._turns(over), self._each_row(wide) as scope:
                scope.names.update(staged)
                for one in wide:
                    self._line(f"{parts[one]} = {parts[one]} + {self._body(one)};")
            with self._each_row(wide):
                for one in wide:
                    self._line(f"{names[one]} = {names[one]} + {parts[one]};")
            self._line("workgroupBarrier();")

    def _even(self, over: Sequence[str]) -> bool:
        """Whether every lane has as many terms as the others."""
        length = product(self.kernel.extents[axis] for axis in over)
        return isinstance(length, int) and length % self.lanes == 0

    @contextmanager
    def _turns(self, over: Sequence[str]) -> Iterator[Scope]:
        """The loop over the terms of a round: all of them, or those of this lane's slice."""
        begin = "0u" if self.slices == 1 else f"(lane / {self.width}u) * {self.width}u"
        if self._even(over):  # as many turns in every round
            with self._inside(f"for (var u = 0u; u < {self.width}u; u++) {{", over) as scope:
                self._line(f"let t = {begin} + u;" if self.slices > 1 else "let t = u;")
                self._bind(over, "(base + t)")
                yield scope
            return
        end = f"min({begin} + {self.width}u, {self._length(over)} - base)"
        with self._inside(f"for (var t = {begin}; t < {end}; t++) {{", over) as scope:
            self._bind(over, "(base + t)")
            yield scope

    @contextmanager
    def _each_row(self, ones: Sequence[Reduction]) -> Iterator[Scope]:
        """For every row of the strip; all of these must change with it."""
        if any(self.rows not in one.axes for one in ones):
            raise NotImplementedError("a sum that is the same for all rows of a strip stands beside others")
        with self._strip() as scope:
            yield scope

    def _in_rounds(
        self,
        over: Sequence[str],
        own: Sequence[Reduction],
        wide: Sequence[Reduction],
        names: Mapping[Reduction, str],
    ) -> None:
        length, group = self._length(over), list(names)
        with self._inside(f"for (var base = 0u; base < {length}; base += {self.lanes}u) {{", over):
            self._line(f"let live = base + lane < {length};")
            self._bind(over, f"min(base + lane, {length} - 1u)")
            for one in own:
                start = neutral(one.how, self._kind_of(one))
                body = f"select({start}, {self._body(one)}, live)"
                if any(one in maxima(other, group) for other in group):
                    self._grow(one, names[one], self._folded(one, body))
                    continue
                factors = "".join(f" * {self._scale(top)}" for top in maxima(one, group))
                if one.how in ("sum", "dot"):
                    self._line(f"{names[one]} = {names[one]}{factors} + {body};")
                else:
                    self._line(f"{names[one]} = {joined(one.how, self._kind_of(one), names[one], body)};")
            if wide:
                self._terms(over, wide, names)

    def _terms(self, over: Sequence[str], wide: Sequence[Reduction], names: Mapping[Reduction, str]) -> None:
        """Every lane takes all terms of a round for its own columns."""
        staged = self._staged(over, wide)
        if staged:
            self._line("workgroupBarrier();")
        tops = [top for top in names if top not in wide and any(top in maxima(one, list(names)) for one in wide)]
        parts = dict(names)
        if tops:
            with self._each_column():
                for one in wide:
                    for top in maxima(one, tops):
                        self._line(f"{names[one]} = {names[one]} * {self._scale(top)};")
        elif self.tiled and all(one.how in ("sum", "dot") and not maxima(one, wide) for one in wide):
            parts = {one: self._declared(one, True) for one in wide}
        with self._turns(over) as scope:
            for key, text in staged.items():
                scope.names[key] = text
            with self._each_column():
                for one in wide:
                    self._update(one, parts, wide)
        for one in wide:
            if parts[one] != names[one]:
                self._line(f"{names[one]} = {names[one]} + {parts[one]};")
        if staged:
            self._line("workgroupBarrier();")

    @contextmanager
    def _each_column(self) -> Iterator[None]:
        if self.tiled:
            yield
            return
        with self._columns():
            yield

    def _staged(self, over: Sequence[str], wide: Sequence[Reduction]) -> dict[object, str]:
        """Leave what this lane computed for its term where all lanes can read it: the values, by what they are of."""
        found: dict[object, str] = {}
        pieces = dict.fromkeys(piece for one in wide for body in one.bodies for piece in self._pieces(body, set(over)))
        for piece in pieces:
            name, kind, count = self._new("stage"), self.kind(piece), self.lanes
            if self.rows in piece.axes:
                # A term's rows lie side by side: a lane reads several of them at once.
                rows = self.schedule.block(self.rows)
                count *= rows
                with self._strip():
                    self._line(f"{name}[lane * {rows}u + j] = {self.value(piece)};")
                found[piece.reduction or piece] = f"{name}[t * {rows}u + j]"
            else:
                self._line(f"{name}[lane] = {self.value(piece)};")
                found[piece.reduction or piece] = f"{name}[t]"
            self.stages.append(f"var<workgroup> {name}: array<{kind}, {count}>;\n")
        return found

    def _pieces(self, expr: Expr, over: set[str]) -> Iterator[Expr]:
        """The largest parts of an expression that change with the reduced axes and not with the columns."""
        if not expr.axes & over or expr.op in ("constant", "position"):
            return
        if not expr.axes & set(self.columns) and self.kind(expr) != "bool":
            yield expr
            return
        for arg in expr.args[:1] if expr.op == "choose" else expr.args:
            yield from self._pieces(arg, over)
