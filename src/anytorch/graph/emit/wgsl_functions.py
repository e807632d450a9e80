"""The functions, numbers and conversions of kernel graphs in WGSL (`gpu.wgsl.functions` has those that end in a type).

A value is an f32, an i32, an i64 or a bool; half precision is computed in f32. WGSL compilers assume finite numbers where
they can see them: what may be a NaN or an infinity goes through functions that look at the bits.
"""

from __future__ import annotations

import re
from math import inf

from anytorch.gpu.wgsl.types import KINDS
from anytorch.graph import ops
from anytorch.graph.sizes import Size, SizeLike

FLOAT = {
    **{op: f"{op}_f32({{0}})" for op in ("exp", "log", "sin", "cos", "erf", "tanh", "sigmoid", "log1p", "expm1")},
    "sqrt": "sqrt({0})",
    "rsqrt": "divide_f32(1.0, sqrt({0}))",
    "reciprocal": "divide_f32(1.0, {0})",
    "silu": "({0} * sigmoid_f32({0}))",
    "gelu": "({0} * normal_cdf_plain({0}))",
    "gelu_tanh": "(0.5 * {0} * (1.0 + tanh_f32(0.7978845608028654 * ({0} + 0.044715 * {0} * {0} * {0}))))",
    "div": "divide_f32({0}, {1})",
}
ANY = {
    "square": "({0} * {0})",
    "neg": "(-{0})",
    "abs": "abs({0})",
    "relu": "select({0}, {T}(0), {0} < {T}(0))",  # a NaN is not below anything: it stays
    "floor": "floor_{T}({0})",
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "pow": "pow_{T}({0}, {1})",
    "maximum": "maximum_{T}({0}, {1})",
    "minimum": "minimum_{T}({0}, {1})",
}
# One that holds for equal values is not left to the compiler: `x <= x` may be folded to true, and x may be a NaN.
COMPARED = {
    "lt": "({0} < {1})",
    "le": "at_most_{T}({0}, {1})",
    "gt": "({0} > {1})",
    "ge": "at_most_{T}({1}, {0})",
    "eq": "equal_{T}({0}, {1})",
    "ne": "(!equal_{T}({0}, {1}))",
}
LOGIC = {"and": "({0} && {1})", "or": "({0} || {1})", "not": "(!{0})"}
# Of whole numbers that must be told in 32 bits: these stay as small as positions and sizes are.
SMALL = {"position", "constant", "cast", "add", "sub", "neg", "maximum", "minimum", "where", "choose"}
EXTREMES = {
    ("max", "f32"): "(-infinity())",
    ("min", "f32"): "infinity()",
    ("max", "i32"): "(-2147483647i - 1i)",
    ("min", "i32"): "2147483647i",
    ("max", "i64"): "(i64(1) << 63u)",
    ("min", "i64"): "(~(i64(1) << 63u))",
}
# By its bits: compilers fold f32(f16(x)) to x. Below 2^-14 halves are multiples of 2^-24, from 65520 on infinite.
AS_HALF = """fn as_half(x: f32) -> f32 {
  let bits = bitcast<u32>(x);
  let size = bits & 0x7fffffffu;
  if (size >= 0x7f800000u) { return x; }
  if (size < 0x38800000u) { return round(x * 16777216.0) * 5.9604644775390625e-8; }
  let near = (bits + 0xfffu + ((bits >> 13u) & 1u)) & 0xffffe000u;
  if ((near & 0x7fffffffu) >= 0x47800000u) { return bitcast<f32>((bits & 0x80000000u) | 0x7f800000u); }
  return bitcast<f32>(near);
}
"""
LARGEST = 3.4028235677973366e38  # beyond it a float32 is infinite


def operation(op: str, args: list[str], kind: str) -> str:
    """A pointwise op on values that are all of this kind."""
    template = LOGIC.get(op) or COMPARED.get(op) or (FLOAT.get(op) if kind == "f32" else None) or ANY.get(op)
    if template is None or (kind == "bool" and op not in LOGIC):
        raise NotImplementedError(f"{op} of {kind} has no form in WGSL")
    return template.replace("{T}", kind).format(*args)


def converted(text: str, old: str, new: str) -> str:
    """A value of one kind as another, as torch converts it."""
    if old == new:
        return text
    if new == "bool":
        return f"is_true_{old}({text})"
    if old == "bool":
        return f"select({new}(0), {new}(1), {text})"
    return f"{new}({text})"


def rounded(text: str, dtype: str) -> str:
    """A value as it is once it has been stored in half precision; of other dtypes the value itself."""
    if dtype == "bfloat16":
        return f"bitcast<f32>(bf16_bits({text}) << 16u)"
    return f"as_half({text})" if dtype == "float16" else text


