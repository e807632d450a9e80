"""WGSL text of a kernel: a worker, a thread or a workgroup of lanes, takes a point of the outer axes to its results.

row         what is the same for all of a worker's columns; the worker's reductions are computed here
columns     the axes in `Schedule.spread`: walked along after the reductions, or one column for each lane (`blocks`)
loops       a reduction (`wgsl_reductions`); the input of a product of few rows, and the weights of attention, are
            computed by one lane each and reach the others through shared memory
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from math import prod

from anytorch.gpu.wgsl.functions import needed
from anytorch.gpu.wgsl.types import head, lane_bits, stored, supported
from anytorch.graph import ops
from anytorch.graph.emit.schedule import Schedule
from anytorch.graph.emit.sharing import sizes_of
from anytorch.graph.emit.wgsl_functions import (
    AS_HALF,
    SMALL,
    SUBGROUP,
    across_slices,
    compute_kind,
    converted,
    fold,
    lanes_of,
    parameter,
    shared,
    size_text,
)
from anytorch.graph.emit.wgsl_reductions import Reductions, plain
from anytorch.graph.loops import Kernel, Store
from anytorch.graph.sizes import at, product

THREADS = 64  # of a workgroup whose workers are single threads
MOST_WORDS = 32  # parameters: 128 bytes is what every adapter has
EVERY = frozenset({"shader-f16", "shader-int64"})


def render(kernel: Kernel, schedule: Schedule, features: Collection[str] = EVERY) -> str:
    """The text of a shader for a device with these features. Bindings: what is read, then what is written; parameters: how
    many workers (threads, if they are single) a row of the grid has, the named sizes, and where what is read begins.
    Raises NotImplementedError for what cannot be written."""
    return _Writer(kernel, schedule, features).text()


def workers(kernel: Kernel, schedule: Schedule, known: Mapping[str, int]) -> int:
    """How many workers are launched for these sizes."""
    writer = _Writer(kernel, schedule, EVERY)
    count = 1
    for axis in writer.outer:
        count *= -(-at(kernel.extents[axis], known) // schedule.block(axis))
    return -(-count // writer.per)


class _Writer(Reductions):
    def __init__(self, kernel: Kernel, schedule: Schedule, features: Collection[str]) -> None:
        super().__init__(kernel, schedule, features)
        self._check(features)
        self.reads = [place for place, buffer in enumerate(kernel.buffers) if not buffer.written]
        self.per = self._per()

    def _check(self, features: Collection[str]) -> None:
        every = [one for store in self.kernel.stores for one in store.value.walk()]
        # Of half precision that no buffer holds, only the rounding is needed.
        self.rounded = {"bfloat16"} & {one.dtype for one in every}
        for buffer in self.kernel.buffers:
            if not supported(buffer.dtype, features):
                raise NotImplementedError(f"{buffer.dtype} is not in this device's shaders")
            if isinstance(buffer.elements, int) and buffer.elements >= 2**31:
                raise NotImplementedError("places beyond 2**31 do not fit into 32 bits")
        if not self.wide:
            for one in every:
                if one.dtype == "int64" and one.op not in SMALL:
                    raise NotImplementedError("whole numbers of 64 bits are not in this device's shaders")
        words = 1 + len(sizes_of(self.kernel)) + sum(not buffer.written for buffer in self.kernel.buffers)
        if words > MOST_WORDS:
            raise NotImplementedError(f"{words} parameters are more than {MOST_WORDS}")
        if self.tiled and (len(self.columns) != 1 or self.schedule.block(self.columns[0]) != self.width):
            raise NotImplementedError("a block has one column for each lane of a slice")
        if self.slices > 1 and (not self.tiled or self.lanes % self.slices):
            raise NotImplementedError("slices share the terms of a block of columns")
        if {*self.schedule.blocks} - {*self.columns, self.rows} or (self.rows and not self.tiled):
            raise NotImplementedError("a worker has a strip of one axis, beside a block of columns")

    # --- how elements of a word are owned --------------------------------------------------------------------------------

    def _per(self) -> int:
        """Neighbours that a thread computes so that it owns whole words of narrow results."""
        widths = [lanes_of(self.kernel.buffers[one.buffer].dtype) for one in self.kernel.stores if self._dense(one)]
        most = max(widths, default=1)
        if self.lanes == 1 and not self.columns and not self.kernel.reductions:
            return most
        return 1

    def _dense(self, store: Store) -> bool:
        """Whether a result's element has the number of the point it is computed for."""
        return all(axis in store.index.axes for axis in self.kernel.axes)

    def _walked(self) -> int:
        """The same for columns that are walked along."""
        length = product(self.kernel.extents[axis] for axis in self.columns)
        widths = [lanes_of(self.kernel.buffers[one.buffer].dtype) for one in self.kernel.stores if self._dense(one)]
        most = max(widths, default=1)
        return most if isinstance(length, int) and length % most == 0 and not self.arrays else 1

    # --- the whole -------------------------------------------------------------------------------------------------------

    def text(self) -> str:
        row = self.scopes[0]
        begin = self._begin()
        rest = [store for store in self.kernel.stores if self.tiled or not store.index.axes & set(self.columns)]
        along = [store for store in self.kernel.stores if store not in rest]
        # Reductions first: what they need decides how columns are walked along.
        found = {one for store in along for one in plain(store.value)}
        for one in self.kernel.reductions:
            if one in found and self._is_row(one):
                self.reduced(one)
        owned: set[int] = set()
        if self.per > 1:
            owned = {store.buffer for store in rest if self._dense(store)} & self._narrow()
        with self._strip() if self.rows else nullcontext():
            for store in rest:
                self._store(store, owned)
        if along:
            owned |= self._walk(along)
        atomic = self._narrow() - owned
        text = self._around(begin, row.lines, owned)
        return self._head(text, atomic) + text

    def _narrow(self) -> set[int]:
        stores = self.kernel.stores
        return {one.buffer for one in stores if lanes_of(self.kernel.buffers[one.buffer].dtype) > 1}

    def _head(self, text: str, atomic: Collection[int]) -> str:
        dtypes = [buffer.dtype for buffer in self.kernel.buffers]
        fields = ["row", *map(parameter, sizes_of(self.kernel)), *(f"o{place}" for place in self.reads)]
        read = {f"b{place}": dtypes[place] for place in self.reads}
        written = {
            f"b{place}": "atomic<u32>" if place in atomic else dtype
            for place, dtype in enumerate(dtypes)
            if place not in self.reads
        }
        kinds = dict.fromkeys(kind for _, kind in self.folds)
        folds = "".join(shared(kind, self.lanes) for kind in kinds)
        folds += "".join(fold(how, kind, self.lanes, self.subgroups) for how, kind in self.folds)
        folds += SUBGROUP if self.subgroups else ""
        if "across_slices(" in text:
            folds += ("" if "f32" in kinds else shared("f32", self.lanes)) + across_slices(self.lanes, self.width)
        if "as_half(" in text:
            folds += AS_HALF
        return (
            head(fields, read, written, {*dtypes, *self.rounded}) + needed(folds + text) + "".join(self.stages) + folds
        )

    def _begin(self) -> list[str]:
        """Which worker this is, and its point of the outer axes."""
        extents = self.kernel.extents
        counts = {axis: self._blocks(axis) for axis in self.outer}
        self.total = total = " * ".join(counts[axis] for axis in self.outer) or "1u"
        if all(count[:-1].isdigit() for count in counts.values()):
            self.total = total = f"{prod(int(count[:-1]) for count in counts.values())}u"
        lines = []
        if self.lanes > 1:
            lines.append(f"@compute @workgroup_size({self.lanes})")
            builtins = "@builtin(workgroup_id) w: vec3<u32>, @builtin(local_invocation_index) lane: u32"
            if self.subgroups:
                builtins += ", @builtin(subgroup_size) size: u32, @builtin(subgroup_id) number: u32, "
                builtins += "@builtin(subgroup_invocation_id) within: u32"
            lines.append(f"fn main({builtins}) {{")
            if self.subgroups:
                lines.append("  sub_size = size; sub_number = number; sub_within = within;")
            lines.append("  let worker = w.x + w.y * p.row;")
        else:
            lines.append(f"@compute @workgroup_size({THREADS}) fn main(@builtin(global_invocation_id) g: vec3<u32>) {{")
            lines.append("  let worker = g.x + g.y * p.row;")
        if self.per == 1:
            lines.append(f"  if (worker >= {total}) {{ return; }}")
            self._decode(self.outer, "worker", counts)
        else:
            lines.append(f"  let first = worker * {self.per}u;")
            lines.append(f"  if (first >= {total}) {{ return; }}")
            self.scopes[0].depth = 2
            self._decode(self.outer, "point", counts)
        if self.tiled:
            (column,) = self.columns
            own = "lane" if self.slices == 1 else f"lane % {self.width}u"
            self._line(f"let own = tile * {self.width}u + {own};")
            self._line(f"let {column} = min(own, {size_text(extents[column])} - 1u);")
        return lines

    def _blocks(self, axis: str) -> str:
        """How many workers share an axis."""
        extent, block = self.kernel.extents[axis], self.schedule.block(axis)
        if isinstance(extent, int) or block == 1:
            return size_text(extent if block == 1 else -(-extent // block))
        return f"(({size_text(extent)} + {block - 1}u) / {block}u)"

    def _around(self, begin: list[str], lines: list[str], owned: Collection[int]) -> str:
        if self.per > 1:
            words = [f"  var word{buffer} = 0u;" for buffer in sorted(owned)]
            loop = f"  for (var part = 0u; part < {self.per}u; part++) {{"
            inside = ["    let point = first + part;", f"    if (point >= {self.total}) {{ break; }}"]
            last = f"    let last = part == {self.per - 1}u || point + 1u == {self.total};"
            lines = [*words, loop, *inside, last, *lines, "  }"]
        return "\n".join([*begin, *lines, "}"]) + "\n"

    # --- stores ----------------------------------------------------------------------------------------------------------

    def _walk(self, stores: Sequence[Store]) -> set[int]:
        """Walk along the columns and store what belongs to them; returns the buffers whose words a thread owns."""
        length, per = self._length(self.columns), self._walked()
        lane = "lane" if self.lanes > 1 else "0u"
        if self.arrays:
            with self._columns() as guard, self._inside(guard, self.columns):
                for store in stores:
                    self._store(store, ())
            return set()
        if per == 1:
            with self._over(self.columns, lane, length, self.lanes):
                for store in stores:
                    self._store(store, ())
            return set()
        owned = {store.buffer for store in stores if self._dense(store)} & self._narrow()
        step = f"{self.lanes * per}u"
        with self._inside(f"for (var first = {lane} * {per}u; first < {length}; first += {step}) {{"):
            for buffer in sorted(owned):
                self._line(f"var word{buffer} = 0u;")
            with self._inside(f"for (var part = 0u; part < {per}u; part++) {{", self.columns):
                self._line(f"let last = part == {per - 1}u;")
                self._bind(self.columns, "(first + part)")
                for store in stores:
                    self._store(store, owned)
        return owned

    def _store(self, store: Store, owned: Collection[int]) -> None:
        buffer = self.kernel.buffers[store.buffer]
        kind, width = compute_kind(buffer.dtype, self.wide), lanes_of(buffer.dtype)
        # A comparison of two halves that are nearly equal is decided by how they were rounded.
        self.rounding = buffer.dtype not in ops.FLOATS
        value, place = self._as(store.value, kind), self.index(store.index)
        self.rounding = False
        # Of a result that has fewer axes than the others, one worker stores each element.
        missing = [axis for axis in self.kernel.axes if axis not in store.index.axes]
        asked = [f"{axis} == 0u" for axis in missing if any(axis in scope.axes for scope in self.scopes)]
        if self.rows in store.index.axes:
            asked.append(f"own_row < {self._length([self.rows])}")
        if self.tiled and store.index.axes & set(self.columns):
            asked.append(f"own < {self._length(self.columns)}")
            asked += [f"lane < {self.width}u"] if self.slices > 1 else []
        elif self.lanes > 1 and not store.index.axes & set(self.columns):
            asked.append("lane == 0u")
        if width == 1:
            done = f"b{store.buffer}[{place}] = {stored(buffer.dtype, value)};"
        else:
            bits = lane_bits(buffer.dtype, converted(value, "bool", "u32") if kind == "bool" else value)
            at_, shift = self._new("a"), 32 // width
            self._line(f"let {at_} = {place};")
            part = f"({at_} & {width - 1}u) * {shift}u"
            word = f"b{store.buffer}[{at_} / {width}u]"
            if store.buffer in owned:
                self._line(f"word{store.buffer} |= {bits} << ({part});")
                asked.append(f"(({at_} & {width - 1}u) == {width - 1}u || last)")
                done = f"{word} = word{store.buffer}; word{store.buffer} = 0u;"
            else:
                mask = (1 << shift) - 1
                done = f"atomicAnd(&{word}, ~({mask}u << ({part}))); atomicOr(&{word}, {bits} << ({part}));"
        self._line(f"if ({' && '.join(asked)}) {{ {done} }}" if asked else done)
