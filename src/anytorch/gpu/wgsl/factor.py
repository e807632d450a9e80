"""Factorising and solving matrices, block by block: what a block's own columns take, and what the rest then takes from them.

A block is BLOCK columns wide. One workgroup factorises it (`Panel`, `Corner`); threads of many then solve with its triangle
(`Substitute`), each a column of its own, and subtract its product from what is left (`Update`), tile by tile, so that one
large matrix keeps a GPU busy too. A matrix is told by its first element and the steps from matrix to matrix, row to row and
column to column: transposing one costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anytorch.gpu.wgsl.types import HELPERS, head

BLOCK = 32
PANEL_THREADS = 256
HEADS = 16  # of the panel's threads, which look at the others' pivots
COLUMN_THREADS = 64  # of kernels with a thread per column


def steps(name: str) -> tuple[str, str, str]:
    return f"{name}_batch", f"{name}_row", f"{name}_column"


def _at(name: str, row: str, column: str) -> str:
    return f"{name}_start + ({row}) * p.{name}_row + ({column}) * p.{name}_column"


def _main(threads: int, items: str) -> str:
    """A workgroup per item; the items are counted by `number`."""
    return (
        f"@compute @workgroup_size({threads}) fn main(@builtin(workgroup_id) group: vec3<u32>,\n"
        "  @builtin(local_invocation_index) thread: u32) {\n"
        f"  let number = group.x + group.y * p.grid;\n  if (number >= {items}) {{ return; }}\n"
    )


@dataclass(frozen=True)
class Panel:
    """LU with partial pivoting of the columns first … first + width of each matrix; rows are swapped in these columns."""


def render_panel(_: Panel) -> str:
    """Bindings: the matrices, the pivots (counted from 1), infos (the first pivot that is zero, counted from 1)."""
    fields = ("batches", "rows", "first", "width", "pivots", "grid", *steps("a"), "o_a")
    share = PANEL_THREADS // HEADS
    return (
        head(fields, {}, {"a": "f32", "pivots": "i32", "infos": "i32"})
        + f"var<workgroup> most: array<f32, {PANEL_THREADS}>;\nvar<workgroup> most_at: array<u32, {PANEL_THREADS}>;\n"
        + _main(PANEL_THREADS, "p.batches")
        + f"""  let a_start = p.o_a + number * p.a_batch; let end = p.first + p.width;
  for (var c = p.first; c < end; c++) {{
    var value = -1.0; var row = c;
    for (var r = c + thread; r < p.rows; r += {PANEL_THREADS}u) {{
      let size = abs(a[{_at("a", "r", "c")}]);
      if (size > value) {{ value = size; row = r; }}
    }}
    most[thread] = value; most_at[thread] = row;
    workgroupBarrier();
    if (thread < {HEADS}u) {{
      let mine = thread * {share}u;
      for (var i = mine + 1u; i < mine + {share}u; i++) {{
        if (most[i] > most[mine] || (most[i] == most[mine] && most_at[i] < most_at[mine])) {{
          most[mine] = most[i]; most_at[mine] = most_at[i];
        }}
      }}
    }}
    workgroupBarrier();
    value = most[0]; row = most_at[0];
    for (var i = {share}u; i < {PANEL_THREADS}u; i += {share}u) {{
      if (most[i] > value || (most[i] == value && most_at[i] < row)) {{ value = most[i]; row = most_at[i]; }}
    }}
    if (row != c) {{
      for (var j = p.first + thread; j < end; j += {PANEL_THREADS}u) {{
        let one = {_at("a", "c", "j")}; let other = {_at("a", "row", "j")};
        let held = a[one]; a[one] = a[other]; a[other] = held;
      }}
    }}
    if (thread == 0u) {{ pivots[number * p.pivots + c] = i32(row) + 1; }}
    storageBarrier();
    let pivot = a[{_at("a", "c", "c")}];
    if (pivot == 0.0) {{
      if (thread == 0u && infos[number] == 0) {{ infos[number] = i32(c) + 1; }}
    }} else {{
      for (var r = c + 1u + thread; r < p.rows; r += {PANEL_THREADS}u) {{
        let at = {_at("a", "r", "c")}; let factor = a[at] / pivot;
        a[at] = factor;
        for (var j = c + 1u; j < end; j++) {{ a[{_at("a", "r", "j")}] -= factor * a[{_at("a", "c", "j")}]; }}
      }}
    }}
    storageBarrier(); workgroupBarrier();
  }}
}}
"""
    )


@dataclass(frozen=True)
class Swap:
    """Rows swapped as pivots first … first + count say, in all columns but `width` from `first` on; a thread per column."""

    reverse: bool = False  # the last swap first, which undoes them


def render_swap(kernel: Swap) -> str:
    """Bindings: the pivots, the matrices. `count` pivots are taken, of `pivots` per matrix (0: all share theirs)."""
    order = "p.count - 1u - i" if kernel.reverse else "i"
    fields = (
        "batches",
        "columns",
        "first",
        "count",
        "width",
        "pivots",
        "groups",
        "grid",
        *steps("a"),
        "o_pivots",
        "o_a",
    )
    return (
        head(fields, {"pivots": "i32"}, {"a": "f32"})
        + _main(COLUMN_THREADS, "p.batches * p.groups")
        + f"""  let batch = number / p.groups; let given = number % p.groups * {COLUMN_THREADS}u + thread;
  if (given >= p.columns - p.width) {{ return; }}
  let column = select(given, given + p.width, given >= p.first);
  let a_start = p.o_a + batch * p.a_batch;
  for (var i = 0u; i < p.count; i++) {{
    let row = p.first + {order}; let other = u32(pivots[p.o_pivots + batch * p.pivots + row] - 1);
    if (other == row) {{ continue; }}
    let one = {_at("a", "row", "column")}; let two = {_at("a", "other", "column")};
    let held = a[one]; a[one] = a[two]; a[two] = held;
  }}
}}
"""
    )


@dataclass(frozen=True)
class Corner:
    """Cholesky of the block on the diagonal from `first` on: its lower triangle, read and written."""


def render_corner(_: Corner) -> str:
    """Bindings: the matrices, infos (the first minor that is not positive, counted from 1)."""
    fields = ("batches", "first", "width", "grid", *steps("a"), "o_a")
    threads = 64
    return (
        head(fields, {}, {"a": "f32", "infos": "i32"})
        + HELPERS["is_nan"]
        + f"var<workgroup> tile: array<f32, {BLOCK * BLOCK}>;\n"
        + _main(threads, "p.batches")
        + f"""  let a_start = p.o_a + number * p.a_batch; let cells = p.width * p.width;
  for (var i = thread; i < cells; i += {threads}u) {{
    tile[i] = a[{_at("a", "p.first + i / p.width", "p.first + i % p.width")}];
  }}
  workgroupBarrier();
  for (var c = 0u; c < p.width; c++) {{
    let pivot = tile[c * p.width + c]; let root = sqrt(pivot);
    if (thread == 0u && (is_nan(pivot) || !(pivot > 0.0)) && infos[number] == 0) {{ infos[number] = i32(p.first + c) + 1; }}
    workgroupBarrier();
    for (var r = c + thread; r < p.width; r += {threads}u) {{ tile[r * p.width + c] /= root; }}
    workgroupBarrier();
    for (var i = thread; i < cells; i += {threads}u) {{
      let r = i / p.width; let j = i % p.width;
      if (j > c && r >= j) {{ tile[i] -= tile[r * p.width + c] * tile[j * p.width + c]; }}
    }}
    workgroupBarrier();
  }}
  for (var i = thread; i < cells; i += {threads}u) {{
    if (i / p.width >= i % p.width) {{ a[{_at("a", "p.first + i / p.width", "p.first + i % p.width")}] = tile[i]; }}
  }}
}}
"""
    )


@dataclass(frozen=True)
class Substitute:
    """x, as many rows as a has, solved with a triangle a of one block; a thread per column of x."""

    upper: bool
    unit: bool  # the diagonal is taken for ones
    shared: bool  # x and a lie in one buffer


def _bound(shared: bool, written: str, read: str) -> tuple[dict[str, str], dict[str, str], Sequence[str], str]:
    """Buffers read and written, the fields of their places, and what the read operand's buffer is called."""
    if shared:
        return {}, {written: "f32"}, (f"o_{written}",), written
    return {read: "f32"}, {written: "f32"}, (f"o_{read}", f"o_{written}"), read


