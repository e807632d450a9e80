"""Triton text of a kernel: every tiled axis is a dimension of blocks, every looped reduction a `for`.

Values are emitted in the outermost scope that has all they depend on, so what does not change in a loop stands before it.
Half precision is computed in float32; what goes into a matrix unit is rounded to the dtype the graph gives it.

A sum that depends on a maximum over the same axis only as a factor exp(x - maximum) is summed in the same loop, and scaled
anew when the maximum grows: softmax and attention are one pass over their rows.

Where tiles alone do not fill a device, several programs share a tile (`Schedule.parts`): each goes over a part of the loop
and leaves its sums in scratch memory; whoever takes the last ticket joins them, in the order of the parts, and goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from anytorch.graph import ops
from anytorch.graph.emit.schedule import Schedule
from anytorch.graph.emit.sharing import Scope, maxima, outermost, sizes_of, together, whole_numbers
from anytorch.graph.emit.triton_functions import (
    ALL,
    BINARY,
    HELPERS,
    TYPES,
    UNARY,
    Order,
    blocks_in,
    cast,
    fold,
    literal,
    neutral,
    spread,
    unwidened,
)
from anytorch.graph.emit.triton_tiles import Tiles
from anytorch.graph.loops import Expr, Kernel, Reduction
from anytorch.graph.sizes import at

HEADER = "import triton\nimport triton.language as tl\n"
EARLY = "from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait\n"
UNROLLED = 32  # parts that are joined without a loop
LEAST_DOT = 16  # rows, columns and terms of what `tl.dot` takes


def render(kernel: Kernel, schedule: Schedule, name: str = "kernel") -> str:
    """The text of a module with one Triton function. Its arguments: a pointer for each buffer, then the named sizes."""
    return _Writer(kernel, schedule).text(name)


def grid(kernel: Kernel, schedule: Schedule, known: dict[str, int]) -> int:
    """How many programs are launched for these sizes."""
    count = 1
    for axis in kernel.axes:
        count *= -(-at(kernel.extents[axis], known) // schedule.block(axis))
    return count * schedule.parts


def slot(kernel: Kernel, schedule: Schedule) -> int:
    """How many numbers of scratch memory each program of a shared tile needs; 0 if tiles are not shared."""
    writer = _Writer(kernel, schedule)
    writer.text("kernel")
    return writer.slot


class _Writer(Tiles):
    def __init__(self, kernel: Kernel, schedule: Schedule) -> None:
        super().__init__(kernel, schedule)
        self.helpers: dict[str, None] = {}
        self.base = 0  # the scope that values belong to which depend on no loop
        self.slot = 0  # numbers that a program leaves for the others of its tile
        self.padded: set[Reduction] = set()  # products of one row whose sums have LEAST_DOT rows, all alike

    # --- the whole -----------------------------------------------------------------------------------------------------

    def text(self, name: str) -> str:
        top = self.scopes[0]
        self._programs()
        for store in self.kernel.stores:
            order = tuple(axis for axis in self.tiled if axis in store.index.axes)
            value = self.value(store.value, order)
            dtype = self.kernel.buffers[store.buffer].dtype
            place = self.index(store.index, order)
            mask = self.mask(order, store.index.axes)
            self._line(f"tl.store(b{store.buffer} + {place}, ({value}).to({TYPES[dtype]}){mask})")
        if self.base:
            last = self.scopes.pop()
            self._line(f"if ticket == {self.schedule.parts - 1}:")
            top.lines += last.lines
        arguments = [*(f"b{place}" for place in range(len(self.kernel.buffers))), *sizes_of(self.kernel)]
        if self.schedule.parts > 1:
            arguments += ["scratch", "tickets"]
        helpers = "".join(HELPERS[one] for one in self.helpers)
        imports = HEADER + EARLY if self.schedule.early else HEADER
        head = f"{imports}{helpers}\n\n@triton.jit\ndef {name}({', '.join(arguments)}):\n"
        return head + "\n".join(top.lines).replace("SLOT", str(self.slot)) + "\n"

    def _programs(self) -> None:
        """Which part of every parallel axis this program has: the last axis changes fastest."""
        # Places beyond 2**31 need wide numbers, and a step times a wide number is wide.
        wide = self.wide
        if self.schedule.early:
            # Nothing is read or written before what came before is done; then whatever comes next may be launched.
            self._line("gdc_wait()")
            self._line("gdc_launch_dependents()")
        self._line(f"rest = tl.program_id(0){'.to(tl.int64)' if wide else ''}")
        if self.schedule.parts > 1:
            self._line(f"part = rest % {self.schedule.parts}")
            self._line(f"rest = rest // {self.schedule.parts}")
            self._line("tile = rest")
        for place, axis in enumerate(reversed(self.kernel.axes)):
            block, extent = self.schedule.block(axis), self.kernel.extents[axis]
            count = blocks_in(extent, block)
            last = place == len(self.kernel.axes) - 1
            own = "rest" if last else f"(rest % {count})"
            if block == 1:
                self._line(f"{axis} = {own}")
            else:
                self._line(f"{axis} = {own} * {block} + tl.arange(0, {block})")
            if not last:
                self._line(f"rest = rest // {count}")
        for axis in self.kernel.extents:
            if axis not in self.kernel.axes and self._covered(axis):
                every = f"tl.arange(0, {self.schedule.block(axis)}){'.to(tl.int64)' if wide else ''}"
                self._line(f"{axis} = {every if axis in self.tiled else '0'}")

    def _home(self, expr: Expr) -> Scope:
        """The outermost scope in which everything that the expression depends on is known."""
        needed = expr.axes & self.looped
        home = self.scopes[self.base]
        for scope in self.scopes[self.base :]:
            if scope.axes & needed or any(one in scope.names for one in expr.reductions):
                home = scope
        return home

    # --- values --------------------------------------------------------------------------------------------------------

    def order(self, expr: Expr, wanted: Order) -> Order:
        """The dimensions of a value: the wanted ones that it depends on."""
        return tuple(axis for axis in wanted if axis in expr.axes)

    def value(self, expr: Expr, wanted: Order, *, raw: bool = False) -> str:
        """The name of an expression's value with the dimensions it has among the wanted ones. `raw`: half stays half."""
        order = self.order(expr, wanted)
        if expr.op == "constant":
            return literal(expr)
        if expr.reduction:
            return self._spread_reduction(expr.reduction, order)
        key = (expr, order, raw, self.guards)
        for scope in self.scopes:
            if key in scope.names:
                return scope.names[key]
        text = self._turned(expr, order, raw) or self._written(expr, order, raw)
        home = self._home(expr) if not self.guards else self.scopes[-1]
        name = text
        if not text.isidentifier():  # a cast that changes nothing has a name already
            name = self._new()
            self._line(f"{name} = {text}", home)
        home.names[key] = name
        return name

    def _turned(self, expr: Expr, order: Order, raw: bool) -> str:
        """A tile that was loaded with its dimensions the other way round is turned, not loaded again."""
        if expr.op != "load" or not raw or len(order) != 2:
            return ""
        key = (expr, order[::-1], raw, self.guards)
        return next((f"tl.trans({scope.names[key]})" for scope in self.scopes if key in scope.names), "")

    def _spread_reduction(self, reduction: Reduction, order: Order) -> str:
        name, own = self.reduced(reduction, order)
        if own == order:
            return name
        return f"tl.trans({name})" if sorted(own) == sorted(order) and len(order) == 2 else name

    def _written(self, expr: Expr, order: Order, raw: bool) -> str:
        if expr.op == "load":
            if not raw:
                loaded = self.value(expr, order, raw=True)
                return f"{loaded}.to(tl.float32)" if expr.dtype in ops.HALVES else loaded
            assert expr.index is not None
            place = self.index(expr.index, order)
            other = ", other=0.0" if expr.dtype in ops.FLOATS else ", other=0"
            return f"tl.load(b{expr.buffer} + {place}{self.mask(order, expr.index.axes, other)})"
        if expr.op == "position":
            assert expr.index is not None
            text = self.index(expr.index, order)
            return f"({text}) * 1.0" if expr.dtype in ops.FLOATS else text
        if expr.op in ("where", "choose"):
            return self._choice(expr, order)
        args = [self._argument(arg, order) for arg in expr.args]
        if expr.op == "cast":
            return cast(args[0], expr.args[0].dtype, expr.dtype)
        whole = expr.dtype in ops.FLOATS and all(arg.dtype not in ops.FLOATS for arg in expr.args)
        if whole:
            args = [f"({arg}).to(tl.float32)" for arg in args]
        if expr.dtype not in ops.FLOATS and expr.op in ("relu", "floor"):  # through floats they would lose digits
            return args[0] if expr.op == "floor" else f"tl.maximum({args[0]}, 0)"
        template = UNARY.get(expr.op) or BINARY[expr.op]
        for helper in HELPERS:
            if template.startswith(helper):
                self.helpers.setdefault(helper)
        return template.format(*args)

    def _argument(self, arg: Expr, order: Order) -> str:
        return spread(self.value(arg, order), self.order(arg, order), order)

    def _choice(self, expr: Expr, order: Order) -> str:
        condition, *branches = expr.args
        chosen = self._argument(condition, order)
        texts = []
        for branch, taken in zip(branches, (True, False), strict=True):
            kept = self.guards
            if expr.op == "choose":
                name, own = self.value(condition, order), self.order(condition, order)
                self.guards = (*kept, (name if taken else f"({name} == 0)", own))
            texts.append(self._argument(branch, order))
            self.guards = kept
        return f"tl.where({chosen}, {texts[0]}, {texts[1]})"

    # --- reductions ----------------------------------------------------------------------------------------------------

    def reduced(self, reduction: Reduction, wanted: Order) -> tuple[str, Order]:
        """The name and the dimensions of a reduction's value, computed with all that can share its loop."""
        order = tuple(axis for axis in self.tiled if axis in reduction.axes)
        for scope in self.scopes:
            if reduction in scope.names:
                return scope.names[reduction], order
        if whole_numbers(reduction):
            raise NotImplementedError(
                "sums and maxima of whole numbers are left to torch: a float holds 24 bits of them"
            )
        looped = [axis for axis in reduction.over if axis in self.looped]
        kept, self.guards = self.guards, ()  # it is computed for all who need it, those under other guards included
        if not looped:
            self._at_once(reduction, order)
        else:
            self._loop(looped[0], self._together(reduction))
        self.guards = kept
        return self.reduced(reduction, wanted)

    def _at_once(self, reduction: Reduction, order: Order) -> None:
        """The reduced axes are within the tile: no loop."""
        name = self._new("s")
        if self._as_dot(reduction, order):
            text = self._dot(reduction, order, None)
        elif self._is_padded(reduction, order):
            text = self._first_row(self._padded_dot(reduction, order, None))
        else:
            inside = (*order, *(axis for axis in reduction.over if axis in self.tiled))
            text = self._masked_body(reduction, inside)
            # A sum that is scaled by a maximum has the numbers that are none itself.
            scales = any(reduction in body.reductions for one in self.kernel.reductions for body in one.bodies)
            for axis in reversed(range(len(order), len(inside))):
                text = (fold if scales else self._fold)(reduction.how, text, axis)
        home = self._home(Expr("reduced", reduction=reduction))
        self._line(f"{name} = {text}", home)
        home.names[reduction] = name

    def _fold(self, how: str, body: str, axis: int) -> str:
        """A tile folded along an axis. Unlike with `tl.max`, a maximum over a NaN is NaN, as in torch."""
        helper = {"max": "_larger", "min": "_smaller"}.get(how)
        if helper is None:
            return fold(how, body, axis)
        self.helpers.setdefault(helper)
        return f"tl.reduce({body}, {axis}, {helper})"

    def _masked_body(self, reduction: Reduction, inside: Order) -> str:
        """What is folded, with the neutral element beyond the end of the reduced axes."""
        if reduction.how == "dot":
            left, right = (spread(self.value(b, inside), self.order(b, inside), inside) for b in reduction.bodies)
            body = f"({left} * {right})"
        else:
            (only,) = reduction.bodies
            body = spread(self.value(only, inside), self.order(only, inside), inside)
        beyond = [axis for axis in reduction.over if axis in self.tiled and self._ragged(axis)]
        for axis in beyond:
            inside_it = spread(f"({axis} < {self._extent(axis)})", (axis,), inside)
            body = f"tl.where({inside_it}, {body}, {neutral(reduction.how)})"
        return body

    def _as_dot(self, reduction: Reduction, order: Order) -> bool:
        if reduction.how != "dot" or len(order) != 2 or len(reduction.over) != 1:
            return False
        (over,) = reduction.over
        sides = [set(body.axes) & set(order) for body in reduction.bodies]
        if over not in self.tiled or sides[0] & sides[1] or not all(len(side) == 1 for side in sides):
            return False
        return all(self.schedule.block(axis) >= LEAST_DOT for axis in (*order, over))

    def _dot(self, reduction: Reduction, order: Order, into: str | None) -> str:
        (over,) = reduction.over
        left, right = reduction.bodies
        if order[0] in right.axes:
            left, right = right, left
        row, column = order
        left, right = unwidened(left, right)
        a, b = self._operand(left, (row, over), over), self._operand(right, (over, column), over)
        # A product of half numbers that is another one's argument was not rounded yet.
        kind = left.dtype if left.dtype in ops.HALVES else right.dtype
        a, b = (f"({one}).to({TYPES[kind]})" if kind in ops.HALVES else one for one in (a, b))
        precise = ', input_precision="ieee"' if kind == "float32" else ""
        return f"tl.dot({a}, {b}{f', {into}' if into else ''}{precise})"

    def _is_padded(self, reduction: Reduction, order: Order) -> bool:
        """Whether it is a row times a matrix, computed by a matrix unit as so many equal rows."""
        if not self.schedule.padded or reduction.how != "dot" or len(order) != 1 or len(reduction.over) != 1:
            return False
        sides = [set(body.axes) & set(order) for body in reduction.bodies]
        wide = all(axis in self.tiled and self.schedule.block(axis) >= LEAST_DOT for axis in (*order, *reduction.over))
        return wide and sorted(map(len, sides)) == [0, 1]

    def _first_row(self, sums: str) -> str:
        return f"tl.sum(tl.where(tl.arange(0, {LEAST_DOT})[:, None] == 0, {sums}, 0.0), 0)"

    def _padded_dot(self, reduction: Reduction, order: Order, into: str | None) -> str:
        (over,), (column,) = reduction.over, order
        left, right = reduction.bodies if column in reduction.bodies[1].axes else reduction.bodies[::-1]
        left, right = unwidened(left, right)
        kind = left.dtype if left.dtype in ops.HALVES else right.dtype
        a, b = self._operand(left, (over,), over), self._operand(right, (over, column), over)
        a, b = (f"({one}).to({TYPES[kind]})" if kind in ops.HALVES else one for one in (a, b))
        rows = f"tl.broadcast_to(({a})[None, :], ({LEAST_DOT}, {self.schedule.block(over)}))"
        precise = ', input_precision="ieee"' if kind == "float32" else ""
        return f"tl.dot({rows}, {b}{f', {into}' if into else ''}{precise})"

    def _operand(self, body: Expr, order: Order, over: str) -> str:
        value = spread(self.value(body, order, raw=True), self.order(body, order), order)
        if self._ragged(over) and body.op != "load":
            value = f"tl.where({spread(f'({over} < {self._extent(over)})', (over,), order)}, {value}, 0.0)"
        return value

    def _together(self, first: Reduction) -> list[Reduction]:
        done = [one for scope in self.scopes for one in scope.names if isinstance(one, Reduction)]
        loops = frozenset().union(*(scope.axes for scope in self.scopes))
        covered = frozenset(axis for axis in self.kernel.extents if self._covered(axis))
        return together(self.kernel, first, done, frozenset(self.kernel.axes) | loops | covered)

    @contextmanager
    def _looping(self, axis: str, shared: bool) -> Iterator[Scope]:
        outer, block = self.scopes[-1], self.schedule.block(axis)
        scope = Scope(outer.depth + 1, frozenset({axis}))
        # Another name where the last program goes on: a name has one type, and a shared loop's may be another.
        base = f"{axis}_again" if self.base else f"{axis}_base"
        head = f"for {base} in range(0, {self._extent(axis)}, {block}):"
        if shared:
            extent = self.kernel.extents[axis]
            self._line(f"share = tl.cdiv({blocks_in(extent, block)}, {self.schedule.parts}) * {block}", outer)
            self._line(f"end = tl.minimum({self._extent(axis)}, (part + 1) * share)", outer)
            head = f"for {base} in range(part * share, end, {block}):"
        every = f"{base} + tl.arange(0, {block}){'.to(tl.int64)' if self.wide else ''}"
        self._line(f"{axis} = {every if block > 1 else f'rest * 0 + {base}' if self.wide else base}", scope)
        self.scopes.append(scope)
        yield scope
        self.scopes.pop()
        self._line(head, outer)
        outer.lines += scope.lines

    def _loop(self, axis: str, group: Sequence[Reduction]) -> None:
        """One loop over the axis for all of these, in this order, after what they need and the loop does not change."""
        for one in group:
            for body in one.bodies:
                for inner in outermost(body):
                    if inner not in group and axis not in inner.axes:
                        self.reduced(inner, ())
        outer = self.scopes[-1]
        shared = self.schedule.parts > 1 and len(self.scopes) == 1
        block = self.schedule.block(axis)
        names: dict[Reduction, str] = {}
        orders: dict[Reduction, Order] = {}
        folded: dict[Reduction, bool] = {}  # True: the sum over the tile is taken in every round, else at the end
        for one in group:
            orders[one] = tuple(a for a in self.tiled if a in one.axes)
            online = bool(maxima(one, group))
            folded[one] = self._as_dot(one, orders[one]) or online or one.how in ("max", "min") or len(orders[one]) > 1
            names[one] = self._new("s")
            if not online and self._is_padded(one, orders[one]):
                self.padded.add(one)
                folded[one] = True
            inside = orders[one] if folded[one] or block == 1 else (*orders[one], axis)
            shape = ", ".join(str(self.schedule.block(a)) for a in inside)
            if one in self.padded:
                shape = f"{LEAST_DOT}, {shape}"
            start = neutral(one.how)
            self._line(f"{names[one]} = {f'tl.full(({shape},), {start}, tl.float32)' if inside else start}", outer)
        with self._looping(axis, shared) as scope:
            for one in group:
                self._update(one, names, orders, folded, axis, scope)
        for one in group:
            if not folded[one] and block > 1:
                self._line(f"{names[one]} = {fold(one.how, names[one], len(orders[one]))}", outer)
            if one in self.padded:
                self._line(f"{names[one]} = {self._first_row(names[one])}", outer)
            outer.names[one] = names[one]
        if shared:
            self._join(names, orders)

    def _join(self, names: dict[Reduction, str], orders: dict[Reduction, Order]) -> None:
        """Leave this part's values for the others; whoever comes last joins all. What follows is that program's alone."""
        top, parts = self.scopes[0], self.schedule.parts
        places: dict[Reduction, str] = {}
        for one, name in names.items():
            order = orders[one]
            place, step = str(self.slot), 1
            for axis in reversed(order):
                place += f" + {spread(f'tl.arange(0, {self.schedule.block(axis)})', (axis,), order)} * {step}"
                step *= self.schedule.block(axis)
            places[one] = place
            self.slot += step
            mask = self.mask(order, frozenset(order))
            self._line(f"tl.store(scratch + (tile * {parts} + part) * SLOT + {place}, {name}{mask})")
        # Every thread's stores come before the ticket, and the ticket before what the last program reads.
        self._line("tl.debug_barrier()")
        self._line('ticket = tl.atomic_add(tickets + tile, 1, sem="acq_rel", scope="gpu")')
        last = Scope(top.depth + 1)
        self.scopes.append(last)
        self.base = 1
        self._line("tl.store(tickets + tile, 0)")
        inner = Scope(last.depth + 1)
        for one, name in names.items():
            order = orders[one]
            mask = self.mask(order, frozenset(order), f", other={neutral(one.how)}")
            load = f'tl.load(scratch + (tile * {parts} + other) * SLOT + {places[one]}{mask}, cache_modifier=".cg")'
            self._line(f"{name} = {load.replace('other)', '0)', 1)}")
            self._line(f"{name}_part = {load}", inner)
            if one.how in ("max", "min"):
                self._line(f"{name}_next = tl.{one.how}imum({name}, {name}_part, {ALL})", inner)
                self._line(f"{name}_safe = tl.where({name}_next == {neutral(one.how)}, 0.0, {name}_next)", inner)
                self._line(f"{name}_scale = tl.exp({name} - {name}_safe)", inner)
                self._line(f"{name}_joins = tl.exp({name}_part - {name}_safe)", inner)
                self._line(f"{name} = {name}_next", inner)
                continue
            for scaling in maxima(one, list(names)):
                own, others = (spread(f"{names[scaling]}_{way}", orders[scaling], order) for way in ("scale", "joins"))
                self._line(f"{name} = {name} * {own}", inner)
                self._line(f"{name}_part = {name}_part * {others}", inner)
            self._line(f"{name} = {name} + {name}_part", inner)
        # Unrolled, so that the loads of all parts are on their way at once.
        self._line(f"for other in {'tl.static_range' if parts <= UNROLLED else 'range'}(1, {parts}):")
        last.lines += inner.lines
        for one, name in names.items():
            del top.names[one]
            last.names[one] = name

    def _update(
        self,
        one: Reduction,
        names: dict[Reduction, str],
        orders: dict[Reduction, Order],
        folded: dict[Reduction, bool],
        axis: str,
        scope: Scope,
    ) -> None:
        name, order = names[one], orders[one]
        for top in maxima(one, list(names)):
            self._line(f"{name} = {name} * {spread(f'{names[top]}_scale', orders[top], order)}", scope)
        inside = (*order, axis) if axis in self.tiled else order
        if one in self.padded:
            self._line(f"{name} = {self._padded_dot(one, order, name)}", scope)
        elif self._as_dot(one, order):
            self._line(f"{name} = {self._dot(one, order, name)}", scope)
        elif one.how in ("max", "min"):
            body = self._masked_body(one, inside)
            if axis in self.tiled:
                # A sum that a maximum scales has the numbers that are none itself.
                scales = any(one in maxima(other, list(names)) for other in names)
                body = fold(one.how, body, len(order)) if scales else self._fold(one.how, body, len(order))
            self._line(f"{name}_next = tl.{one.how}imum({name}, {body}, {ALL})", scope)
            # Where everything so far is masked the maximum is -inf, and -inf - -inf is not a number: nothing is scaled then.
            safe = f"tl.where({name}_next == {neutral(one.how)}, 0.0, {name}_next)"
            self._line(f"{name}_safe = {safe}", scope)
            self._line(f"{name}_scale = tl.exp({name} - {name}_safe)", scope)
            self._line(f"{name} = {name}_next", scope)
            scope.names[one] = f"{name}_safe"  # what sums in this loop subtract
        else:
            body = self._masked_body(one, inside)
            if folded[one] and axis in self.tiled:
                body = fold("sum", body, len(order))
            self._line(f"{name} = {name} + {body}", scope)
