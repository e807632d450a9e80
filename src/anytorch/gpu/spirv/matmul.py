"""Matrix products on matrix cores: C = activation(alpha A B + beta D), sums in float32, as SPIR-V.

A workgroup computes a tile of C, its subgroups a part of the tile each. Tiles of A and B travel from memory through
registers into workgroup memory as they lie (rows or columns), while the tiles before them are multiplied. Elements are read
and written eight at a time (16 bytes) where rows begin at multiples of eight, else one by one. Rows and columns beyond the
edge repeat the last one and are not stored; beyond the end of k there are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

from anytorch.gpu.spirv.module import COLUMN_MAJOR, ROW_MAJOR, USE_A, USE_ACCUMULATOR, USE_B, Module, Value

EIGHT = 8  # elements of 16 bits in one read
GROUPED = 8  # rows of tiles that are computed together, so that their operands are found in the cache

PARAMETERS = (
    *("m", "n", "k", "chunk", "splits", "tiles_m", "tiles_n", "grid_x", "batches"),
    *("a_batch", "a_step", "b_batch", "b_step", "d_batch", "d_row", "d_col", "c_batch", "c_row"),
)


@dataclass(frozen=True)
class Shape:
    """A matrix shape of the driver's, and how many invocations share it."""

    m: int
    n: int
    k: int
    subgroup: int


