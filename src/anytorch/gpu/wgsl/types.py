"""How an element of each dtype is stored in a buffer and what the shader computes it in.

Narrow types share 32-bit words: WGSL has no 8-bit type, and 16-bit ones only where the adapter has `shader-f16`. A thread
then either owns whole words (dense outputs) or changes its part of a word atomically (everything else).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    name: str  # torch's name for it
    storage: str  # WGSL type of a buffer's elements
    compute: str  # WGSL type of a value in the shader
    nbytes: int
    lanes: int = 1  # elements per storage word
    feature: str = ""  # needed of the adapter
    floating: bool = False


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("float32", "f32", "f32", 4, floating=True),
        Kind("float16", "f16", "f32", 2, feature="shader-f16", floating=True),
        Kind("bfloat16", "u32", "f32", 2, lanes=2, floating=True),
        Kind("float64", "f64", "f64", 8, feature="shader-f64", floating=True),
        Kind("int32", "i32", "i32", 4),
        Kind("int64", "i64", "i64", 8, feature="shader-int64"),
        Kind("int16", "u32", "i32", 2, lanes=2),
        Kind("int8", "u32", "i32", 1, lanes=4),
        Kind("uint8", "u32", "i32", 1, lanes=4),
        Kind("bool", "u32", "i32", 1, lanes=4),
    )
}


def supported(name: str, features: Collection[str]) -> bool:
    """Whether a shader on an adapter with these features can compute with this dtype."""
    kind = KINDS.get(name)
    return kind is not None and (not kind.feature or kind.feature in features)


def enables(names: Collection[str]) -> str:
    return "enable f16;\n" if "float16" in names else ""


def buffers(read: Mapping[str, str], written: Mapping[str, str] | None = None, first: int = 0) -> str:
    """Declarations of buffers by name, from binding `first` on; each is given a dtype, or the WGSL type of its elements."""
    named = [("read", *item) for item in read.items()] + [("read_write", *item) for item in (written or {}).items()]
    return "".join(
        f"@group(0) @binding({i}) var<storage, {access}> {name}: "
        f"array<{KINDS[element].storage if element in KINDS else element}>;\n"
        for i, (access, name, element) in enumerate(named, first)
    )


def numbered(letter: str, elements: Iterable[str]) -> dict[str, str]:
    """Names for buffers of these elements: b0, b1, …"""
    return {f"{letter}{i}": element for i, element in enumerate(elements)}


def parameters(*fields: str) -> str:
    """The parameters `p` of a kernel: u32 unless a field names its type."""
    typed = ", ".join(field if ":" in field else f"{field}: u32" for field in fields)
    return f"struct Parameters {{ {typed} }}\nvar<immediate> p: Parameters;\n"


def head(
    fields: Sequence[str],
    read: Mapping[str, str],
    written: Mapping[str, str] | None = None,
    dtypes: Collection[str] = (),
) -> str:
    """How a shader begins: parameters, buffers, and what their dtypes take. `dtypes` are those that no buffer names."""
    named = {*dtypes, *read.values(), *(written or {}).values()}
    rounding = BF16_BITS if "bfloat16" in named else ""
    return enables(named) + buffers(read, written) + parameters(*fields) + rounding


def element(name: str, quads: bool) -> str:
    """The WGSL type of a buffer's elements; `quads`: of four elements in one load, which start on a multiple of four."""
    storage = KINDS[name].storage
    return storage if not quads else "vec2<u32>" if name == "bfloat16" else f"vec4<{storage}>"


def load(name: str, binding: str, index: str) -> str:
    """The expression for element `index` of a buffer, in the compute type."""
    kind = KINDS[name]
    if kind.lanes == 1:
        value = f"{binding}[{index}]"
        return value if kind.storage == kind.compute else f"{kind.compute}({value})"
    if kind.lanes == 2:
        half = f"({binding}[({index}) >> 1u] >> ((({index}) & 1u) * 16u))"
        if name == "bfloat16":
            return f"bitcast<f32>({half} << 16u)"
        return f"(bitcast<i32>({half} << 16u) >> 16u)"
    byte = f"({binding}[({index}) >> 2u] >> ((({index}) & 3u) * 8u))"
    if name == "int8":
        return f"(bitcast<i32>({byte} << 24u) >> 24u)"
    return f"i32({byte} & 255u)"


def lane_bits(name: str, value: str) -> str:
    """The low bits of a word that hold `value` of a narrow type."""
    if name == "bfloat16":
        return f"bf16_bits({value})"
    return f"(bitcast<u32>({value}) & {0xFFFF if KINDS[name].lanes == 2 else 0xFF:#x}u)"


def stored(name: str, value: str) -> str:
    """`value` in the storage type; for types that have a word of their own."""
    kind = KINDS[name]
    return value if kind.storage == kind.compute else f"{kind.storage}({value})"


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor whose elements lie side by side, row by row."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def load_four(name: str, binding: str, index: str) -> str:
    """Four consecutive elements from a binding of `element(name, True)`, at an index that is a multiple of 4."""
    value = f"{binding}[({index}) / 4u]"
    if name == "bfloat16":
        halves = ", ".join(f"{value}.{word} << 16u, {value}.{word} & 0xffff0000u" for word in "xy")
        return f"bitcast<vec4<f32>>(vec4<u32>({halves}))"
    return value if name == "float32" else f"vec4<{KINDS[name].compute}>({value})"


