"""Random numbers: Philox4x32-10, a counter-based generator. Element i is a function of (seed, counter, i) and nothing else,
so the same seed gives the same stream on every adapter.

A thread computes one block of four 32-bit numbers and makes four elements of it (two of a wide integer range).
"""

from __future__ import annotations

from dataclasses import dataclass

from anytorch.gpu.wgsl.functions import needed
from anytorch.gpu.wgsl.types import KINDS, MAIN, head, load, stored

WORKGROUP = 256

PHILOX = """fn philox(counter: vec2<u32>, seed: vec2<u32>) -> vec4<u32> {
  var c = vec4<u32>(counter, 0u, 0u);
  var k = seed;
  for (var i = 0; i < 10; i++) {
    let first = multiply_wide(0xD2511F53u, c.x);
    let second = multiply_wide(0xCD9E8D57u, c.z);
    c = vec4<u32>(second.y ^ c.y ^ k.x, second.x, first.y ^ c.w ^ k.y, first.x);
    k += vec2<u32>(0x9E3779B9u, 0xBB67AE85u);
  }
  return c;
}
fn block(thread: u32) -> vec4<u32> {
  let low = p.counter_low + thread;
  return philox(vec2<u32>(low, p.counter_high + select(0u, 1u, low < thread)), vec2<u32>(p.seed_low, p.seed_high));
}
// [0, 1), in steps of 2^-bits: the mantissa of the type that will hold it, or 1 could come out
fn unit(r: u32) -> f32 { return f32(r >> (32u - p.bits)) * power_of_two(-i32(p.bits)); }
// (0, 1]
fn unit_above(r: u32) -> f32 { return f32((r >> 8u) + 1u) * 5.9604645e-8; }
fn uniform(r: u32, a: f32, b: f32) -> f32 {
  let v = a + (b - a) * unit(r);
  return select(v, a, v >= b);
}
fn exponential(r: u32) -> f32 { return max(-log_f32(unit_above(r)), 2.9802322e-8); }
fn normal_pair(r: vec2<u32>) -> vec2<f32> {
  let radius = sqrt(-2.0 * log_f32(unit_above(r.x)));
  let angle = 6.2831853 * (f32(r.y >> 8u) * 5.9604645e-8);
  return radius * vec2<f32>(cos_f32(angle), sin_f32(angle));
}
"""

# Each makes `values` from the block `r`; a() and b() are the distribution's parameters, low and span those of a range.
DISTRIBUTIONS = {
    "uniform": ("f32", "vec4<f32>({})", "uniform({r}, a, b)"),
    "normal": ("f32", "a + b * vec4<f32>(normal_pair(r.xy), normal_pair(r.zw))", ""),
    "log_normal": ("f32", "vec4<f32>({})", "exp_f32(a + b * z.{lane})"),
    "exponential": ("f32", "vec4<f32>({})", "exponential({r}) / a"),
    "bernoulli": ("f32", "vec4<f32>({})", "select(0.0, 1.0, unit({r}) < a)"),
    "geometric": ("f32", "vec4<f32>({})", "max(ceil(exponential({r}) / -log1p_f32(-a)), 1.0)"),
    "cauchy": ("f32", "vec4<f32>({})", "a + b * tan_f32(3.14159265 * (unit_above({r}) - 0.5))"),
    "range": ("i32", "vec4<i32>({})", "bitcast<i32>(p.a + within({r}))"),
}
WITHIN = "fn within(r: u32) -> u32 { if (p.b == 0u) { return r; } return multiply_wide(r, p.b).y; }\n"


@dataclass(frozen=True)
class Random:
    """A distribution into a contiguous output: one of DISTRIBUTIONS, or "wide", a range of 64-bit integers."""

    distribution: str

    @property
    def per_thread(self) -> int:
        return 2 if self.distribution == "wide" else 4


_SEEDED = ("n", "row", "seed_low", "seed_high", "counter_low", "counter_high")
_FIELDS = (*_SEEDED, "bits", "a", "b", "c", "d", "offset")


def render(kernel: Random) -> str:
    """Parameters: 12 words. a and b are floats, or the bits of a range's low end and length (0: 2^32)."""
    if kernel.distribution == "wide":
        return _render_wide()
    kind, vector, each = DISTRIBUTIONS[kernel.distribution]
    values = vector
    if each:
        values = vector.format(", ".join(each.format(r=f"r.{lane}", lane=lane) for lane in "xyzw"))
    z = "  let z = vec4<f32>(normal_pair(r.xy), normal_pair(r.zw));\n" if "z." in each else ""
    body = PHILOX + (WITHIN if kernel.distribution == "range" else "")
    return (
        f"{head(_FIELDS, {}, {'out': kind})}{body}{needed(body + values)}"
        f"{MAIN}  let first = thread * 4u;\n  if (first >= p.n) {{ return; }}\n"
        f"  let a = bitcast<f32>(p.a); let b = bitcast<f32>(p.b);\n"
        f"  let r = block(thread);\n{z}  let values = {values};\n"
        "  for (var k = 0u; k < min(4u, p.n - first); k++) { out[p.offset + first + k] = values[k]; }\n}\n"
    )


def _render_wide() -> str:
    """Parameters: a, b are the low and high word of the range's start, c, d of its length (0: 2^64)."""
    return (
        f"{head(_FIELDS, {}, {'out': 'i64'})}{PHILOX}{needed(PHILOX)}"
        f"{MAIN}  let first = thread * 2u;\n  if (first >= p.n) {{ return; }}\n"
        "  let r = block(thread);\n"
        "  let start = (u64(p.b) << 32u) | u64(p.a);\n  let length = (u64(p.d) << 32u) | u64(p.c);\n"
        "  for (var k = 0u; k < min(2u, p.n - first); k++) {\n"
        "    var v = (u64(r[2u * k]) << 32u) | u64(r[2u * k + 1u]);\n"
        "    if (length != u64(0)) { v = v % length; }\n"
        "    out[p.offset + first + k] = i64(start + v);\n  }\n}\n"
    )


@dataclass(frozen=True)
class Dropout:
    """out = mask ? x * b : 0, with a mask that is true with probability a; all contiguous."""

    dtype: str
    per_thread = 4


def render_dropout(kernel: Dropout) -> str:
    pairs = KINDS[kernel.dtype].lanes == 2
    lines = [
        head(_FIELDS, {"x": kernel.dtype}, {"out": kernel.dtype, "mask": "u32"}),
        PHILOX,
        needed(PHILOX),
        MAIN,
        "  let first = thread * 4u;\n  if (first >= p.n) { return; }\n  let r = block(thread);\n  var word = 0u;\n",
        "  let keep = bitcast<f32>(p.a); let scale = bitcast<f32>(p.b);\n",
        "  for (var k = 0u; k < min(4u, p.n - first); k++) {\n",
        f"    let at = p.offset + first + k;\n    let kept = unit(r[k]) < keep;\n"
        f"    let value = select(0.0, {load(kernel.dtype, 'x', 'at')} * scale, kept);\n",
        "    word |= select(0u, 1u, kept) << (8u * k);\n",
    ]
    if pairs:
        lines.append(
            "    let half = (first + k) >> 1u;\n"
            "    if ((k & 1u) == 0u) { out[half] = bf16_bits(value); } else { out[half] |= bf16_bits(value) << 16u; }\n"
        )
    else:
        lines.append(f"    out[first + k] = {stored(kernel.dtype, 'value')};\n")
    lines.append("  }\n  mask[thread] = word;\n}\n")
    return "".join(lines)