def render_substitute(kernel: Substitute) -> str:
    """Bindings: a unless it is shared, x. `to_a` leads from the place of the buffer that holds a to its first element."""
    read, written, places, a = _bound(kernel.shared, "x", "a")
    numbers = ("batches", "columns", "width", "groups", "grid", "to_a", *steps("a"), *steps("x"))
    order = "p.width - 1u - step" if kernel.upper else "step"
    known = "var j = row + 1u; j < p.width; j++" if kernel.upper else "var j = 0u; j < row; j++"
    divided = "" if kernel.unit else f" / tile[row * {BLOCK}u + row]"
    return (
        head((*numbers, *places), read, written)
        + f"var<workgroup> tile: array<f32, {BLOCK * BLOCK}>;\n"
        + _main(COLUMN_THREADS, "p.batches * p.groups")
        + f"""  let batch = number / p.groups; let column = number % p.groups * {COLUMN_THREADS}u + thread;
  let a_start = p.o_{a} + p.to_a + batch * p.a_batch; let x_start = p.o_x + batch * p.x_batch;
  for (var i = thread; i < p.width * p.width; i += {COLUMN_THREADS}u) {{
    let r = i / p.width; let c = i % p.width;
    tile[r * {BLOCK}u + c] = {a}[{_at("a", "r", "c")}];
  }}
  workgroupBarrier();
  if (column >= p.columns) {{ return; }}
  var found: array<f32, {BLOCK}>;
  for (var step = 0u; step < p.width; step++) {{
    let row = {order}; let at = {_at("x", "row", "column")};
    var value = x[at];
    for ({known}) {{ value -= tile[row * {BLOCK}u + j] * found[j]; }}
    value = value{divided};
    found[row] = value; x[at] = value;
  }}
}}
"""
    )