def literal(value: float, kind: str) -> str:
    if kind == "bool":
        return "true" if value else "false"
    if kind != "f32":
        if not -(2**31) < int(value) < 2**31:
            raise NotImplementedError(f"the whole number {int(value)} does not fit into 32 bits")
        return f"{kind}({int(value)})"
    value = float(value)
    if value != value:
        return "quiet_nan()"
    if abs(value) > LARGEST:
        return "infinity()" if value == inf or value > 0 else "(-infinity())"
    return f"f32({value!r})"


def neutral(how: str, kind: str) -> str:
    """What a reduction begins with."""
    return EXTREMES.get((how, kind), f"{kind}(0)")


def joined(how: str, kind: str, one: str, other: str) -> str:
    """Two values of a reduction as one; of a number and a NaN, the NaN."""
    if how in ("max", "min"):
        return operation(f"{how}imum", [one, other], kind)
    return f"({one} + {other})"


def size_text(size: SizeLike) -> str:
    """A size, a step or a start as a u32; named sizes are parameters. Below zero it wraps round, as sums of it do."""
    if not isinstance(size, Size):
        return f"{size % 2**32}u"
    text = re.sub(r"[A-Za-z_]\w*", lambda found: f"p.{parameter(found[0])}", str(size))
    numbers = re.sub(r"(?<![\w.])-?[0-9]+", lambda found: f"{int(found[0]) % 2**32}u", text)
    return f"({numbers})"


def parameter(name: str) -> str:
    """The parameter that holds a named size."""
    return f"size_{name}"


# Set by `main`: lanes that exchange values without shared memory are the device's affair.
SUBGROUP = "var<private> sub_size: u32; var<private> sub_number: u32; var<private> sub_within: u32;\n"


def fold(how: str, kind: str, lanes: int, subgroups: bool = False) -> str:
    """A function that makes one of the values of a workgroup's lanes, pairwise; every lane gets it."""
    if subgroups and kind != "i64":  # which cannot be exchanged
        return (
            f"fn fold_{how}_{kind}(mine: {kind}, lane: u32) -> {kind} {{\n  var x = mine;\n"
            f"  for (var d = min(sub_size, {lanes}u) >> 1u; d > 0u; d = d >> 1u) {{\n"
            f"    let other = subgroupShuffleXor(x, d);\n"
            f"    x = {joined(how, kind, 'x', 'other')};\n  }}\n"
            f"  if (sub_within == 0u) {{ held_{kind}[sub_number] = x; }}\n  workgroupBarrier();\n"
            f"  var all = held_{kind}[0];\n"
            f"  for (var d = 1u; d < {lanes}u / sub_size; d++) {{\n"
            f"    all = {joined(how, kind, 'all', f'held_{kind}[d]')};\n  }}\n"
            "  workgroupBarrier();\n  return all;\n}\n"
        )
    both = joined(how, kind, "held[lane]", "held[lane + d]").replace("held", f"held_{kind}")
    return (
        f"fn fold_{how}_{kind}(mine: {kind}, lane: u32) -> {kind} {{\n"
        f"  held_{kind}[lane] = mine;\n  workgroupBarrier();\n"
        f"  for (var d = {lanes // 2}u; d > 0u; d = d >> 1u) {{\n"
        f"    if (lane < d) {{ held_{kind}[lane] = {both}; }}\n    workgroupBarrier();\n  }}\n"
        f"  let all = held_{kind}[0];\n  workgroupBarrier();\n  return all;\n}}\n"
    )


def across_slices(lanes: int, width: int) -> str:
    """A function that adds up what the slices of a workgroup have for the same column; all of them get it."""
    return (
        "fn across_slices(mine: f32, lane: u32) -> f32 {\n  held_f32[lane] = mine;\n  workgroupBarrier();\n"
        f"  var all = 0.0;\n  for (var d = 0u; d < {lanes}u; d += {width}u) {{ all += held_f32[lane % {width}u + d]; }}\n"
        "  workgroupBarrier();\n  return all;\n}\n"
    )


def shared(kind: str, lanes: int) -> str:
    return f"var<workgroup> held_{kind}: array<{kind}, {lanes}>;\n"


def lanes_of(dtype: str) -> int:
    """How many elements share a word of memory."""
    return KINDS[dtype].lanes


def compute_kind(dtype: str, wide: bool) -> str:
    """The kind of a dtype's values; whole numbers of 64 bits are told in 32 unless the device has them (`wide`)."""
    if dtype in ("bool", "int32", "int64"):
        return {"bool": "bool", "int32": "i32", "int64": "i64" if wide else "i32"}[dtype]
    if dtype in ops.FLOATS and dtype != "float64":
        return "f32"
    raise NotImplementedError(f"{dtype} is not computed in WGSL")
