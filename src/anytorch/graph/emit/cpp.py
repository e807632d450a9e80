"""C++ text of a kernel: a function that computes a range of work items, with vectors along some axes and tiles in registers.

A tile's points along an axis are unrolled into the text, so that sums stay in registers; along a vector axis a point is a
vector of W floats, whatever W is where the text is compiled. Each loop is written twice: for whole tiles, and for the rest.
As in Triton's text, values stand in the outermost scope that has all they depend on, and sums share a maximum's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from anytorch.graph import ops
from anytorch.graph.emit import cpp_functions as functions
from anytorch.graph.emit.cpp_functions import TYPES, Body, CannotVectorize, literal, neutral, number, plus, text_of
from anytorch.graph.emit.schedule import Schedule
from anytorch.graph.emit.sharing import Scope, maxima, outermost, sizes_of, together, whole_numbers
from anytorch.graph.indices import Index, Part
from anytorch.graph.loops import Expr, Kernel, Reduction, Store
from anytorch.graph.sizes import SizeLike, at

STAGE = 64  # rounds of a long sum that are summed by themselves
Point = Mapping[str, int]  # which of the unrolled points of each axis


def render(kernel: Kernel, schedule: Schedule) -> str:
    """The text of a source file with a C function: kernel(void** buffers, int64_t* sizes, int64_t begin, int64_t end)."""
    key = (schedule.name, tuple(sorted(schedule.chunks.items())))
    if key not in kernel.texts:  # the search asks again and again, and a text takes 10 ms
        kernel.texts[key] = _Writer(kernel, schedule).text()
    return kernel.texts[key]


def items(kernel: Kernel, schedule: Schedule, known: Mapping[str, int], width: int) -> int:
    """How many work items there are, where a vector has `width` floats."""
    count = 1
    for axis in kernel.axes:
        tile = schedule.block(axis) * (width if axis in schedule.vectors else 1) * schedule.chunks.get(axis, 1)
        count *= -(-at(kernel.extents[axis], known) // tile)
    return count


class _Writer:
    def __init__(self, kernel: Kernel, schedule: Schedule) -> None:
        self.kernel, self.schedule = kernel, schedule
        self.vectors = schedule.vectors
        self.scopes = [Scope(2)]
        self.count = 0
        self.points: dict[str, int] = {}  # of each axis that is bound: how many points are unrolled here
        self.arrays: dict[Reduction, dict[Any, str]] = {}  # sums that lie in memory
        self.left: dict[str, str] = {}  # of a vector axis cut short: how many lanes there are

    # --- the whole -----------------------------------------------------------------------------------------------------

    def text(self) -> str:
        if any(whole_numbers(one) for one in self.kernel.reductions):
            raise CannotVectorize("sums and maxima of whole numbers are left to torch: a float holds 24 bits of them")
        names = sizes_of(self.kernel)
        head = [
            '#include "lanes.h"',
            "",
            "EXPORT void kernel(void** buffers, const int64_t* sizes, int64_t begin, int64_t end) {",
        ]
        for place, buffer in enumerate(self.kernel.buffers):
            const = "" if buffer.written else "const "
            kind = TYPES[buffer.dtype]
            head.append(f"  {const}{kind}* __restrict b{place} = ({const}{kind}*)buffers[{place}];")
        head += [f"  const whole {name} = sizes[{place}]; (void){name};" for place, name in enumerate(names)]
        head.append("  for (whole item = begin; item < end; item++) {")
        self._items()
        groups: dict[tuple[str, ...], list[Store]] = {}
        for store in self.kernel.stores:
            groups.setdefault(tuple(a for a in self.kernel.axes if a in store.index.axes), []).append(store)
        for axes, stores in groups.items():
            self._nest(list(axes), stores)
        return "\n".join([*head, *self.scopes[0].lines, "  }", "}", ""])

    def _items(self) -> None:
        self._line("whole rest = item;")
        for place, axis in enumerate(reversed(self.kernel.axes)):
            tile = self._tile(axis)
            chunk = f"({tile} * {self.schedule.chunks.get(axis, 1)})"
            extent = number(self.kernel.extents[axis])
            last = place == len(self.kernel.axes) - 1
            if last:
                self._line(f"const whole {axis}_begin = rest * {chunk};")
            else:
                count = f"(({extent} + {chunk} - 1) / {chunk})"
                self._line(f"const whole {axis}_begin = rest % {count} * {chunk}; rest /= {count};")
            self._line(f"const whole {axis}_end = std::min<whole>({extent}, {axis}_begin + {chunk});")

    def _tile(self, axis: str) -> str:
        block = self.schedule.block(axis)
        return f"({block} * W)" if axis in self.vectors else str(block)

    def _nest(self, axes: list[str], stores: Sequence[Store]) -> None:
        if not axes:
            for store, point in ((one, point) for one in stores for point in self._all_points(one.index.axes)):
                self._store(store, point)
            return
        axis, *inner = axes
        if axis == self.schedule.spread:
            if inner:
                raise CannotVectorize(f"the sums along {axis} lie in memory, so it must be the innermost axis")
            self._spread(axis)
        self._looped(axis, f"{axis}_begin", f"{axis}_end", lambda: self._nest(inner, stores))

    def _store(self, store: Store, point: Point) -> None:
        value = self.value(store.value, point)
        target = f"b{store.buffer} + {self.index(store.index, point)}"
        axis = self._lane(store.index.axes)
        if axis is None:
            self._line(f"put({target}, {value});")
            return
        step = store.index.step(axis)
        count = self.left.get(axis)
        if step == 1:
            self._line(f"put_lanes({target}, wide({value}){f', {count}' if count else ''});")
        elif step is None:
            raise CannotVectorize(f"stores along {axis} are not evenly spaced")
        else:
            self._line(f"put_apart({target}, {number(step)}, wide({value}), {count or 'W'});")

    # --- scopes and loops ----------------------------------------------------------------------------------------------

    def _line(self, text: str, scope: Scope | None = None) -> None:
        scope = scope or self.scopes[-1]
        scope.lines.append("  " * scope.depth + text)

    def _new(self, letter: str = "v") -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def _looped(self, axis: str, begin: str, end: str, body: Callable[[], None]) -> None:
        """Loops over an axis: one for whole tiles, one for what is left over, a point at a time.

        They are put down when both are written: what their bodies moved out of them then stands before them.
        """
        outer, block, tile = self.scopes[-1], self.schedule.block(axis), self._tile(axis)
        made = [self._round(axis, f"for (; {axis} + {tile} <= {end}; {axis} += {tile}) {{", block, body)]
        if axis in self.vectors:
            self.left[axis] = f"{axis}_left"
            note = f"const whole {axis}_left = std::min<whole>(W, {end} - {axis});"
            made.append(self._round(axis, f"for (; {axis} < {end}; {axis} += W) {{", 1, body, note))
            del self.left[axis]
        elif block > 1:
            made.append(self._round(axis, f"for (; {axis} < {end}; {axis}++) {{", 1, body))
        self._line(f"{{ whole {axis} = {begin};")
        for lines in made:
            outer.lines += lines
        self._line("}")

    def _round(self, axis: str, head: str, points: int, body: Callable[[], None], note: str = "") -> list[str]:
        scope = Scope(self.scopes[-1].depth + 1, frozenset({axis}))
        self.points[axis] = points
        self.scopes.append(scope)
        if note:
            self._line(note)
        body()
        self.scopes.pop()
        del self.points[axis]
        indent = "  " * (scope.depth - 1)
        return [indent + head, *scope.lines, indent + "}"]

    def _home(self, expr: Expr) -> Scope:
        home = self.scopes[0]
        for scope in self.scopes:
            if scope.axes & expr.axes or any((one, ()) in scope.names for one in expr.reductions):
                home = scope
        return home

    def _all_points(self, axes: frozenset[str]) -> Iterator[Point]:
        """Every combination of unrolled points of these axes."""
        bound = [axis for axis in self.points if axis in axes]

        def combined(left: Sequence[str]) -> Iterator[dict[str, int]]:
            if not left:
                yield {}
                return
            for rest in combined(left[1:]):
                for point in range(self.points[left[0]]):
                    yield {left[0]: point, **rest}

        return combined(bound)

    def _key(self, axes: frozenset[str], point: Point) -> tuple[tuple[str, int], ...]:
        return tuple(sorted((axis, number) for axis, number in point.items() if axis in axes))

    # --- numbers of axes -----------------------------------------------------------------------------------------------

    def _lane(self, axes: frozenset[str]) -> str | None:
        found = axes & self.vectors
        if len(found) > 1:
            raise CannotVectorize(f"a value depends on the vector axes {', '.join(sorted(found))}")
        return next(iter(found), None)

    def index(self, index: Index, point: Point) -> str:
        """The place for the first lane."""

        def axis_text(axis: str) -> str:
            number = point.get(axis, 0)
            if not number:
                return axis
            return f"({axis} + {number}{' * W' if axis in self.vectors else ''})"

        def text(atom: str | Part, step: SizeLike) -> str:
            if isinstance(atom, Part):
                if atom.index.axes & self.vectors:
                    raise CannotVectorize("a place is divided along a vector axis")
                sign = "/" if atom.how == "//" else "%"
                base = f"({self.index(atom.index, point)} {sign} {number(atom.by)})"
            else:
                base = axis_text(atom)
            return base if step == 1 else f"{base} * {number(step)}"

        said = [text(atom, step) for atom, step in index.terms]
        return f"({' + '.join([*said, *([number(index.start)] if index.start != 0 or not said else [])])})"

    # --- values --------------------------------------------------------------------------------------------------------

    def type_of(self, expr: Expr) -> str:
        if self._lane(expr.axes) is not None:
            return "vf"
        return "float" if expr.dtype in ops.FLOATS else "whole"

    def value(self, expr: Expr, point: Point) -> str:
        if expr.dtype == "float64":
            raise CannotVectorize("float64 is left to the library")
        if expr.op == "constant":
            return literal(expr)
        if expr.reduction:
            return self.reduced(expr.reduction, point)
        key = (expr, self._key(expr.axes, point))
        for scope in self.scopes:
            if key in scope.names:
                return scope.names[key]
        text = self._written(expr, point)
        home = self._home(expr)
        name = self._new()
        self._line(f"const {self.type_of(expr)} {name} = {text};", home)
        home.names[key] = name
        return name

    def _written(self, expr: Expr, point: Point) -> str:
        lane = self._lane(expr.axes)
        if expr.op == "load":
            return self._load(expr, point, lane)
        if expr.op == "position":
            assert expr.index is not None
            if lane is not None:
                step = expr.index.step(lane)
                if step is None:
                    raise CannotVectorize(f"positions along {lane} are not evenly spaced")
                return f"counting({self.index(expr.index, point)}, {number(step)})"
            text = self.index(expr.index, point)
            return f"(float){text}" if expr.dtype in ops.FLOATS else text
        if expr.op == "choose":
            return self._choose(expr, point, lane)
        args = [self.value(arg, point) for arg in expr.args]
        if lane is not None:
            functions.check_digits(expr, lambda one: self._lane(one.axes) is not None)
            args = [f"wide({arg})" for arg in args]
        elif expr.dtype in ops.FLOATS or any(arg.dtype in ops.FLOATS for arg in expr.args):
            args = [
                arg if one.dtype in ops.FLOATS else f"(float)({arg})" for arg, one in zip(args, expr.args, strict=True)
            ]
        return functions.operation(expr, args, lane is not None)

    def _choose(self, expr: Expr, point: Point, lane: str | None) -> str:
        """What is not chosen may not exist. Lane by lane it would have to be masked; single values are behind a `?`."""
        if lane is not None:
            raise CannotVectorize("a concat is cut along a vector axis")
        condition, first, second = expr.args
        chosen = self.value(condition, point)
        texts = []
        for branch in (first, second):
            scope = Scope(self.scopes[-1].depth + 1, expr.axes)
            self.scopes.append(scope)
            result = self.value(branch, point)
            self.scopes.pop()
            texts.append(
                f"[&] {{ {' '.join(line.strip() for line in scope.lines)} return ({self.type_of(expr)}){result}; }}()"
            )
        return f"({chosen} != 0 ? {texts[0]} : {texts[1]})"

    def _load(self, expr: Expr, point: Point, lane: str | None) -> str:
        assert expr.index is not None
        place = f"b{expr.buffer} + {self.index(expr.index, point)}"
        if lane is None:
            return f"get({place})"
        if expr.dtype not in ops.FLOATS and expr.dtype not in ("bool", "int8"):
            raise CannotVectorize("whole numbers are read as vectors of floats, which do not hold all of them")
        step, count = expr.index.step(lane), self.left.get(lane)
        if step == 1:
            return f"lanes({place}{f', {count}' if count else ''})"
        if step is None:
            raise CannotVectorize(f"loads along {lane} are not evenly spaced")
        return f"lanes_apart({place}, {number(step)}, {count or 'W'})"

    # --- sums in memory ------------------------------------------------------------------------------------------------

    def _spread(self, axis: str) -> None:
        """Compute all sums along a vector axis with the reduced axis as the outer loop.

        Rows of a matrix that is read once are then read from end to end, which memory likes best; the sums of a work item
        lie in an array that stays in the cache.
        """
        todo = [one for one in self.kernel.reductions if axis in one.axes]
        while todo:
            bound = frozenset(self.points) | {axis}
            group = [one for one in together(self.kernel, todo[0], self._done(), bound) if axis in one.axes]
            if any(
                whole_numbers(one) or one.how not in ("sum", "dot") or maxima(one, group) or len(one.over) != 1
                for one in group
            ):
                raise CannotVectorize(f"only plain sums along {axis} can lie in memory")
            self._sum_in_memory(axis, group[0].over[0], group)
            todo = [one for one in todo if one not in group]

    def _done(self) -> list[Reduction]:
        keys = [key for scope in self.scopes for key in scope.names if isinstance(key, tuple)]
        return [*self.arrays, *(key[0] for key in keys if isinstance(key[0], Reduction))]

    def _sum_in_memory(self, axis: str, over: str, group: Sequence[Reduction]) -> None:
        self._before(frozenset({over, axis}), group)
        length = f"({self._tile(axis)} * {self.schedule.chunks.get(axis, 1)})"
        for one in group:
            self.arrays[one] = {}
            for point in self._all_points(one.axes - {axis}):
                name = self._new("s")
                self._line(f"alignas(64) float {name}[{length}] = {{}};")
                self.arrays[one][self._key(one.axes, point)] = name
        begin, end = f"{axis}_begin", f"{axis}_end"
        extent = number(self.kernel.extents[over])
        self._looped(over, "0", extent, lambda: self._looped(axis, begin, end, lambda: self._add_to(axis, over, group)))

    def _add_to(self, axis: str, over: str, group: Sequence[Reduction]) -> None:
        for one in group:
            for point in self._all_points(one.axes):
                array = self._in_array(one, axis, point)
                part = self._new("t")  # a few terms first, then the sum of all: long sums stay exact to more digits
                for place, inner in enumerate(self._all_points(frozenset({over}))):
                    body = self._body(one, {**point, **inner})
                    self._line(f"{part} = {plus(part, body)};" if place else f"vf {part} = wide({text_of(body)});")
                self._line(f"store({array}, load({array}) + {part});")

    def _in_array(self, one: Reduction, axis: str, point: Point) -> str:
        key = self._key(one.axes - {axis}, point)
        return f"{self.arrays[one][key]} + {self.index(Index.axis(axis), point)} - {axis}_begin"

    # --- reductions ----------------------------------------------------------------------------------------------------

    def reduced(self, reduction: Reduction, point: Point) -> str:
        key = (reduction, self._key(reduction.axes, point))
        for scope in self.scopes:
            if key in scope.names:
                return scope.names[key]
        if reduction in self.arrays:
            name = self._new()
            self._line(f"const vf {name} = load({self._in_array(reduction, self.schedule.spread, point)});")
            self.scopes[-1].names[key] = name
            return name
        with self._moved_out(reduction):
            if set(reduction.over) & set(self.points):
                over = ", ".join(reduction.over)
                raise CannotVectorize(f"a reduction over {over} stands in a loop over the same axis")
            self._loop(reduction.over, together(self.kernel, reduction, self._done(), frozenset(self.points)))
        return self.reduced(reduction, point)

    @contextmanager
    def _moved_out(self, reduction: Reduction) -> Iterator[None]:
        """Write before the loops that a reduction does not change with: the sum of a row is computed once for the row."""
        home = next(
            place
            for place, scope in enumerate(self.scopes)
            if scope is self._home(Expr("reduced", reduction=reduction))
        )
        inner, self.scopes = self.scopes[home + 1 :], self.scopes[: home + 1]
        bound = {axis for scope in self.scopes for axis in scope.axes}
        points, left = self.points, self.left
        self.points = {axis: count for axis, count in points.items() if axis in bound}
        self.left = {axis: count for axis, count in left.items() if axis in bound}
        yield
        self.scopes, self.points, self.left = [*self.scopes, *inner], points, left

    def _before(self, axes: frozenset[str], group: Sequence[Reduction]) -> None:
        """Compute what these need and loops over the axes do not change."""
        for one in group:
            for body in one.bodies:
                for inner in outermost(body):
                    if inner not in group and not inner.axes & axes:
                        for point in self._all_points(inner.axes):
                            self.reduced(inner, point)

    def _loop(self, over: tuple[str, ...], group: Sequence[Reduction]) -> None:
        self._before(frozenset(over), group)
        outer = self.scopes[-1]
        lane = next((axis for axis in over if axis in self.vectors), None)
        names: dict[tuple[Reduction, Any], str] = {}
        kinds: dict[Reduction, str] = {}
        staged: dict[str, str] = {}  # sums in stages, and what each stage begins with
        for one in group:
            if whole_numbers(one):
                raise CannotVectorize(
                    "sums and maxima of whole numbers are left to torch: a float holds 24 bits of them"
                )
            along = self._lane(one.axes)
            if along is not None and lane is not None:
                raise CannotVectorize(f"a sum over {lane} has vectors along {along}")
            # A sum that is scaled while it grows, and a maximum that scales others, are folded in every round.
            online = bool(maxima(one, group)) or any(one in maxima(other, group) for other in group)
            kinds[one] = "each" if online and lane is not None else "end" if lane is not None else "none"
            vector = along is not None or kinds[one] == "end"
            for point in self._all_points(one.axes):
                name = self._new("s")
                start = neutral(one.how)
                self._line(f"{'vf' if vector else 'float'} {name} = {f'fill({start})' if vector else start};", outer)
                names[one, self._key(one.axes, point)] = name
                if functions.in_stages(one, kinds[one]):
                    self._line(f"auto {name}_few = {name};", outer)
                    staged[name] = f"fill({start})" if vector else start
        rounds = self._new("n")
        if staged:
            self._line(f"int {rounds} = 0;", outer)

        def round_of_all() -> None:
            for one in group:
                self._update(one, group, names, kinds, over)
            if staged:
                moves = " ".join(f"{name} = {name} + {name}_few; {name}_few = {zero};" for name, zero in staged.items())
                self._line(f"if (++{rounds} == {STAGE}) {{ {rounds} = 0; {moves} }}")

        self._nested(list(over), round_of_all)
        for name in staged:
            self._line(f"{name} = {name} + {name}_few;", outer)
        for (one, at_point), name in names.items():
            if kinds[one] == "end":
                fold = "g_largest" if one.how == "max" else "-g_largest" if one.how == "min" else "sum"
                self._line(f"const float {name}_all = {fold}({'-' if one.how == 'min' else ''}{name});", outer)
            outer.names[one, at_point] = f"{name}_all" if kinds[one] == "end" else name
            outer.names.setdefault((one, ()), name)  # marks the scope, for values that depend on it

    def _nested(self, over: list[str], body: Callable[[], None]) -> None:
        if not over:
            body()
            return
        axis, *inner = over
        self._looped(axis, "0", number(self.kernel.extents[axis]), lambda: self._nested(inner, body))

    def _update(
        self,
        one: Reduction,
        group: Sequence[Reduction],
        names: Mapping[tuple[Reduction, Any], str],
        kinds: Mapping[Reduction, str],
        over: tuple[str, ...],
    ) -> None:
        scope = self.scopes[-1]
        tops = maxima(one, group)
        scales_others = any(one in maxima(other, group) for other in group)
        for outer_point in self._all_points(one.axes):
            name = names[one, self._key(one.axes, outer_point)]
            staged = functions.in_stages(one, kinds[one])
            for top in tops:
                scale = f"{names[top, self._key(top.axes, outer_point)]}_scale"
                for part in (name, f"{name}_few") if staged else (name,):
                    self._line(f"{part} = {part} * {scale};")
            bodies = [self._body(one, {**outer_point, **inner}) for inner in self._all_points(frozenset(over))]
            parts = [text_of(body) for body in bodies]
            if one.how in ("max", "min"):
                if kinds[one] == "end":  # what does not change along the axis is no vector
                    parts = [f"wide({part})" for part in parts]
                folded = parts[0]
                for part in parts[1:]:
                    folded = f"g_{one.how}imum({folded}, {part})"
                if kinds[one] == "each":
                    folded = f"g_largest(wide({folded}))" if one.how == "max" else f"-g_largest(wide(-{folded}))"
                if not scales_others:
                    self._line(f"{name} = g_{one.how}imum({name}, {folded});")
                    continue
                self._line(f"const auto {name}_next = g_{one.how}imum({name}, {folded});")
                # Where all so far is masked the maximum is -inf, and -inf - -inf is not a number: nothing is scaled then.
                self._line(f"const float {name}_safe = {name}_next == -INF ? 0.0f : {name}_next;")
                self._line(f"const float {name}_scale = g_exp({name} - {name}_safe);")
                self._line(f"{name} = {name}_next;")
                scope.names[one, self._key(one.axes, outer_point)] = f"{name}_safe"
                scope.names.setdefault((one, ()), name)
                continue
            target = f"{name}_few" if staged else name
            if kinds[one] == "each":
                for part in parts:
                    self._line(f"{target} = {target} + sum(wide({part}));")
            elif one.how == "sum":
                self._line(f"{target} = {target} + {functions.by_twos(parts)};")
            else:
                for body in bodies:
                    self._line(f"{target} = {plus(target, body)};")

    def _number(self, body: Expr, point: Point) -> str:
        """A value as a float or a vector: what is folded may be a bool."""
        text = self.value(body, point)
        return f"(float)({text})" if self.type_of(body) == "whole" else text

    def _body(self, one: Reduction, point: Point) -> Body:
        """What is folded at a point, with the neutral element in the lanes beyond the end; of a dot, both factors."""
        values = tuple(self._number(body, point) for body in one.bodies)
        lane = next((axis for axis in one.over if axis in self.vectors), None)
        if lane is not None and lane in self.left:
            return (f"keep_first(wide({text_of(values)}), (int){self.left[lane]}, fill({neutral(one.how)}))",)
        return values