@dataclass(frozen=True)
class Tile:
    """What a workgroup computes: bm x bn of C in steps of bk, by wm x wn subgroups. `buffers`: tiles in workgroup memory."""

    bm: int
    bn: int
    bk: int
    wm: int
    wn: int
    buffers: int = 2

    @property
    def name(self) -> str:
        return f"matrix cores {self.bm}x{self.bn}x{self.bk} by {self.wm}x{self.wn}" + (
            " single" if self.buffers == 1 else ""
        )

    @property
    def subgroups(self) -> int:
        return self.wm * self.wn

    def fits(self, shape: Shape, shared_bytes: int, threads: int) -> bool:
        invocations = self.subgroups * shape.subgroup
        whole = (
            self.bm % (self.wm * shape.m) == 0
            and self.bn % (self.wn * shape.n) == 0
            and self.bk % shape.k == 0
            and (self.bm * self.bk) % (EIGHT * invocations) == 0
            and (self.bn * self.bk) % (EIGHT * invocations) == 0
            and shape.m % EIGHT == shape.n % EIGHT == shape.k % EIGHT == 0
            and (shape.m * (self.bn // self.wn)) % (EIGHT * shape.subgroup) == 0
        )
        worst = max(layout(self, shape, a, b).units for a in "km" for b in "nk") * 16 if whole else 0
        return whole and worst <= shared_bytes and invocations <= threads


@dataclass(frozen=True)
class Layout:
    """How a tile lies in workgroup memory, in units of 16 bytes."""

    a_row: int
    b_row: int
    b_at: int
    stage: int
    scratch_row: int
    scratch: int  # of one subgroup
    units: int


def layout(tile: Tile, shape: Shape, a_along: str, b_along: str) -> Layout:
    """One unit more than a row needs keeps rows in different banks."""
    a_row = (tile.bk if a_along == "k" else tile.bm) // EIGHT + 1
    b_row = (tile.bn if b_along == "n" else tile.bk) // EIGHT + 1
    b_at = a_row * (tile.bm if a_along == "k" else tile.bk)
    stage = b_at + b_row * (tile.bk if b_along == "n" else tile.bn)
    scratch_row = tile.bn // tile.wn // 4 + 1
    scratch = scratch_row * shape.m
    units = max(tile.buffers * stage, scratch * tile.subgroups)
    return Layout(a_row, b_row, b_at, stage, scratch_row, scratch, units)


@dataclass(frozen=True)
class Product:
    """A kernel: dtypes, how the operands lie, and what becomes of the sums."""

    element: str  # float16 or bfloat16: of A and B
    stored: str  # of C; float32 where `split`
    tile: Tile
    shape: Shape
    added: str = ""  # of D
    a_along: str = "k"  # the index along which A's elements are neighbours
    b_along: str = "n"
    activation: str = ""
    split: bool = False  # C holds the parts one after another, as they are
    ragged_k: bool = True  # k, or a part of it, is no multiple of bk
    a_units: bool = True  # A is read in units of 16 bytes, else element by element
    b_units: bool = True
    whole_rows: bool = True  # C's rows are written in whole units of 16 bytes

    @property
    def bindings(self) -> int:
        return 4 if self.added else 3


def render(kernel: Product) -> bytes:
    return Writer(kernel).words()


class Writer:
    """Writes a product's kernel. A convolution reads B, and writes C, in its own way (`convolution`)."""

    def __init__(self, kernel: Product) -> None:
        tile, shape = kernel.tile, kernel.shape
        self.kernel, self.tile, self.shape = kernel, tile, shape
        self.threads = tile.subgroups * shape.subgroup
        module = self.module = Module(self.threads)
        self.quad = module.vector(module.u32, 4)
        self.layout = layout(tile, shape, kernel.a_along, kernel.b_along)
        self._bind()
        self.memory = module.shared(self.quad, self.layout.units)
        self.thread = module.local_index()
        self.subgroup, self.lane = module.subgroup()
        element = module.float16() if kernel.element == "float16" else module.bfloat16()
        self.a_type = module.matrix(element, shape.m, shape.k, USE_A)
        self.b_type = module.matrix(element, shape.k, shape.n, USE_B)
        self.c_type = module.matrix(module.f32, shape.m, shape.n, USE_ACCUMULATOR)

    def _bind(self) -> None:
        """The buffers and the parameters."""
        module, kernel = self.module, self.kernel
        self.a = self._halves(0, units=kernel.a_units)
        self.b = self._halves(1, units=kernel.b_units)
        self.d = module.buffer(2, module.u32, 4) if kernel.added else None
        if kernel.stored == "float32" and not kernel.whole_rows:
            self.c = module.buffer(kernel.bindings - 1, module.u32, 4, writable=True)
        else:
            self.c = self._halves(kernel.bindings - 1, units=kernel.whole_rows, writable=True)
        places = ("a_at", "b_at", *(("d_at",) if kernel.added else ()), "c_at")
        self.p = module.parameters(("alpha", "beta", *places, *PARAMETERS))

    def _halves(self, binding: int, *, units: bool, writable: bool = False) -> Value:
        """A buffer of units of 16 bytes, or of elements of 16 bits: of their bits alone, so bfloat16 is read as float16."""
        module = self.module
        if units:
            return module.buffer(binding, self.quad, 16, writable=writable)
        module.require(4433)
        return module.buffer(binding, module.float16(), 2, writable=writable)

    def words(self) -> bytes:
        self._place()
        self._sum()
        self._store()
        return self.module.finish()

    def _place(self) -> None:
        """Which tile of which product this workgroup computes, and from where to where along k."""
        module, p, tile = self.module, self.p, self.tile
        x, y = module.workgroup()
        linear = x + y * p["grid_x"]
        tiles = p["tiles_m"] * p["tiles_n"]
        batch_part = linear // tiles
        module.leave_if(batch_part >= p["batches"])
        within = linear % tiles
        across = p["tiles_n"] * GROUPED
        first = within // across * GROUPED
        rows = (p["tiles_m"] - first).minimum(GROUPED)
        self.m0 = (first + within % across % rows) * tile.bm
        self.n0 = within % across // rows * tile.bn
        self.batch, self.part = batch_part // p["splits"], batch_part % p["splits"]
        self.batch_part = batch_part
        self.first = self.part * p["chunk"]
        self.end = (self.first + p["chunk"]).minimum(p["k"])
        self.last = self.first + (self.end - self.first - 1) // tile.bk * tile.bk  # where the last step begins

    # --- from memory into workgroup memory ----------------------------------------------------------------------------

    def _reads(self, name: str) -> list[tuple[Value, Value, Value]]:
        """For each read of this invocation: its place at k = 0, its k in the tile, its place in workgroup memory."""
        p, tile, kernel = self.p, self.tile, self.kernel
        extent = tile.bm if name == "a" else tile.bn
        each = EIGHT if (kernel.a_units if name == "a" else kernel.b_units) else 1  # elements in what a place counts
        along = self.kernel.a_along if name == "a" else self.kernel.b_along
        row_units = self.layout.a_row if name == "a" else self.layout.b_row
        origin, length = (self.m0, p["m"]) if name == "a" else (self.n0, p["n"])
        base = p[f"{name}_at"] // each + self.batch * (p[f"{name}_batch"] // each)
        step = p[f"{name}_step"] // each
        found = []
        units = (tile.bk if along == "k" else extent) // EIGHT
        for number in range(extent * tile.bk // EIGHT // self.threads):
            one = self.thread + number * self.threads
            row, unit = one // units, one % units
            inside = row * row_units + unit
            if name == "b":
                inside = inside + self.layout.b_at
            if along == "k":
                line = (origin + row).minimum(length - 1)
                found.append((base + line * step + unit * (EIGHT // each), unit * EIGHT, inside))
            else:
                line = (origin + unit * EIGHT).minimum((length - 1) // EIGHT * EIGHT) // each
                found.append((base + line + row * step, row, inside))
        return found

    def _fetch(self, name: str, k0: Value) -> list[Value]:
        module = self.module
        along = self.kernel.a_along if name == "a" else self.kernel.b_along
        buffer = self.a if name == "a" else self.b
        units = self.kernel.a_units if name == "a" else self.kernel.b_units
        each = EIGHT if units else 1
        moved = k0 // each if along == "k" else k0 * (self.p[f"{name}_step"] // each)
        values = []
        for place, k, _ in self.reads[name]:
            if not units:
                values.append(self._one_by_one(buffer, place + moved, k0 + k, along == "k"))
                continue
            if not self.kernel.ragged_k:
                values.append(module.read(buffer, place + moved))
                continue
            inside = k0 + k < self.end
            value = module.read(buffer, module.select(inside, place + moved, module.constant(0)))
            four = module.op(80, module.vector(module.boolean, 4), *[inside] * 4)
            values.append(module.op(169, self.quad, four, value, module.zero(self.quad)))
        return values

    def _one_by_one(self, buffer: Value, place: Value, k: Value, along_k: bool) -> Value:
        """Eight elements from a place that may be anywhere; zeros beyond the end of k. What is beyond the edge of m or n is
        never stored and may be anything, but it must be in the buffer."""
        module = self.module
        zero, start = module.zero(module.float16()), module.constant(0)
        length = module.op(68, module.u32, buffer, 0)  # of the buffer's array, in elements
        halves = []
        for number in range(EIGHT):
            inside = k + number < self.end if along_k else k < self.end
            at = place + number if along_k else (place + number).minimum(length - 1)
            halves.append(module.select(inside, module.read(buffer, module.select(inside, at, start)), zero))
        return eight_halves(module, halves)

    def _put(self, fetched: dict[str, list[Value]], stage: Value) -> None:
        for name, values in fetched.items():
            for (_, _, inside), value in zip(self.reads[name], values, strict=True):
                self.module.shared_write(self.memory, stage + inside, value)

    # --- products -----------------------------------------------------------------------------------------------------

    def _start_sums(self) -> None:
        """Matrices of zeros for this subgroup's part of the tile, and where that part lies."""
        module, tile, shape = self.module, self.tile, self.shape
        self.rows, self.columns = tile.bm // tile.wm // shape.m, tile.bn // tile.wn // shape.n
        self.warp_m, self.warp_n = self.subgroup % tile.wm, self.subgroup // tile.wm
        zero = module.zero(self.c_type)
        self.sums = [[module.local(self.c_type, zero) for _ in range(self.columns)] for _ in range(self.rows)]

    def _sum(self) -> None:
        module, tile = self.module, self.tile
        self.reads = {name: self._reads(name) for name in "ab"}
        self._start_sums()
        nowhere = module.constant(0)
        kept = {name: [module.local(self.quad, value) for value in self._fetch(name, self.first)] for name in "ab"}
        if tile.buffers == 2:
            self._put({name: [module.get(one) for one in values] for name, values in kept.items()}, nowhere)
            module.barrier()
        with module.loop(self.first, self.end, tile.bk * tile.buffers) as k0:
            following = (k0 + tile.bk).minimum(self.last)
            if tile.buffers == 2:  # both turns are written out: an address that changes costs more than it saves
                self._turn(following, nowhere, module.constant(self.layout.stage))
                with module.when(k0 + tile.bk < self.end):
                    self._turn((k0 + 2 * tile.bk).minimum(self.last), module.constant(self.layout.stage), nowhere)
            else:
                self._put({name: [module.get(one) for one in values] for name, values in kept.items()}, nowhere)
                module.barrier()
                for name in "ab":
                    for variable, value in zip(kept[name], self._fetch(name, following), strict=True):
                        module.put(variable, value)
                self._multiply(nowhere)
                module.barrier()

    def _turn(self, following: Value, here: Value, there: Value) -> None:
        """Multiply what lies in one buffer while the next tiles are fetched for the other."""
        fetched = {name: self._fetch(name, following) for name in "ab"}
        self._multiply(here)
        self._put(fetched, there)
        self.module.barrier()

    def _multiply(self, stage: Value) -> None:
        module, tile, shape, form = self.module, self.tile, self.shape, self.layout
        a_first = self.warp_m * (tile.bm // tile.wm)
        b_first = self.warp_n * (tile.bn // tile.wn)
        for k in range(0, tile.bk, shape.k):
            left, right = [], []
            for i in range(self.rows):
                row = a_first + i * shape.m
                if self.kernel.a_along == "k":
                    at, order = stage + row * form.a_row + k // EIGHT, ROW_MAJOR
                else:
                    at, order = stage + row // EIGHT + k * form.a_row, COLUMN_MAJOR
                left.append(module.load_matrix(self.a_type, self.memory, at, order, form.a_row))
            for j in range(self.columns):
                column = b_first + j * shape.n
                if self.kernel.b_along == "n":
                    at, order = stage + column // EIGHT + (form.b_at + k * form.b_row), ROW_MAJOR
                else:
                    at, order = stage + column * form.b_row + (form.b_at + k // EIGHT), COLUMN_MAJOR
                right.append(module.load_matrix(self.b_type, self.memory, at, order, form.b_row))
            for i, a in enumerate(left):
                for j, b in enumerate(right):
                    module.put(self.sums[i][j], module.multiply_add(a, b, module.get(self.sums[i][j])))

    # --- results ------------------------------------------------------------------------------------------------------

    def _store(self) -> None:
        """Sums go through workgroup memory, a row of matrices at a time, because only there is an element's place known."""
        module, tile, shape, form = self.module, self.tile, self.shape, self.layout
        width = tile.bn // tile.wn
        scratch = self.subgroup * form.scratch
        for i in range(self.rows):
            module.barrier()  # what was multiplied from, or read, before has been read by all
            for j in range(self.columns):
                at = scratch + j * shape.n // 4
                module.store_matrix(module.get(self.sums[i][j]), self.memory, at, form.scratch_row)
            module.barrier()
            for number in range(shape.m * width // EIGHT // shape.subgroup):
                one = self.lane + number * shape.subgroup
                row, eight = one // (width // EIGHT), one % (width // EIGHT)
                m = self.m0 + self.warp_m * (tile.bm // tile.wm) + i * shape.m + row
                n = self.n0 + self.warp_n * width + eight * EIGHT
                inside = scratch + row * form.scratch_row + eight * 2
                with module.when(module.both(m < self.p["m"], n < self.p["n"])):
                    halves = [module.shared_read(self.memory, inside + half) for half in range(2)]
                    values = [
                        module.bitcast(module.f32, module.op(81, module.u32, half, lane))
                        for half in halves
                        for lane in range(4)
                    ]
                    self._write(m, n, values)

    def _write(self, m: Value, n: Value, values: list[Value]) -> None:
        module, p, kernel = self.module, self.p, self.kernel
        if not kernel.split:
            values = [self._finished(m, n, number, value) for number, value in enumerate(values)]
            at = p["c_at"] + self.batch * p["c_batch"] + m * p["c_row"] + n
        else:
            at = p["c_at"] + self.batch_part * p["c_batch"] + m * p["c_row"] + n
        if kernel.stored != "float32":
            pairs = [word_of_two(module, kernel.stored, values[i], values[i + 1]) for i in range(0, 8, 2)]
            if kernel.whole_rows:
                module.write(self.c, at // EIGHT, module.op(80, self.quad, *pairs))
                return
            for number in range(EIGHT):
                with module.when(n + number < p["n"]):
                    module.write(self.c, at + number, half_of(module, pairs, number))
            return
        words = [module.bitcast(module.u32, value) for value in values]
        if kernel.whole_rows:
            module.write(self.c, at // 4, module.op(80, self.quad, *words[:4]))
            with module.when(n + 4 < p["n"]):
                module.write(self.c, at // 4 + 1, module.op(80, self.quad, *words[4:]))
            return
        for number, word in enumerate(words):
            with module.when(n + number < p["n"]):
                module.write(self.c, at + number, word)

    def _finished(self, m: Value, n: Value, number: int, value: Value) -> Value:
        module, p = self.module, self.p
        value = module.times(value, p["alpha"])
        if self.d is not None:
            column = (n + number).minimum(p["n"] - 1)
            at = p["d_at"] + self.batch * p["d_batch"] + m * p["d_row"] + column * p["d_col"]
            value = module.extended(50, module.f32, p["beta"], self._added(at), value)
        if self.kernel.activation == "relu":
            # NaN stays NaN: max would drop it.
            return module.select(module.less(value, module.real(0.0)), module.real(0.0), value)
        if self.kernel.activation == "gelu":
            return _gelu(module, value)
        return value

    def _added(self, at: Value) -> Value:
        assert self.d is not None
        return load_float(self.module, self.d, self.kernel.added, at)


def _gelu(module: Module, value: Value) -> Value:
    """0.5 x (1 + tanh(0.79788 (x + 0.044715 x^3))), with the tangent's argument kept where it cannot overflow."""
    cube = module.times(module.times(value, value), module.times(value, module.real(0.044715)))
    inner = module.times(module.add(value, cube), module.real(0.7978845608028654))
    clamped = module.extended(43, module.f32, inner, module.real(-15.0), module.real(15.0))
    tangent = module.extended(21, module.f32, clamped)
    return module.times(module.times(value, module.real(0.5)), module.add(tangent, module.real(1.0)))


def load_float(module: Module, buffer: Value, name: str, at: Value) -> Value:
    """An element of a buffer of words, as float32."""
    if name == "float32":
        return module.bitcast(module.f32, module.read(buffer, at))
    half = module.op(194, module.u32, module.read(buffer, at >> 1), (at & 1) << 4)
    if name == "bfloat16":
        return module.bitcast(module.f32, half << 16)
    two = module.extended(62, module.vector(module.f32, 2), half)  # UnpackHalf2x16
    return module.op(81, module.f32, two, 0)


def eight_halves(module: Module, halves: list[Value]) -> Value:
    """Eight elements of 16 bits as one unit of 16 bytes."""
    two = module.vector(module.float16(), 2)
    words = [module.bitcast(module.u32, module.op(80, two, halves[i], halves[i + 1])) for i in range(0, EIGHT, 2)]
    return module.op(80, module.vector(module.u32, 4), *words)


def half_of(module: Module, words: list[Value], number: int) -> Value:
    """One of the elements of 16 bits that words are made of."""
    half = module.float16()
    return module.op(81, half, module.bitcast(module.vector(half, 2), words[number // 2]), number % 2)


def word_of_two(module: Module, stored: str, low: Value, high: Value) -> Value:
    """Two numbers as one word of two float16 or bfloat16."""
    if stored == "float16":
        half = module.float16()
        cast = [module.op(115, half, value) for value in (low, high)]
        return module.bitcast(module.u32, module.op(80, module.vector(half, 2), *cast))
    return _bfloat16_bits(module, low) >> 16 | (_bfloat16_bits(module, high) & 0xFFFF0000)


def _bfloat16_bits(module: Module, value: Value) -> Value:
    """The upper half of the result is the number rounded to the nearest bfloat16, ties to even; NaN stays one."""
    bits = module.bitcast(module.u32, value)
    rounded = bits + ((bits >> 16) & 1) + 0x7FFF
    return module.select(module.op(156, module.boolean, value), module.constant(0x7FC00000), rounded)
