"""Attention on matrix cores: scores, softmax and output of a block of queries in one kernel, as SPIR-V.

A subgroup has as many queries as one or two matrices have rows. Blocks of keys and values pass through workgroup memory;
the scores of a block go through it too, because only there is an element's place known: each row's lanes turn it into
weights in half precision. The maximum and the sum of a row are kept by its lanes, the output in float32 matrices, which are
corrected by a matrix of factors when a row's maximum grows. The operands and parameters are those of the WGSL kernels.
"""

from __future__ import annotations

import math

from anytorch.gpu.spirv.matmul import EIGHT, Shape, load_float, word_of_two
from anytorch.gpu.spirv.module import (
    COLUMN_MAJOR,
    ROW_MAJOR,
    SCOPE_SUBGROUP,
    USE_A,
    USE_ACCUMULATOR,
    USE_B,
    Module,
    Value,
)
from anytorch.gpu.wgsl.attention_kernel import PARAMETERS, Attention

LOWEST = -3.0e38  # stands for minus infinity, as in the WGSL kernels
LOG2_E = math.log2(math.e)


def fits(kernel: Attention, shape: Shape, shared_bytes: int, threads: int) -> bool:
    """Whether a driver with this matrix shape can run the kernel."""
    lines = kernel.stacked * shape.m  # queries of a subgroup
    invocations = kernel.queries // lines * shape.subgroup
    steps = (
        kernel.dimension % shape.k == kernel.dimension % shape.n == kernel.keys % shape.n == kernel.keys % shape.k == 0
    )
    reads = kernel.keys * kernel.dimension % (EIGHT * invocations) == 0
    lanes = max(1, shape.subgroup // lines)  # that share a row
    rows = (shape.subgroup % lines == 0 or lines % shape.subgroup == 0) and kernel.keys % (EIGHT * lanes) == 0
    stores = lines * math.gcd(kernel.dimension, kernel.keys) % (EIGHT * shape.subgroup) == 0
    whole = kernel.queries % lines == shape.m % EIGHT == shape.n % EIGHT == shape.k % EIGHT == 0
    return (
        (steps and reads and rows and stores and whole)
        and invocations <= threads
        and _Places(kernel, shape).units * 16 <= shared_bytes
    )


class _Places:
    """Where things lie in workgroup memory, in units of 16 bytes; one unit more than a row needs, against bank conflicts."""

    def __init__(self, kernel: Attention, shape: Shape) -> None:
        lines = kernel.stacked * shape.m
        self.key_row = kernel.dimension // EIGHT + 1
        self.values = kernel.keys * self.key_row
        self.scores = 2 * self.values
        self.score_row = kernel.keys // 4 + 1
        self.weight_row = kernel.keys // EIGHT + 1  # weights take the place of scores
        self.factor_row = shape.n // 4 + 1
        self.factors = lines * self.score_row  # from the subgroup's own place on
        self.own = self.factors + lines * self.factor_row
        self.units = max(self.scores + kernel.queries // lines * self.own, kernel.queries * self.key_row)


def render(kernel: Attention, shape: Shape) -> bytes:
    return _Writer(kernel, shape).words()


class _Writer:
    def __init__(self, kernel: Attention, shape: Shape) -> None:
        self.kernel, self.shape = kernel, shape
        self.lines = kernel.stacked * shape.m
        self.subgroups = kernel.queries // self.lines
        self.threads = self.subgroups * shape.subgroup
        module = self.module = Module(self.threads)
        self.quad = module.vector(module.u32, 4)
        self.buffers = {}
        for number, name in enumerate(kernel.operands):
            words = name in ("mask", "sums")
            self.buffers[name] = module.buffer(
                number, module.u32 if words else self.quad, 4 if words else 16, writable=kernel.writes(name)
            )
        names = [field.partition(":")[0] for field in PARAMETERS]
        self.p = module.parameters([*[f"{name}_at" for name in kernel.operands], *names])
        self.places = _Places(kernel, shape)
        self.memory = module.shared(self.quad, self.places.units)
        self.thread = module.local_index()
        self.subgroup, self.lane = module.subgroup()
        element = module.float16() if kernel.dtype == "float16" else module.bfloat16()
        self.a_type = module.matrix(element, shape.m, shape.k, USE_A)
        self.b_type = module.matrix(element, shape.k, shape.n, USE_B)
        self.c_type = module.matrix(module.f32, shape.m, shape.n, USE_ACCUMULATOR)
        self.row_lanes = max(1, shape.subgroup // self.lines)  # that share a row
        self.lane_rows = max(1, self.lines // shape.subgroup)  # of one lane, where there are more rows than lanes

    def words(self) -> bytes:
        module, p, kernel = self.module, self.p, self.kernel
        x, y = module.workgroup()
        linear = x + y * p["row"]
        module.leave_if(linear >= p["total"])
        # The last blocks of queries have the most keys to look at where later keys are hidden: they come first.
        block = p["blocks"] - 1 - linear % p["blocks"]
        self.head = linear // p["blocks"] % p["heads"]
        self.batch = linear // (p["blocks"] * p["heads"])
        self.query0 = block * kernel.queries
        self.own = self.subgroup * self.places.own + self.places.scores
        self.part = self.lane % self.row_lanes
        first = self.lane // self.row_lanes
        self.own_rows = [first + number * self.shape.subgroup for number in range(self.lane_rows)]
        self.first_query = self.query0 + self.subgroup * self.lines
        self.end = p["keys"]
        if kernel.causal:
            self.end = self.end.minimum(self.query0 + kernel.queries)
        self.last = (self.end - 1) // kernel.keys * kernel.keys
        self._queries()
        self._attend()
        self._store()
        return module.finish()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _base(self, name: str) -> Value:
        p = self.p
        head = self.head if name in ("q", "out") else self.head // p["shared_by"]
        return p[f"{name}_at"] + self.batch * p[f"{name}_batch"] + head * p[f"{name}_head"]

    def _queries(self) -> None:
        """The queries of each subgroup as matrices, by way of workgroup memory, where nothing else is yet."""
        module, kernel, shape, places = self.module, self.kernel, self.shape, self.places
        units = kernel.dimension // EIGHT
        base = self._base("q") // EIGHT
        own = self.subgroup * (self.lines * places.key_row)
        for number in range(self.lines * units // shape.subgroup):
            one = self.lane + number * shape.subgroup
            row, unit = one // units, one % units
            query = (self.query0 + self.subgroup * self.lines + row).minimum(self.p["queries"] - 1)
            value = module.read(self.buffers["q"], base + query * (self.p["q_place"] // EIGHT) + unit)
            module.shared_write(self.memory, own + row * places.key_row + unit, value)
        module.barrier()
        self.queries = [
            [
                module.load_matrix(
                    self.a_type, self.memory, own + line * places.key_row + d // EIGHT, ROW_MAJOR, places.key_row
                )
                for d in range(0, kernel.dimension, shape.k)
            ]
            for line in range(0, self.lines, shape.m)
        ]
        module.barrier()

    def _fetch(self, key0: Value) -> list[Value]:
        """A block of keys and its values, of which this invocation reads a part. Keys beyond the last repeat it."""
        module, kernel = self.module, self.kernel
        units = kernel.dimension // EIGHT
        found = []
        for name in "kv":
            base, step = self.bases[name]
            for number in range(kernel.keys * units // self.threads):
                one = self.thread + number * self.threads
                key = (key0 + one // units).minimum(self.p["keys"] - 1)
                found.append(module.read(self.buffers[name], base + key * step + one % units))
        return found

    def _put(self, values: list[Value]) -> None:
        kernel, places = self.kernel, self.places
        units = kernel.dimension // EIGHT
        for number, value in enumerate(values):
            half = len(values) // 2
            one = self.thread + number % half * self.threads
            place = one // units * places.key_row + one % units
            self.module.shared_write(self.memory, place + (places.values if number >= half else 0), value)

    # --- scores and outputs -------------------------------------------------------------------------------------------

    def _attend(self) -> None:
        module, kernel, shape = self.module, self.kernel, self.shape
        zero = module.zero(self.c_type)
        count = kernel.dimension // shape.n
        self.outputs = [[module.local(self.c_type, zero) for _ in range(count)] for _ in range(kernel.stacked)]
        self.tops = [module.local(module.f32, module.real(LOWEST)) for _ in self.own_rows]
        self.totals = [module.local(module.f32, module.real(0.0)) for _ in self.own_rows]
        self.bases = {name: (self._base(name) // EIGHT, self.p[f"{name}_place"] // EIGHT) for name in "kv"}
        self.scale = module.times(self.p["scale"], module.real(LOG2_E))
        kept = [module.local(self.quad, value) for value in self._fetch(module.constant(0))]
        with module.loop(0, self.end, kernel.keys) as key0:
            self._put([module.get(one) for one in kept])
            module.barrier()
            for variable, value in zip(kept, self._fetch((key0 + kernel.keys).minimum(self.last)), strict=True):
                module.put(variable, value)
            self._scores()
            module.barrier(SCOPE_SUBGROUP)
            self._weigh(key0)
            module.barrier(SCOPE_SUBGROUP)
            self._values()
            module.barrier()

    def _scores(self) -> None:
        module, kernel, shape, places = self.module, self.kernel, self.shape, self.places
        for n in range(0, kernel.keys, shape.n):
            scores = [module.zero(self.c_type)] * kernel.stacked
            for number, d in enumerate(range(0, kernel.dimension, shape.k)):
                at = module.constant(n * places.key_row + d // EIGHT)
                keys = module.load_matrix(self.b_type, self.memory, at, COLUMN_MAJOR, places.key_row)
                scores = [
                    module.multiply_add(queries[number], keys, score)
                    for queries, score in zip(self.queries, scores, strict=True)
                ]
            for line, score in enumerate(scores):
                at = self.own + line * shape.m * places.score_row + n // 4
                module.store_matrix(score, self.memory, at, places.score_row)

    def _weigh(self, key0: Value) -> None:
        """Rows of scores to weights, and the factors that what was summed before must be corrected by."""
        module, kernel, places = self.module, self.kernel, self.places
        columns = kernel.keys // self.row_lanes
        first = self.part * columns
        found = [self._weights(number, key0, first, columns) for number in range(self.lane_rows)]
        module.barrier(SCOPE_SUBGROUP)  # all lanes have read their scores
        for row, (weights, factor) in zip(self.own_rows, found, strict=True):
            place = self.own + row * places.weight_row + first // EIGHT
            for number in range(0, columns, EIGHT):
                pairs = [
                    word_of_two(module, kernel.dtype, weights[i], weights[i + 1])
                    for i in range(number, number + EIGHT, 2)
                ]
                module.shared_write(self.memory, place + number // EIGHT, module.op(80, self.quad, *pairs))
            self._put_factor(row, factor)

    def _weights(self, number: int, key0: Value, first: Value, columns: int) -> tuple[list[Value], Value]:
        """One row's weights in the columns from `first` on, and its factor."""
        module, places, row = self.module, self.places, self.own_rows[number]
        query = self.first_query + row
        at = self.own + row * places.score_row + first // 4
        scores: list[Value] = []
        for unit in range(columns // 4):
            four = module.shared_read(self.memory, at + unit)
            for lane in range(4):
                dot = module.bitcast(module.f32, module.op(81, module.u32, four, lane))
                scores.append(self._score(module.times(dot, self.scale), query, key0 + first + (4 * unit + lane)))
        before = module.get(self.tops[number])
        top = before
        for score in scores:
            top = module.extended(40, module.f32, top, score)
        for other in _powers(self.row_lanes):
            top = module.extended(40, module.f32, top, module.from_lane(top, other))
        # A row that has seen no key: its scores are all LOWEST, and none of them may count as exp2(0).
        none = module.less(top, module.real(LOWEST / 2))
        base = module.select(none, module.real(0.0), top)
        weights = [module.extended(29, module.f32, module.op(131, module.f32, score, base)) for score in scores]
        total = weights[0]
        for weight in weights[1:]:
            total = module.add(total, weight)
        for other in _powers(self.row_lanes):
            total = module.add(total, module.from_lane(total, other))
        factor = module.extended(29, module.f32, module.op(131, module.f32, before, base))
        module.put(self.totals[number], module.extended(50, module.f32, module.get(self.totals[number]), factor, total))
        module.put(self.tops[number], top)
        return weights, factor

    def _score(self, score: Value, query: Value, key: Value) -> Value:
        module, p, kernel = self.module, self.p, self.kernel
        lowest = module.real(LOWEST)
        hidden = key >= p["keys"]
        if kernel.causal:
            hidden = module.op(166, module.boolean, hidden, query < key)
        if kernel.mask:
            query = query.minimum(p["queries"] - 1)
            line = p["mask_at"] + self.batch * p["mask_batch"] + self.head * p["mask_head"] + query * p["mask_query"]
            at = line + key.minimum(p["keys"] - 1) * p["mask_key"]
            if kernel.mask == "bool":
                byte = module.op(194, module.u32, module.read(self.buffers["mask"], at >> 2), (at & 3) << 3) & 0xFF
                hidden = module.op(166, module.boolean, hidden, byte.equals(0))
            else:
                added = module.times(load_float(module, self.buffers["mask"], kernel.mask, at), module.real(LOG2_E))
                score = module.extended(40, module.f32, module.add(score, added), lowest)
        return module.select(hidden, lowest, score)

    def _put_factor(self, row: Value, factor: Value) -> None:
        """A matrix whose rows are the rows' factors, a part by each lane."""
        module, places = self.module, self.places
        word = module.bitcast(module.u32, factor)
        four = module.op(80, self.quad, word, word, word, word)
        place = self.own + places.factors + row * places.factor_row
        units = self.shape.n // 4
        for unit in range(0, units, self.row_lanes):
            module.shared_write(self.memory, place + self.part + unit, four)

    def _factors(self) -> list[Value]:
        first, row = self.own + self.places.factors, self.places.factor_row
        return [
            self.module.load_matrix(self.c_type, self.memory, first + line * row, ROW_MAJOR, row)
            for line in range(0, self.lines, self.shape.m)
        ]

    def _values(self) -> None:
        module, kernel, shape, places = self.module, self.kernel, self.shape, self.places
        factors = self._factors()
        weights = [
            [
                module.load_matrix(
                    self.a_type,
                    self.memory,
                    self.own + line * places.weight_row + key // EIGHT,
                    ROW_MAJOR,
                    places.weight_row,
                )
                for key in range(0, kernel.keys, shape.k)
            ]
            for line in range(0, self.lines, shape.m)
        ]
        for number in range(kernel.dimension // shape.n):
            sums = [
                module.times(module.get(outputs[number]), factor)
                for outputs, factor in zip(self.outputs, factors, strict=True)
            ]
            for step in range(kernel.keys // shape.k):
                at = module.constant(places.values + step * shape.k * places.key_row + number * shape.n // EIGHT)
                values = module.load_matrix(self.b_type, self.memory, at, ROW_MAJOR, places.key_row)
                sums = [module.multiply_add(own[step], values, one) for own, one in zip(weights, sums, strict=True)]
            for outputs, one in zip(self.outputs, sums, strict=True):
                module.put(outputs[number], one)

    # --- results ------------------------------------------------------------------------------------------------------

    def _store(self) -> None:
        module, p, kernel, shape, places = self.module, self.p, self.kernel, self.shape, self.places
        zero, one = module.real(0.0), module.real(1.0)
        sums = []
        for row, variable in zip(self.own_rows, self.totals, strict=True):
            total = module.get(variable)
            some = module.less(zero, total)
            sums.append((some, module.select(some, total, one)))
            self._put_factor(row, module.select(some, module.op(136, module.f32, one, sums[-1][1]), zero))
        module.barrier(SCOPE_SUBGROUP)
        factors = self._factors()
        base = self._base("out") // EIGHT
        for d in range(0, kernel.dimension, kernel.keys):  # as many columns at a time as there is room for
            width = min(kernel.keys, kernel.dimension - d)
            for n in range(0, width, shape.n):
                for line, (outputs, factor) in enumerate(zip(self.outputs, factors, strict=True)):
                    output = module.times(module.get(outputs[(d + n) // shape.n]), factor)
                    at = self.own + line * shape.m * places.score_row + n // 4
                    module.store_matrix(output, self.memory, at, places.score_row)
            module.barrier(SCOPE_SUBGROUP)
            units = width // EIGHT
            for number in range(self.lines * units // shape.subgroup):
                index = self.lane + number * shape.subgroup
                row, unit = index // units, index % units
                query = self.first_query + row
                with module.when(query < p["queries"]):
                    at = self.own + row * places.score_row + unit * 2
                    halves = [module.shared_read(self.memory, at + half) for half in range(2)]
                    values = [
                        module.bitcast(module.f32, module.op(81, module.u32, half, lane))
                        for half in halves
                        for lane in range(4)
                    ]
                    pairs = [word_of_two(module, kernel.dtype, values[i], values[i + 1]) for i in range(0, EIGHT, 2)]
                    place = base + query * (p["out_place"] // EIGHT) + (unit + d // EIGHT)
                    module.write(self.buffers["out"], place, module.op(80, self.quad, *pairs))
            module.barrier(SCOPE_SUBGROUP)
        if not kernel.sums:
            return
        for row, top, (some, total) in zip(self.own_rows, self.tops, sums, strict=True):
            query = self.first_query + row
            with module.when(module.both(query < p["queries"], self.part.equals(0))):
                logarithm = module.extended(28, module.f32, total)
                natural = module.times(module.get(top), module.real(1 / LOG2_E))
                value = module.select(some, module.add(natural, logarithm), module.real(LOWEST))
                at = p["sums_at"] + (self.batch * p["heads"] + self.head) * p["queries"] + query
                module.write(self.buffers["sums"], at, module.bitcast(module.u32, value))


def _powers(count: int) -> list[int]:
    """1, 2, 4, … below `count`: the lanes to exchange with."""
    return [1 << bit for bit in range(count.bit_length() - 1)]
