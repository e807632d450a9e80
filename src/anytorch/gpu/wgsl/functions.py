"""Functions that WGSL lacks, or promises too little of: the float ones have a relative error near 1e-6 on every adapter.

WGSL allows `sin` an absolute error of 2^-11, `atan2` 4096 units in the last place, and `log` near 1 no correct digit; so
they are written out here. A name ends in the type it computes in, and an expression asks for `exp_{T}(…)`: a type for which
the function does not exist has no kernel (`computable`). No step relies on `(a + b) - a`, which a compiler may fold.
"""

from __future__ import annotations

import re
from functools import lru_cache

from anytorch.gpu.wgsl import elementary, special
from anytorch.gpu.wgsl.types import HELPERS

# Division, remainders, comparison and integer functions. T is replaced by each type in turn.
ARITHMETIC = """
fn copysign_f32(x: f32, sign: f32) -> f32 {
  return bitcast<f32>((bitcast<u32>(x) & 0x7fffffffu) | (bitcast<u32>(sign) & 0x80000000u));
}

fn multiply_wide(a: u32, b: u32) -> vec2<u32> {
  let al = a & 0xffffu; let ah = a >> 16u; let bl = b & 0xffffu; let bh = b >> 16u;
  let low = al * bl; let m1 = ah * bl; let m2 = al * bh;
  let middle = (low >> 16u) + (m1 & 0xffffu) + (m2 & 0xffffu);
  return vec2<u32>((middle << 16u) | (low & 0xffffu), ah * bh + (m1 >> 16u) + (m2 >> 16u) + (middle >> 16u));
}

fn is_finite(x: f32) -> bool { return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u; }

fn hypot_f32(a: f32, b: f32) -> f32 {
  if (is_inf(a) || is_inf(b)) { return infinity(); }
  if (is_nan(a) || is_nan(b)) { return quiet_nan(); }
  let large = max(abs(a), abs(b));
  if (large == 0.0) { return 0.0; }
  let small = min(abs(a), abs(b));
  // By powers of two, which are exact, into a range whose squares neither overflow nor vanish.
  let up = select(select(1.0, 1.2676506e30, large < 1e-15), 7.888609e-31, large > 1e15);
  let x = large * up; let y = small * up;
  let root = sqrt(x * x + y * y);
  // One step of Newton's with the squares' rounding in it: what is left is the last rounding.
  let xh = upper_half(x); let yh = upper_half(y); let rh = upper_half(root);
  let xl = x - xh; let yl = y - yh; let rl = root - rh;
  let high = (xh - rh) * (xh + rh) + yh * yh;
  let low = 2.0 * (xh * xl + yh * yl - rh * rl) + (xl * xl + yl * yl - rl * rl);
  return (root + (high + low) / (2.0 * root)) / up;
}

// The leading twelve bits: a product of two such numbers is exact.
fn upper_half(x: f32) -> f32 { return bitcast<f32>(bitcast<u32>(x) & 0xfffff000u); }

fn fmod_f32(x: f32, y: f32) -> f32 {
  if (is_nan(x) || is_nan(y) || is_inf(x) || y == 0.0) { return quiet_nan(); }
  if (is_inf(y)) { return x; }
  var rest = abs(x);
  let divisor = abs(y);
  if (rest >= divisor) {
    let highest = i32((bitcast<u32>(rest) >> 23u)) - i32((bitcast<u32>(divisor) >> 23u));
    for (var k = highest; k >= 0; k--) {
      let multiple = scale_exponent(divisor, k);
      if (rest >= multiple) { rest -= multiple; }
    }
  }
  return copysign_f32(rest, x);
}

fn remainder_f32(x: f32, y: f32) -> f32 {
  let m = fmod_f32(x, y);
  if (m != 0.0 && (m < 0.0) != (y < 0.0)) { return m + y; }
  return m;
}

fn floor_divide_f32(x: f32, y: f32) -> f32 {
  if (y == 0.0) { return divide_f32(x, y); }
  let m = fmod_f32(x, y);
  var quotient = (x - m) / y;
  if (m != 0.0 && (m < 0.0) != (y < 0.0)) { quotient -= 1.0; }
  if (quotient == 0.0) { return copysign_f32(0.0, x / y); }
  let down = floor(quotient);
  return select(down, down + 1.0, quotient - down > 0.5);
}

fn divide_f32(x: f32, y: f32) -> f32 {
  if (y == 0.0) {
    if (x == 0.0 || is_nan(x)) { return quiet_nan(); }
    return bitcast<f32>(0x7f800000u | ((bitcast<u32>(x) ^ bitcast<u32>(y)) & 0x80000000u));
  }
  return x / y;
}

fn trunc_divide_f32(x: f32, y: f32) -> f32 { return trunc(divide_f32(x, y)); }

fn rounded_to_half(x: f32) -> f32 {
  let bits = bitcast<u32>(x);
  if (!is_finite(x)) { return x; }
  if (abs(x) >= 65520.0) { return copysign_f32(infinity(), x); }
  if (abs(x) < 6.1035156e-5) { return round(x * 16777216.0) * 5.9604645e-8; }
  return bitcast<f32>((bits + 0xfffu + ((bits >> 13u) & 1u)) & 0xffffe000u);
}

fn rounded_to_bfloat16(x: f32) -> f32 {
  if (is_nan(x)) { return x; }
  let bits = bitcast<u32>(x);
  return bitcast<f32>((bits + 0x7fffu + ((bits >> 16u) & 1u)) & 0xffff0000u);
}

fn next_after(x: f32, y: f32) -> f32 {
  if (is_nan(x) || is_nan(y)) { return quiet_nan(); }
  if (x == y) { return y; }
  if (x == 0.0) { return bitcast<f32>(1u | (bitcast<u32>(y) & 0x80000000u)); }
  let bits = bitcast<u32>(x);
  return bitcast<f32>(select(bits - 1u, bits + 1u, (y > x) == (x > 0.0)));
}

fn equal_f32(a: f32, b: f32) -> bool { return a == b && !is_nan(a) && !is_nan(b); }
fn at_most_f32(a: f32, b: f32) -> bool { return a <= b && !is_nan(a) && !is_nan(b); }
fn is_true_f32(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) != 0u; }

fn sign_f32(x: f32) -> f32 {
  if (x > 0.0) { return 1.0; }
  return select(0.0, -1.0, x < 0.0);
}
"""

