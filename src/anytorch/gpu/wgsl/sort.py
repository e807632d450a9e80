"""Sorting rows, finding things in sorted ones, counting.

Every dtype becomes an unsigned key whose order is torch's: NaN above all, -0 equal to 0, inverted for descending. Pairs of
(key, position) are sorted, so that equal keys keep their order; values are fetched by position at the end.

Blocks are sorted in workgroup memory by a bitonic network; sorted runs are then merged in passes: every element finds its
place by a binary search in the neighbouring run. Without the blocks (software adapters, where barriers are slow) the passes
start from runs of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from anytorch.gpu.wgsl.reduce import thread_main
from anytorch.gpu.wgsl.types import HELPERS, KINDS, head, load, stored

BLOCK = 1024
GROUP = 256
THREADS = 64


@dataclass(frozen=True)
class Keys:
    """Makes keys and positions of values; with `block`, sorts each block of BLOCK and keeps the first `keep` of it.

    `pairs`: the input is keys and positions already.
    """

    dtype: str
    descending: bool
    block: bool = False
    pairs: bool = False

    @property
    def wide(self) -> bool:
        return self.dtype == "int64"

    @property
    def writable(self) -> int:
        return 0b1100 if self.pairs else 0b110


def key_type(wide: bool) -> str:
    return "u64" if wide else "u32"


def _key_function(dtype: str, descending: bool) -> str:
    sign = "~" if descending else ""
    compute = KINDS[dtype].compute
    if compute == "i64":
        return f"fn key_of(x: i64) -> u64 {{ return {sign}(u64(x) ^ (u64(1) << 63u)); }}\n"
    if compute == "i32":
        return f"fn key_of(x: i32) -> u32 {{ return {sign}(bitcast<u32>(x) ^ 0x80000000u); }}\n"
    return (
        "fn ordered(x: f32) -> u32 {\n  let bits = bitcast<u32>(x);\n"
        "  if ((bits & 0x7fffffffu) > 0x7f800000u) { return 0xffffffffu; }\n"
        "  if ((bits & 0x7fffffffu) == 0u) { return 0x80000000u; }\n"
        "  return select(bits | 0x80000000u, ~bits, (bits >> 31u) == 1u);\n}\n"
        f"fn key_of(x: f32) -> u32 {{ return {sign}ordered(x); }}\n"
    )


def render_keys(kernel: Keys) -> str:
    key = key_type(kernel.wide)
    if kernel.pairs:
        source = {"keys_in": key, "at_in": "u32"}
        fetch = ("keys_in[i]", "at_in[i]")
    else:
        source = {"b0": kernel.dtype}
        fetch = (f"key_of({load(kernel.dtype, 'b0', '(p.offset + i)')})", "k")
    text = head(("rows", "length", "offset", "blocks", "keep"), source, {"keys": key, "at": "u32"}) + (
        "" if kernel.pairs else _key_function(kernel.dtype, kernel.descending)
    )
    if not kernel.block:
        return (
            text + thread_main(THREADS) + "  if (thread >= p.rows * p.length) { return; }\n"
            "  let i = thread; let k = thread % p.length;\n"
            f"  keys[i] = {fetch[0]}; at[i] = {fetch[1]};\n}}\n"
        )
    largest = "~u64(0)" if kernel.wide else "0xffffffffu"
    return (
        text + f"var<workgroup> ks: array<{key}, {BLOCK}>;\nvar<workgroup> ps: array<u32, {BLOCK}>;\n"
        f"@compute @workgroup_size({GROUP}) fn main(@builtin(workgroup_id) w: vec3<u32>, "
        "@builtin(num_workgroups) grid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {\n"
        "  let group = w.x + w.y * grid.x;\n  if (group >= p.rows * p.blocks) { return; }\n"
        "  let row = group / p.blocks; let block = group % p.blocks;\n"
        f"  for (var j = lane; j < {BLOCK}u; j += {GROUP}u) {{\n"
        f"    let k = block * {BLOCK}u + j; let i = row * p.length + k;\n"
        f"    if (k < p.length) {{ ks[j] = {fetch[0]}; ps[j] = {fetch[1]}; }}\n"
        f"    else {{ ks[j] = {largest}; ps[j] = 0xffffffffu; }}\n  }}\n  workgroupBarrier();\n"
        f"  for (var size = 2u; size <= {BLOCK}u; size = size << 1u) {{\n"
        "    for (var d = size >> 1u; d > 0u; d = d >> 1u) {\n"
        f"      for (var j = lane; j < {BLOCK // 2}u; j += {GROUP}u) {{\n"
        "        let a = (j / d) * d * 2u + j % d; let b = a + d;\n"
        "        let ka = ks[a]; let kb = ks[b]; let ia = ps[a]; let ib = ps[b];\n"
        "        let above = ka > kb || (ka == kb && ia > ib);\n"
        "        if (above == ((a & size) == 0u)) { ks[a] = kb; ks[b] = ka; ps[a] = ib; ps[b] = ia; }\n"
        "      }\n      workgroupBarrier();\n    }\n  }\n"
        # The last block of a row may be short; where blocks are cut to `keep`, all but it fill their share.
        f"  let own = min({BLOCK}u, p.length - block * {BLOCK}u);\n"
        f"  let share = min({BLOCK}u, p.keep);\n  let last = p.length - (p.blocks - 1u) * {BLOCK}u;\n"
        "  let width = (p.blocks - 1u) * share + min(last, share);\n"
        f"  for (var j = lane; j < min(own, share); j += {GROUP}u) {{\n"
        "    let to = row * width + block * share + j; keys[to] = ks[j]; at[to] = ps[j];\n  }\n}\n"
    )


def render_merge(wide: bool) -> str:
    """One pass: runs of `run` become runs of twice that. Bindings: keys, positions, and the same to write."""
    key = key_type(wide)
    return (
        head(("rows", "length", "run"), {"keys_in": key, "at_in": "u32"}, {"keys": key, "at": "u32"})
        + thread_main(THREADS)
        + "  if (thread >= p.rows * p.length) { return; }\n"
        "  let k = thread % p.length; let base = thread - k; let mine = keys_in[thread];\n"
        "  let run = k / p.run; let left = (run & 1u) == 0u;\n"
        "  let start = select(run - 1u, run + 1u, left) * p.run;\n"
        "  var low = min(start, p.length); let begin = low; var high = min(start + p.run, p.length);\n"
        # Equal keys of the left run come first: it counts what is smaller on the right, the right what is not larger.
        "  while (low < high) {\n    let middle = (low + high) / 2u; let other = keys_in[base + middle];\n"
        "    if (other < mine || (!left && other == mine)) { low = middle + 1u; } else { high = middle; }\n  }\n"
        "  let to = base + (run & ~1u) * p.run + k % p.run + (low - begin);\n"
        "  keys[to] = mine; at[to] = at_in[thread];\n}\n"
    )


@dataclass(frozen=True)
class Fetch:
    """Values and positions (int64) of the first `keep` of each sorted row. Bindings: values, positions, results."""

    dtype: str
    output: str
    positions: bool = True


def render_fetch(kernel: Fetch) -> str:
    """`width` is that of the positions' rows, `length` of the values'."""
    value = stored(kernel.output, load(kernel.dtype, "b0", "(p.offset + row * p.length + k)"))
    written = {"out": kernel.output, **({"where_at": "i64"} if kernel.positions else {})}
    return (
        head(("rows", "keep", "width", "length", "offset"), {"b0": kernel.dtype, "at": "u32"}, written)
        + thread_main(THREADS)
        + "  if (thread >= p.rows * p.keep) { return; }\n"
        "  let row = thread / p.keep; let k = at[row * p.width + thread % p.keep];\n"
        f"  out[thread] = {value};" + (" where_at[thread] = i64(k);" if kernel.positions else "") + "\n}\n"
    )


@dataclass(frozen=True)
class Search:
    """Where each value would be inserted in its sorted row. Bindings: sequence, values, results (int32 or int64)."""

    sequence: str
    values: str
    output: str
    right: bool
    compute: str


def render_search(kernel: Search) -> str:
    """`o0` and `o1` are the offsets of sequence and values, `step` is the stride of rows."""
    compute = kernel.compute
    mid = f"{compute}({load(kernel.sequence, 'b0', '(p.o0 + base + middle)')})"
    mine = f"{compute}({load(kernel.values, 'b1', '(p.o1 + thread)')})"
    nan = "is_nan(a) || is_nan(b)" if compute == "f32" else "false"
    sign = ">" if kernel.right else ">="
    return (
        head(
            ("count", "per_row", "length", "o0", "o1", "step"),
            {"b0": kernel.sequence, "b1": kernel.values},
            {"out": kernel.output},
        )
        + (HELPERS["is_nan"] if compute == "f32" else "")
        + f"fn beyond(a: {compute}, b: {compute}) -> bool {{ return !({nan}) && a {sign} b; }}\n"
        + thread_main(THREADS)
        + "  if (thread >= p.count) { return; }\n"
        f"  let base = (thread / p.per_row) * p.step; let mine = {mine};\n"
        "  var low = 0u; var high = p.length;\n"
        "  while (low < high) { let middle = (low + high) / 2u; "
        f"if (beyond({mid}, mine)) {{ high = middle; }} else {{ low = middle + 1u; }} }}\n"
        f"  out[thread] = {KINDS[kernel.output].storage}(low);\n}}\n"
    )


def render_compact() -> str:
    """Positions at which a running count rises. Bindings: counts (int32), positions (u32)."""
    return (
        head(("count", "offset"), {"counts": "i32"}, {"out": "u32"})
        + thread_main(THREADS)
        + "  if (thread >= p.count) { return; }\n"
        "  var before = 0; if (thread > 0u) { before = counts[p.offset + thread - 1u]; }\n"
        "  if (counts[p.offset + thread] != before) { out[before] = thread; }\n}\n"
    )


def render_place() -> str:
    """out[at[i]] = counts[i] - 1, as int64: the number of each element's group, back in the elements' own order."""
    return (
        head(("count", "offset"), {"counts": "i32", "at": "u32"}, {"out": "i64"})
        + thread_main(THREADS)
        + "  if (thread >= p.count) { return; }\n  out[at[thread]] = i64(counts[p.offset + thread] - 1);\n}\n"
    )


@dataclass(frozen=True)
class Count:
    """How many elements fall in each of `bins` equal parts of low..high. Results are u32, zero before."""

    dtype: str


def render_count(kernel: Count) -> str:
    value = load(kernel.dtype, "b0", "(p.offset + thread)")
    return (
        head(("count", "bins", "offset", "low: f32", "high: f32"), {"b0": kernel.dtype}, {"out": "atomic<u32>"})
        + thread_main(THREADS)
        + f"  if (thread >= p.count) {{ return; }}\n  let x = f32({value});\n"
        "  if (!(x >= p.low && x <= p.high)) { return; }\n"
        "  let bin = min(u32((x - p.low) / (p.high - p.low) * f32(p.bins)), p.bins - 1u);\n"
        "  atomicAdd(&out[bin], 1u);\n}\n"
    )
