"""Matrix products: one loop nest in five forms, over whatever the problem says its operands are.

A *problem* is text: functions that load an element of A(batch, m, k) and B(batch, k, n) and store one of C. Plain matrices
read by strides; a convolution computes indices on load, so the same loops serve both and no im2col buffer exists.

A *schedule* is how it is computed:

    tiled     workgroup memory, a register tile per thread; for GPUs
    direct    no workgroup memory and no barrier, a register tile per thread; for CPU adapters, integers, depthwise
    rows      few rows of A, B contiguous along k: lanes walk along k and reduce at the end (decoding with a linear layer)
    columns   few rows of A, B contiguous along n: threads walk down k, parts of k are added at the end

Accumulators are named variables written out by the generator. As arrays indexed in a loop they are spilled to memory by the
compilers we met: 2.2 instead of 26.8 TFLOP/s on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass

from anytorch.gpu.wgsl.types import KINDS, element, head, load, load_four, stored, stored_four

COMPONENTS = "xyzw"
GROUPED_ROWS = 8  # tiles of this many rows are walked together, so that what they share of B is still in the cache

# Parameters of every schedule. `chunk` is the part of k one group does, `row` the groups per row of the launch grid.
SCHEDULE_PARAMETERS = ("m", "n", "k", "chunk", "splits", "tiles_m", "tiles_n", "row", "batches")


@dataclass(frozen=True)
class Schedule:
    form: str  # "tiled", "direct", "rows", "columns"
    bm: int = 0  # the tile of a workgroup
    bn: int = 0
    bk: int = 0
    tm: int = 4  # the tile of a thread, multiples of 4 in tiled
    tn: int = 4
    unroll: int = 4  # steps of k written out per turn of the inner loop
    double: bool = False  # two tiles in workgroup memory, so one barrier per step
    half: bool = False  # tiles in workgroup memory are f16

    @property
    def threads(self) -> int:
        if self.form == "tiled":
            return (self.bm // self.tm) * (self.bn // self.tn)
        return 64 if self.form == "direct" else 256

    @property
    def tile_m(self) -> int:
        return self.bm if self.form == "tiled" else self.tm

    @property
    def tile_n(self) -> int:
        """Columns of C per workgroup."""
        if self.form == "direct":
            return self.tn * self.threads
        return self.bn

    @property
    def shared_bytes(self) -> int:
        if self.form == "tiled":
            stages = 2 if self.double else 1
            return stages * self.bk * (self.bm + 4 + self.bn + 4) * (2 if self.half else 4)
        if self.form == "rows":
            return 4 * 256 * self.tm
        return 16 * 256 if self.form == "columns" else 0


@dataclass(frozen=True)
class Problem:
    """What is multiplied. `functions` defines load_a, load_b, store (and load_a4, load_b4 where vectors are promised)."""

    bindings: tuple[str, ...]  # WGSL element types; the last is written
    parameters: tuple[str, ...]  # the schedule's own among them; the places of the bindings come before
    functions: str
    dtypes: tuple[str, ...]
    accumulate: str = "f32"
    a_along: str = "k"  # which index of A is contiguous: "k" or "m"
    b_along: str = "n"
    a_vector: bool = False  # load_a4(batch, m, k) gives four elements along a_along
    b_vector: bool = False
    numbers: tuple[str, ...] = ()  # parameters before the places
    # tiled only: `start_b(batch, n)` is called once, `begin_b(k0)` before each tile, for the one column whose elements of B
    # this thread loads; and `start_c(batch, n)` gives what store4_at(batch, m, n, at, value) is told of a column.
    column_b: bool = False
    column_c: bool = False


def render(problem: Problem, schedule: Schedule) -> str:
    names = ("a", "b", "d", "c") if len(problem.bindings) == 4 else ("a", "b", "c")
    read = dict(zip(names[:-1], problem.bindings[:-1], strict=True))
    fields = (*problem.numbers, *[f"{name}_at" for name in names], *problem.parameters)
    dtypes = (*problem.dtypes, *(("float16",) if schedule.half else ()))
    body = {"tiled": _tiled, "direct": _direct, "rows": _rows, "columns": _columns}[schedule.form]
    return head(fields, read, {"c": problem.bindings[-1]}, dtypes) + problem.functions + body(problem, schedule)


def _main(threads: int) -> str:
    return (
        f"@compute @workgroup_size({threads}) fn main(@builtin(workgroup_id) group: vec3<u32>, "
        "@builtin(local_invocation_index) t: u32) {\n"
        "  let linear = group.x + group.y * p.row;\n"
        "  let tiles = p.tiles_m * p.tiles_n;\n"
        "  let batch_part = linear / tiles;\n"
        "  let batch = batch_part / p.splits;\n"
        "  let part = batch_part % p.splits;\n"
        "  let first = part * p.chunk;\n  let end = min(first + p.chunk, p.k);\n"
    )


# --- tiled ---------------------------------------------------------------------------------------------------------


def _tiled(problem: Problem, s: Schedule) -> str:
    element = "f16" if s.half else "f32"
    stages = 2 if s.double else 1
    # One vec4 of padding per step of k keeps the transposing stores off each other's banks.
    width_a, width_b = s.bm // 4 + 1, s.bn // 4 + 1
    columns, rows = s.bn // s.tn, s.bm // s.tm
    lines = [
        f"var<workgroup> tile_a: array<vec4<{element}>, {stages * s.bk * width_a}>;\n",
        f"var<workgroup> tile_b: array<vec4<{element}>, {stages * s.bk * width_b}>;\n",
        _main(s.threads),
        "  if (batch_part >= p.batches) { return; }\n",
        # Which tile this group computes, in bands of rows.
        f"  let within = linear % tiles;\n  let band = within / ({GROUPED_ROWS}u * p.tiles_n);\n"
        f"  let band_rows = min(p.tiles_m - band * {GROUPED_ROWS}u, {GROUPED_ROWS}u);\n"
        f"  let in_band = within % ({GROUPED_ROWS}u * p.tiles_n);\n"
        f"  let tile_m = band * {GROUPED_ROWS}u + in_band % band_rows;\n  let tile_n = in_band / band_rows;\n",
        f"  let m0 = tile_m * {s.bm}u;\n  let n0 = tile_n * {s.bn}u;\n",
    ]
    if columns % 8 == 0 and rows % 4 == 0:
        # 32 neighbouring threads form 4 x 8, which needs the fewest distinct reads of workgroup memory.
        across = columns // 8
        lines.append(
            f"  let warp = t / 32u;\n  let tx = (warp % {across}u) * 8u + t % 8u;\n"
            f"  let ty = (warp / {across}u) * 4u + (t % 32u) / 8u;\n"
        )
    else:
        lines.append(f"  let tx = t % {columns}u;\n  let ty = t / {columns}u;\n")
    lines += [f"  var c{r}_{h} = vec4<f32>();\n" for r in range(s.tm) for h in range(s.tn // 4)]
    declare_a, fetch_a, put_a = _fetch("a", "m", s.bm, width_a, problem.a_along, problem.a_vector, s, element)
    declare_b, fetch_b, put_b = _fetch("b", "n", s.bn, width_b, problem.b_along, problem.b_vector, s, element)
    lines += [declare_a, declare_b, "  var k0 = first;\n  var base_a = 0u;\n  var base_b = 0u;\n"]
    if problem.column_b:
        step = 4 if problem.b_vector else 1
        lines.append(f"  start_b(batch, n0 + (t % {s.bn // step}u) * {step}u);\n")
        fetch_b = "  begin_b(k0);\n" + fetch_b
    lines += [fetch_a, fetch_b, put_a, put_b, "  workgroupBarrier();\n"]
    lines += ["  loop {\n", "  let next = k0 + " + f"{s.bk}u;\n", "  let more = next < end;\n"]
    lines += ["  k0 = next;\n  if (more) {\n", fetch_a, fetch_b, "  }\n"]
    lines.append(_multiply(s, width_a, width_b))
    if s.double:
        lines.append(f"  base_a = {s.bk * width_a}u - base_a;\n  base_b = {s.bk * width_b}u - base_b;\n")
        lines += ["  if (more) {\n", put_a, put_b, "  }\n  workgroupBarrier();\n"]
    else:
        lines += ["  workgroupBarrier();\n  if (more) {\n", put_a, put_b, "  }\n  workgroupBarrier();\n"]
    lines.append("  if (!more) { break; }\n  }\n")
    quads = [f"n0 + {h * (s.bn // (s.tn // 4))}u + tx * 4u" for h in range(s.tn // 4)]
    if problem.column_c:
        lines += [f"  let n_{h} = {quad};\n  let at_{h} = start_c(batch, n_{h});\n" for h, quad in enumerate(quads)]
    for r in range(s.tm):
        row = f"m0 + {(r // 4) * (s.bm // (s.tm // 4))}u + ty * 4u + {r % 4}u"
        lines.append(f"  {{ let m = {row};\n  if (m < p.m) {{\n")
        for h, quad in enumerate(quads):
            store = f"store4_at(batch, m, n_{h}, at_{h}, c{r}_{h})"
            lines.append(f"    {store if problem.column_c else f'store4(batch, part, m, {quad}, c{r}_{h})'};\n")
        lines.append("  } }\n")
    return "".join(lines) + "}\n"


def _fetch(
    name: str, index: str, extent: int, width: int, along: str, vector: bool, s: Schedule, element: str
) -> tuple[str, str, str]:
    """Text that declares registers, fills them from memory for the tile at k0, and puts them into workgroup memory."""
    step = 4 if vector else 1
    total = extent * s.bk // step
    count = max(1, -(-total // s.threads))
    ragged = total % s.threads != 0
    declare, fetch, put = [], [], []
    kind = "vec4<f32>" if vector else "f32"
    for i in range(count):
        declare.append(f"  var r{name}{i} = {kind}();\n")
        at = f"(t + {i * s.threads}u)"
        if along == "k":
            line, k = f"{at} / {s.bk // step}u", f"({at} % {s.bk // step}u) * {step}u"
        else:
            k, line = f"{at} / {extent // step}u", f"({at} % {extent // step}u) * {step}u"
        guard = f"{at} < {total}u" if ragged else "true"
        call = f"load_{name}4" if vector else f"load_{name}"
        arguments = "batch, x, k" if name == "a" else "batch, k, x"
        fetch.append(
            f"  {{ let x = {index}0 + {line}; let k = k0 + {k}; r{name}{i} = {kind}();\n"
            f"  if ({guard} && x < p.{index} && k < end) {{ r{name}{i} = {call}({arguments}); }} }}\n"
        )
        store = [f"  {{ let x = {line}; let k = {k};\n"]
        if vector and along != "k":
            store.append(f"  tile_{name}[base_{name} + k * {width}u + x / 4u] = vec4<{element}>(r{name}{i});\n")
        else:
            for j in range(step):
                value = f"r{name}{i}.{COMPONENTS[j]}" if vector else f"r{name}{i}"
                store.append(
                    f"  tile_{name}[base_{name} + (k + {j}u) * {width}u + x / 4u][x % 4u] = {element}({value});\n"
                )
        body = "".join(store) + "  }\n"
        put.append(f"  if ({guard}) {body}" if ragged else body)
    return "".join(declare), "".join(fetch), "".join(put)


def _multiply(s: Schedule, width_a: int, width_b: int) -> str:
    unroll = min(s.unroll, s.bk)
    lines = [f"  for (var step = 0u; step < {s.bk}u; step += {unroll}u) {{\n"]
    for u in range(unroll):
        lines.append("  {\n")
        for g in range(s.tm // 4):
            at = f"base_a + (step + {u}u) * {width_a}u + {g * (s.bm // s.tm)}u + ty"
            lines.append(f"  let a{g} = vec4<f32>(tile_a[{at}]);\n")
        for h in range(s.tn // 4):
            at = f"base_b + (step + {u}u) * {width_b}u + {h * (s.bn // s.tn)}u + tx"
            lines.append(f"  let b{h} = vec4<f32>(tile_b[{at}]);\n")
        for r in range(s.tm):
            for h in range(s.tn // 4):
                lines.append(f"  c{r}_{h} = fma(vec4<f32>(a{r // 4}.{COMPONENTS[r % 4]}), b{h}, c{r}_{h});\n")
        lines.append("  }\n")
    return "".join(lines) + "  }\n"


# --- direct --------------------------------------------------------------------------------------------------------


def _direct(problem: Problem, s: Schedule) -> str:
    kind = problem.accumulate
    quads = s.tn // 4
    lines = [
        _main(s.threads),
        "  if (batch_part >= p.batches) { return; }\n  let within = linear % tiles;\n",
        f"  let m0 = (within % p.tiles_m) * {s.tm}u;\n",
        f"  let n0 = ((within / p.tiles_m) * {s.threads}u + t) * {s.tn}u;\n  if (n0 >= p.n) {{ return; }}\n",
    ]
    # Rows and columns beyond the edge repeat the last one: no check inside the loop, and they are not stored.
    lines += [f"  let m_{r} = min(m0 + {r}u, p.m - 1u);\n" for r in range(s.tm)]
    whole = problem.b_vector and problem.b_along == "n"
    lines += [f"  let n_{j} = min(n0 + {j}u, p.n - {4 if whole else 1}u);\n" for j in range(s.tn)]
    lines += [f"  var c{r}_{h} = vec4<{kind}>();\n" for r in range(s.tm) for h in range(quads)]
    lines.append("  var k = first;\n")
    along_k = (problem.a_vector and problem.a_along == "k") or (problem.b_vector and problem.b_along == "k")
    if along_k:  # then k is a multiple of 4
        lines.append(f"  for (; k < end; k += 4u) {{\n{_direct_steps(problem, s, 4)}  }}\n")
    else:
        lines.append(f"  for (; k < end; k++) {{\n{_direct_steps(problem, s, 1)}  }}\n")
    for r in range(s.tm):
        lines.append(f"  if (m0 + {r}u < p.m) {{\n")
        lines += [f"    store4(batch, part, m0 + {r}u, n0 + {4 * h}u, c{r}_{h});\n" for h in range(quads)]
        lines.append("  }\n")
    return "".join(lines) + "}\n"


def _direct_steps(problem: Problem, s: Schedule, steps: int) -> str:
    kind = problem.accumulate
    lines = []
    for r in range(s.tm):
        if problem.a_vector and problem.a_along == "k":
            lines.append(f"    let a{r} = load_a4(batch, m_{r}, k);\n")
        else:
            lines += [f"    let a{r}_{u} = load_a(batch, m_{r}, k + {u}u);\n" for u in range(steps)]
    if problem.b_vector and problem.b_along == "k":
        lines += [f"    let b_{j} = load_b4(batch, k, n_{j});\n" for j in range(s.tn)]
    for u in range(steps):
        for h in range(s.tn // 4):
            if problem.b_vector and problem.b_along == "n":
                lines.append(f"    let b{u}_{h} = load_b4(batch, k + {u}u, n_{4 * h});\n")
            elif problem.b_vector:
                values = ", ".join(f"b_{4 * h + j}.{COMPONENTS[u]}" for j in range(4))
                lines.append(f"    let b{u}_{h} = vec4<{kind}>({values});\n")
            else:
                values = ", ".join(f"load_b(batch, k + {u}u, n_{4 * h + j})" for j in range(4))
                lines.append(f"    let b{u}_{h} = vec4<{kind}>({values});\n")
        for r in range(s.tm):
            value = f"a{r}.{COMPONENTS[u]}" if problem.a_vector and problem.a_along == "k" else f"a{r}_{u}"
            for h in range(s.tn // 4):
                lines.append(f"    c{r}_{h} += vec4<{kind}>({value}) * b{u}_{h};\n")
    return "".join(lines)


# --- few rows ------------------------------------------------------------------------------------------------------


def _rows(problem: Problem, s: Schedule) -> str:
    """`bn` columns of C per workgroup, each by 256 / bn lanes that walk along k. tm is the number of rows, exactly."""
    lanes = 256 // s.bn
    step = 4 if problem.b_vector else 1
    lines = [
        f"var<workgroup> parts: array<f32, {256 * s.tm}>;\n",
        _main(256),
        "  let within = linear % tiles;\n",
        f"  let n = within * {s.bn}u + t / {lanes}u;\n  let lane = t % {lanes}u;\n",
    ]
    lines += [f"  var c{r} = 0.0;\n" for r in range(s.tm)]
    lines.append(
        f"  if (n < p.n && batch_part < p.batches) {{\n"
        f"  for (var k = first + lane * {step}u; k < end; k += {lanes * step}u) {{\n"
    )
    if problem.b_vector:
        lines.append("    let b0 = load_b4(batch, k, n);\n")
        for r in range(s.tm):
            if problem.a_vector and problem.a_along == "k":
                lines.append(f"    c{r} += dot(load_a4(batch, {r}u, k), b0);\n")
            else:
                values = ", ".join(f"load_a(batch, {r}u, k + {u}u)" for u in range(4))
                lines.append(f"    c{r} += dot(vec4<f32>({values}), b0);\n")
    else:
        lines.append("    let b0 = load_b(batch, k, n);\n")
        lines += [f"    c{r} += load_a(batch, {r}u, k) * b0;\n" for r in range(s.tm)]
    lines.append("  } }\n")
    lines += [f"  parts[{r * 256}u + t] = c{r};\n" for r in range(s.tm)]
    half = lanes // 2
    while half:
        lines.append(f"  workgroupBarrier();\n  if (lane < {half}u) {{\n")
        lines += [f"    parts[{r * 256}u + t] += parts[{r * 256 + half}u + t];\n" for r in range(s.tm)]
        lines.append("  }\n")
        half //= 2
    lines.append("  if (lane == 0u && n < p.n && batch_part < p.batches) {\n")
    lines += [f"    store(batch, part, {r}u, n, parts[{r * 256}u + t]);\n" for r in range(s.tm)]
    return "".join(lines) + "  }\n}\n"


def _columns(problem: Problem, s: Schedule) -> str:
    """`bn` columns of C per workgroup, four to a thread, by 1024 / bn threads down k. tm is the number of rows, exactly."""
    across = s.bn // 4
    down = 256 // across
    lines = [
        "var<workgroup> parts: array<vec4<f32>, 256>;\n",
        _main(256),
        "  let within = linear % tiles;\n",
        f"  let n = within * {s.bn}u + (t % {across}u) * 4u;\n  let line = t / {across}u;\n",
    ]
    lines += [f"  var c{r} = vec4<f32>();\n" for r in range(s.tm)]
    lines.append(
        f"  if (n < p.n && batch_part < p.batches) {{\n  for (var k = first + line; k < end; k += {down}u) {{\n"
    )
    if problem.b_vector:
        lines.append("    let b0 = load_b4(batch, k, n);\n")
    else:
        values = ", ".join(f"load_b(batch, k, min(n + {j}u, p.n - 1u))" for j in range(4))
        lines.append(f"    let b0 = vec4<f32>({values});\n")
    lines += [f"    c{r} = fma(vec4<f32>(load_a(batch, {r}u, k)), b0, c{r});\n" for r in range(s.tm)]
    lines.append("  } }\n")
    for r in range(s.tm):
        lines.append(f"  parts[t] = c{r};\n")
        half = down // 2
        while half:
            lines.append(
                f"  workgroupBarrier();\n  if (line < {half}u) {{ parts[t] += parts[t + {half * across}u]; }}\n"
            )
            half //= 2
        lines.append(
            f"  if (line == 0u && n < p.n && batch_part < p.batches) {{ store4(batch, part, {r}u, n, parts[t]); }}\n"
        )
        lines.append("  workgroupBarrier();\n")
    return "".join(lines) + "}\n"


# --- plain matrices ------------------------------------------------------------------------------------------------

MATRIX_PARAMETERS = (
    *SCHEDULE_PARAMETERS,
    *[f"{name}_{part}" for name in "abdc" for part in ("batch", "row", "col")],
)


@dataclass(frozen=True)
class Matrices:
    """Strided matrices. `d` is added to the product: alpha * A B + beta * D. `c_vector`: C is written in whole vec4s."""

    a: str  # dtypes
    b: str
    c: str
    d: str = ""
    a_along: str = "k"
    b_along: str = "n"
    a_vector: bool = False
    b_vector: bool = False
    c_vector: bool = False
    activation: str = ""
    split: bool = False  # C is f32 and holds the parts one after another


def matrices(spec: Matrices) -> Problem:
    kind = KINDS[spec.a].compute
    functions = [
        _matrix_load("a", spec.a, spec.a_vector, "batch: u32, m: u32, k: u32", "m * p.a_row + k * p.a_col"),
        _matrix_load("b", spec.b, spec.b_vector, "batch: u32, k: u32, n: u32", "k * p.b_row + n * p.b_col"),
        _store(spec, kind),
    ]
    bindings = (element(spec.a, spec.a_vector), element(spec.b, spec.b_vector), element(spec.c, spec.c_vector))
    return Problem(
        (*bindings[:2], KINDS[spec.d].storage, bindings[2]) if spec.d else bindings,
        MATRIX_PARAMETERS,
        "".join(functions),
        tuple(name for name in (spec.a, spec.b, spec.d, spec.c) if name),
        kind,
        spec.a_along,
        spec.b_along,
        spec.a_vector,
        spec.b_vector,
        ("alpha: f32", "beta: f32"),
    )


def load_functions(binding: str, name: str, vector: bool, arguments: str, at: str) -> str:
    """load_a or load_b, which give the element `at`; and load_a4 or load_b4, where elements are read in fours."""
    kind = KINDS[name].compute
    head = f"fn load_{binding}({arguments}) -> {kind} {{ let i = {at}; return "
    if not vector:
        return f"{head}{load(name, binding, 'i')}; }}\n"
    four = load_four(name, binding, "i")
    return f"fn load_{binding}4({arguments}) -> vec4<{kind}> {{ let i = {at}; return {four}; }}\n{head}{four}[i % 4u]; }}\n"


def _matrix_load(binding: str, name: str, vector: bool, arguments: str, index: str) -> str:
    return load_functions(binding, name, vector, arguments, f"p.{binding}_at + batch * p.{binding}_batch + {index}")


ACTIVATIONS = {
    "": "{0}",
    "relu": "max({0}, vec4<f32>(0.0))",
    "gelu": "0.5 * {0} * (1.0 + tanh(clamp(0.7978845608028654 * ({0} + 0.044715 * {0} * {0} * {0}), "
    "vec4<f32>(-15.0), vec4<f32>(15.0))))",
}


def _store(spec: Matrices, kind: str) -> str:
    at = "p.c_at + (batch * p.splits + part) * p.c_batch + m * p.c_row + n * p.c_col"
    lines = []
    if spec.split:
        finished = "value"
    else:
        finished = "finish(batch, m, n, value)"
        scaled = "value * p.alpha" if kind == "f32" else "value"
        if spec.d:
            read = ", ".join(
                load(spec.d, "d", f"(p.d_at + batch * p.d_batch + m * p.d_row + min(n + {j}u, p.n - 1u) * p.d_col)")
                for j in range(4)
            )
            scaled = f"{scaled} + p.beta * vec4<f32>({read})"
        body = ACTIVATIONS[spec.activation].replace("{0}", "x")
        lines.append(
            f"fn finish(batch: u32, m: u32, n: u32, value: vec4<{kind}>) -> vec4<{kind}> "
            f"{{ let x = {scaled}; return {body}; }}\n"
        )
    if spec.c_vector:
        write = f"c[({at}) / 4u] = {stored_four(spec.c, 'v')};"
        lines.append(
            f"fn store4(batch: u32, part: u32, m: u32, n: u32, value: vec4<{kind}>) "
            f"{{ if (n < p.n) {{ let v = {finished}; {write} }} }}\n"
        )
        return "".join(lines)
    scalar = " ".join(
        f"if (n + {j}u < p.n) {{ c[at + {j}u * p.c_col] = {stored(spec.c, f'v.{COMPONENTS[j]}')}; }}" for j in range(4)
    )
    lines.append(
        f"fn store4(batch: u32, part: u32, m: u32, n: u32, value: vec4<{kind}>) {{ "
        f"if (n >= p.n) {{ return; }} let at = {at}; let v = {finished}; {scalar} }}\n"
        f"fn store(batch: u32, part: u32, m: u32, n: u32, one: {kind}) {{ let value = vec4<{kind}>(one); "
        f"let at = {at}; let v = {finished}; c[at] = {stored(spec.c, 'v.x')}; }}\n"
    )
    return "".join(lines)