@dataclass(frozen=True)
class Update:
    """c -= a b, in tiles of BLOCK by BLOCK. b lies in c's buffer, so does a if it is `shared`; it has `width` columns."""

    shared: bool
    lower: bool  # c is square, and only its lower triangle is changed


def render_update(kernel: Update) -> str:
    """Bindings: a unless it is shared, c. `to_a` and `to_b` lead from the places of the buffers to the first elements."""
    read, written, places, a = _bound(kernel.shared, "c_buffer", "a")
    sizes = ("batches", "rows", "columns", "width", "tiles", "across", "grid", "to_a", "to_b")
    skipped = "  if (row0 + 31u < column0) { return; }\n" if kernel.lower else ""
    changed = " && row >= column" if kernel.lower else ""
    return (
        head((*sizes, *steps("a"), *steps("b"), *steps("c"), *places), read, written)
        + f"var<workgroup> left: array<f32, {BLOCK * BLOCK}>;\nvar<workgroup> right: array<f32, {BLOCK * BLOCK}>;\n"
        + _main(256, "p.batches * p.tiles")
        + f"""  let batch = number / p.tiles; let tile = number % p.tiles;
  let row0 = tile / p.across * {BLOCK}u; let column0 = tile % p.across * {BLOCK}u;
{skipped}  let a_start = p.o_{a} + p.to_a + batch * p.a_batch;
  let b_start = p.o_c_buffer + p.to_b + batch * p.b_batch; let c_start = p.o_c_buffer + batch * p.c_batch;
  for (var i = thread; i < {BLOCK * BLOCK}u; i += 256u) {{
    let r = i / {BLOCK}u; let c = i % {BLOCK}u;
    var one = 0.0; var other = 0.0;
    if (c < p.width && row0 + r < p.rows) {{ one = {a}[{_at("a", "row0 + r", "c")}]; }}
    if (r < p.width && column0 + c < p.columns) {{ other = c_buffer[{_at("b", "r", "column0 + c")}]; }}
    left[i] = one; right[i] = other;
  }}
  workgroupBarrier();
  let r = thread / 16u; let c = thread % 16u;
  var sums = array<f32, 4>();
  for (var k = 0u; k < p.width; k++) {{
    let l0 = left[r * {BLOCK}u + k]; let l1 = left[(r + 16u) * {BLOCK}u + k];
    let r0 = right[k * {BLOCK}u + c]; let r1 = right[k * {BLOCK}u + c + 16u];
    sums[0] += l0 * r0; sums[1] += l0 * r1; sums[2] += l1 * r0; sums[3] += l1 * r1;
  }}
  for (var i = 0u; i < 4u; i++) {{
    let row = row0 + r + (i >> 1u) * 16u; let column = column0 + c + (i & 1u) * 16u;
    if (row < p.rows && column < p.columns{changed}) {{ c_buffer[{_at("c", "row", "column")}] -= sums[i]; }}
  }}
}}
"""
    )