# The larger and the smaller of two; of a number and a NaN, the NaN (maximum) or the number (fmax).
ARITHMETIC += "".join(
    f"\nfn {name}_f32(a: f32, b: f32) -> f32 {{\n  if (is_nan(a)) {{ return {of_a}; }}\n"
    f"  if (is_nan(b)) {{ return {of_b}; }}\n  return {builtin}(a, b);\n}}\n"
    for name, builtin, of_a, of_b in (
        ("maximum", "max", "a", "b"),
        ("minimum", "min", "a", "b"),
        ("fmax", "max", "b", "a"),
        ("fmin", "min", "b", "a"),
    )
)

# The same in every integer type. A division by zero has no answer; what is returned must only not stop the device, and
# be what docs/guide/webgpu.md says.
INTEGER = """
fn divide_T(x: T, y: T) -> T {
  if (y == T(0)) { return T(-1); }
  if (y == T(-1)) { return -x; }
  return x / y;
}

fn trunc_divide_T(x: T, y: T) -> T { return divide_T(x, y); }

fn fmod_T(x: T, y: T) -> T {
  if (y == T(0)) { return x; }
  if (y == T(-1)) { return T(0); }
  return x - (x / y) * y;
}

fn remainder_T(x: T, y: T) -> T {
  let m = fmod_T(x, y);
  if (m != T(0) && (m < T(0)) != (y < T(0))) { return m + y; }
  return m;
}

fn floor_divide_T(x: T, y: T) -> T {
  let q = divide_T(x, y);
  let m = fmod_T(x, y);
  if (m != T(0) && y != T(0) && (m < T(0)) != (y < T(0))) { return q - T(1); }
  return q;
}

fn pow_T(x: T, y: T) -> T {
  if (y < T(0)) {
    if (x == T(1)) { return T(1); }
    if (x == T(-1)) { return select(T(1), T(-1), (y & T(1)) != T(0)); }
    return T(0);
  }
  var result = T(1);
  var base = x;
  var exponent = y;
  while (exponent > T(0)) {
    if ((exponent & T(1)) != T(0)) { result *= base; }
    base *= base;
    exponent = exponent >> 1u;
  }
  return result;
}

fn gcd_T(x: T, y: T) -> T {
  var a = abs(x);
  var b = abs(y);
  while (b != T(0)) { let r = fmod_T(a, b); a = b; b = r; }
  return a;
}

fn lcm_T(x: T, y: T) -> T {
  let g = gcd_T(x, y);
  if (g == T(0)) { return T(0); }
  return abs((x / g) * y);
}

fn bits_and_T(x: T, y: T) -> T { return x & y; }
fn bits_or_T(x: T, y: T) -> T { return x | y; }
fn bits_xor_T(x: T, y: T) -> T { return x ^ y; }
fn bits_not_T(x: T) -> T { return ~x; }

fn shift_left_T(x: T, y: T) -> T {
  if (y < T(0) || y >= T(BITS)) { return T(0); }
  return x << u32(y);
}

fn shift_right_T(x: T, y: T) -> T {
  if (y < T(0) || y >= T(BITS)) { return x >> (BITSu - 1u); }
  return x >> u32(y);
}
"""