def stored_four(name: str, v: str) -> str:
    """The vec4 `v` of the compute type as an element of such a binding."""
    if name == "bfloat16":
        low, high = (f"bf16_bits({v}.{a}) | (bf16_bits({v}.{b}) << 16u)" for a, b in ("xy", "zw"))
        return f"vec2<u32>({low}, {high})"
    kind = KINDS[name]
    return v if kind.storage == kind.compute else f"vec4<{kind.storage}>({v})"


def offsets(
    variable: str, operands: Sequence[int], rank: int, shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> str:
    """Statements that set a<i> to the element index of each operand for linear index `variable`.

    Sizes and strides are parameters unless `strides` are given. They may be negative: unsigned numbers wrap round.
    """
    lines = [f"var rest = {variable};", *[f"var a{i} = p.o{i};" for i in operands]]
    for r in range(rank - 1, -1, -1):
        size = f"{shape[r]}u" if strides else f"p.d{r}"
        steps = [f"{strides[i][r] % 2**32}u" if strides else f"p.t{i}_{r}" for i in operands]
        if r:
            lines.append(f"let c{r} = rest % {size}; rest = rest / {size};")
        coordinate = f"c{r}" if r else "rest"
        lines.append(" ".join(f"a{i} += {coordinate} * {step};" for i, step in zip(operands, steps, strict=True)))
    return " ".join(lines)


def words_main(lanes: int, bits: str, target: str) -> str:
    """A kernel whose threads each make a word of `lanes` elements: `bits` are those of element `first + k`."""
    return (
        f"{MAIN}  let first = thread * {lanes}u;\n  if (first >= p.n) {{ return; }}\n  var word = 0u;\n"
        f"  for (var k = 0u; k < {lanes}u; k++) {{\n"
        f"    if (first + k < p.n) {{ word |= {bits} << (k * {32 // lanes}u); }}\n  }}\n  {target} = word;\n}}\n"
    )


# The head of a kernel whose thread numbers are given by the parameter `row`, threads per row of the launch grid.
MAIN = (
    "@compute @workgroup_size(256) fn main(@builtin(global_invocation_id) g: vec3<u32>) {\n"
    "  let thread = g.x + g.y * p.row;\n"
)

# Round to nearest, ties to even; a NaN stays one (its mantissa could round away otherwise).
BF16_BITS = """fn bf16_bits(x: f32) -> u32 {
  let b = bitcast<u32>(x);
  if ((b & 0x7fffffffu) > 0x7f800000u) { return (b >> 16u) | 0x40u; }
  return (b + 0x7fffu + ((b >> 16u) & 1u)) >> 16u;
}
"""

# `x != x` is folded to false by some compilers: NaN is told by its bits. inf and nan cannot be written as constants.
HELPERS: dict[str, str] = {
    "is_nan": "fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }\n",
    "is_inf": "fn is_inf(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) == 0x7f800000u; }\n",
    "quiet_nan": "fn quiet_nan() -> f32 { var bits = 0x7fc00000u; return bitcast<f32>(bits); }\n",
    "infinity": "fn infinity() -> f32 { var bits = 0x7f800000u; return bitcast<f32>(bits); }\n",
}


def helpers(text: str, defined: str = "") -> str:
    """The helpers that `text` calls, except those that `defined` has."""
    return "".join(each for name, each in HELPERS.items() if f"{name}(" in text and f"fn {name}(" not in defined)


def convert(value: str, source: str, target: str) -> str:
    """`value`, in the compute type of dtype `source`, as torch converts it to dtype `target` (its compute type)."""
    have, want = KINDS[source], KINDS[target]
    if target == "bool":
        if have.compute == "f32":  # by its bits: a NaN is true, but need not be unequal to anything
            return f"select(0, 1, (bitcast<u32>({value}) & 0x7fffffffu) != 0u)"
        if have.compute == "f64":
            return f"select(0, 1, (bitcast<u64>({value}) << 1u) != u64(0))"
        return value if source == "bool" else f"select(0, 1, {value} != {have.compute}(0))"
    if have.compute == want.compute and (have.floating or want.nbytes >= have.nbytes):
        converted = value
    elif have.floating and not want.floating and want.nbytes < 4:
        converted = f"i32({value})"
    else:
        converted = f"{want.compute}({value})"
    if target == "float16" or target == "bfloat16" or want.floating or want.nbytes >= 4:
        return converted
    # Narrow integers wrap round. Sign and width are restored by the store and the next load; within this shader, here.
    if target == "uint8":
        return f"({converted} & 255)"
    bits = 8 * (4 - want.nbytes)
    return f"(({converted} << {bits}u) >> {bits}u)"