# What is the builtin, or nothing at all, in some of the types.
PLAIN = """
fn sign_T(x: T) -> T {
  if (x > T(0)) { return T(1); }
  if (x < T(0)) { return T(-1); }
  return T(0);
}

fn equal_T(a: T, b: T) -> bool { return a == b; }
fn is_true_T(x: T) -> bool { return x != T(0); }
fn at_most_T(a: T, b: T) -> bool { return a <= b; }
"""

INTEGER_PLAIN = """
fn maximum_T(a: T, b: T) -> T { return select(a, b, b > a); }
fn minimum_T(a: T, b: T) -> T { return select(a, b, b < a); }
fn fmax_T(a: T, b: T) -> T { return select(a, b, b > a); }
fn fmin_T(a: T, b: T) -> T { return select(a, b, b < a); }
fn floor_T(x: T) -> T { return x; }
fn ceil_T(x: T) -> T { return x; }
fn trunc_T(x: T) -> T { return x; }
fn round_T(x: T) -> T { return x; }
"""

FLOAT_PLAIN = """
fn floor_T(x: T) -> T { return floor(x); }
fn ceil_T(x: T) -> T { return ceil(x); }
fn trunc_T(x: T) -> T { return trunc(x); }
fn round_T(x: T) -> T { return round(x); }
"""

TEXTS = elementary.TEXT + special.TEXT + ARITHMETIC


def _split(text: str) -> dict[str, str]:
    found = {}
    for part in re.split(r"\n(?=fn )", text):
        matched = re.match(r"fn (\w+)\(", part)
        if matched:
            found[matched.group(1)] = part.strip() + "\n"
    return found


def _typed(text: str, name: str, bits: int) -> str:
    return re.sub(r"\bT\b", name, text.replace("_T(", f"_{name}(").replace("BITS", str(bits)))


FUNCTIONS: dict[str, str] = {**HELPERS, **_split(TEXTS)}
for _name, _bits in (("i32", 32), ("i64", 64)):
    FUNCTIONS.update(_split(_typed(INTEGER + PLAIN + INTEGER_PLAIN, _name, _bits)))
FUNCTIONS.update(_split(_typed(FLOAT_PLAIN, "f32", 32)))
FUNCTIONS.update(_split(_typed(PLAIN + FLOAT_PLAIN, "f64", 64)))
# By their bits, as in single precision: what a compiler makes of a comparison with a NaN is its affair.
FUNCTIONS.update(
    _split("""
fn is_true_f64(x: f64) -> bool { return (bitcast<u64>(x) << 1u) != u64(0); }

fn unordered_f64(x: f64) -> bool { return (bitcast<u64>(x) << 1u) > (u64(0xffe00000u) << 32u); }

fn equal_f64(a: f64, b: f64) -> bool { return a == b && !unordered_f64(a) && !unordered_f64(b); }

fn at_most_f64(a: f64, b: f64) -> bool { return a <= b && !unordered_f64(a) && !unordered_f64(b); }
""")
)
FUNCTIONS["divide_f64"] = "fn divide_f64(x: f64, y: f64) -> f64 { return x / y; }\n"

# Functions without a type in their name take floats.
_FLOAT_ONLY = {name for name in (*HELPERS, *_split(TEXTS)) if not name.endswith("_f32")}

_CALL = re.compile(r"\b(\w+)\(")
_FRACTION = re.compile(r"\d\.\d|\de-")
_TYPED = re.compile(r"_(f32|f64|i32|i64)$")
# Builtins that have no 64-bit form.
_SINGLE = {
    *("exp", "exp2", "log", "log2", "pow", "inverseSqrt"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("is_nan", "is_inf", "quiet_nan", "infinity", "bf16_bits"),
}


def computable(expression: str, kind: str) -> bool:
    """Whether `expression` can be computed in WGSL type `kind`. False where it names a function that type has no form of."""
    if kind.startswith("i") and _FRACTION.search(expression):
        return False
    called = set(_CALL.findall(expression))
    if any(_TYPED.search(name) and name not in FUNCTIONS for name in called):
        return False
    if kind in ("f64", "i64", "i32") and any(name in _FLOAT_ONLY for name in called):
        return False
    return kind != "f64" or not (called & _SINGLE or "bitcast<u32>(" in expression)


@lru_cache(maxsize=1024)
def needed(text: str, defined: str = "") -> str:
    """The definitions of every function of ours that `text` calls, directly or not, except those that `defined` has."""
    wanted: list[str] = []
    queue = [text]
    while queue:
        for name in _CALL.findall(queue.pop()):
            if name in FUNCTIONS and name not in wanted:
                wanted.append(name)
                queue.append(FUNCTIONS[name].partition("{")[2])
    return "".join(FUNCTIONS[name] for name in wanted if f"fn {name}(" not in defined)
