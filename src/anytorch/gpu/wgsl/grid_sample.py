"""Sampling an image or a volume at given places, and its gradients, for `wgsl.per_element`.

Axes count from the slowest (depth or height) on; a place in the grid names them the other way round, as (x, y) or (x, y, z).
The gradient of the input is added up by atomics: which places read an element is known only when they are read.
"""

from __future__ import annotations

from anytorch.gpu.wgsl.resample import CUBIC

BILINEAR, NEAREST, BICUBIC = range(3)
ZEROS, BORDER, REFLECTION = range(3)
_CUBIC_SLOPE = """  if (x <= 1.0) { return sign(d) * (3.75 * x - 4.5) * x; }
  return sign(d) * ((-2.25 * x + 7.5) * x - 6.0);
}
"""


def parameters(rank: int) -> tuple[str, ...]:
    return ("channels", "places", *[f"x{axis}" for axis in range(rank)])


def functions(rank: int, padding: int, align_corners: bool) -> str:
    """fn source: from [-1, 1] to places, each `stretch` of its argument; fn bounded: what the padding makes of a place, and
    its slope; fn index_of: which element of the input is at a place, or -1."""
    source, stretch = (
        ("(c + 1.0) * 0.5 * (size - 1.0)", "0.5 * (size - 1.0)")
        if align_corners
        else ("((c + 1.0) * size - 1.0) * 0.5", "0.5 * size")
    )
    low, high = ("0.0", "size - 1.0") if align_corners else ("-0.5", "size - 0.5")
    clipped = (
        "if (c <= 0.0 || is_nan(c)) { return vec2<f32>(0.0, 0.0); }\n"
        "  if (c >= size - 1.0) { return vec2<f32>(size - 1.0, 0.0); }\n"
    )
    bounded = {
        ZEROS: "return vec2<f32>(c, 1.0);",
        BORDER: f"{clipped}  return vec2<f32>(c, 1.0);",
        REFLECTION: (
            f"let low = {low}; let span = {high} - low; if (span <= 0.0) {{ return vec2<f32>(0.0, 0.0); }}\n"
            "  let away = abs(given - low); let turns = floor(away / span); let extra = away - turns * span;\n"
            "  let even = turns - 2.0 * floor(turns * 0.5) == 0.0;\n"
            "  let c = select(span + low - extra, extra + low, even);\n"
            "  let slope = select(-1.0, 1.0, even == (given >= low));\n"
            f"  {clipped}  return vec2<f32>(c, slope);"
        ),
    }[padding]
    name = "given" if padding == REFLECTION else "c"
    axes = range(rank)
    inside = " && ".join(f"c{a} >= 0.0 && c{a} < f32(p.x{a})" for a in axes)
    index = "plane"
    for axis in axes:
        index = f"({index} * p.x{axis} + u32(c{axis}))"
    return (
        f"fn source(c: f32, size: f32) -> f32 {{ return {source}; }}\n"
        f"fn stretch(size: f32) -> f32 {{ return {stretch}; }}\n"
        f"fn bounded({name}: f32, size: f32) -> vec2<f32> {{\n  {bounded}\n}}\n"
        f"fn index_of(plane: u32, {', '.join(f'c{a}: f32' for a in axes)}) -> i32 {{\n"
        f"  if (!({inside})) {{ return -1; }}\n  return i32({index});\n}}\n"
        f"fn cubic(d: f32) -> f32 {{ let x = abs(d);\n{CUBIC}"
        f"fn cubic_slope(d: f32) -> f32 {{ let x = abs(d);\n{_CUBIC_SLOPE}"
    )


def _located(rank: int) -> str:
    """Where the grid's place `at` lies: r0, r1, … on axes of the sizes s0, s1, …"""
    return "".join(
        f"  let s{a} = f32(p.x{a}); let r{a} = source(load_grid(at * {rank}u + {rank - 1 - a}u), s{a});\n"
        for a in range(rank)
    )


def _over_taps(rank: int, mode: int, inner: str) -> str:
    """`inner` for every tap: its place t0, t1, … and its weight on each axis, w0, w1, …, with their slopes d0, d1, …"""
    axes = range(rank)
    if mode == NEAREST:
        taps = "".join(f"  let t{a} = round(bounded(r{a}, s{a}).x); let w{a} = 1.0; let d{a} = 0.0;\n" for a in axes)
        return f"{taps}  {{\n{inner}  }}\n"
    if mode == BILINEAR:
        start = "".join(
            f"  let b{a} = bounded(r{a}, s{a}); let f{a} = floor(b{a}.x); let e{a} = b{a}.x - f{a};\n" for a in axes
        )
        taps = "".join(
            f"    let u{a} = ((corner >> {a}u) & 1u) == 1u; let t{a} = f{a} + select(0.0, 1.0, u{a});\n"
            f"    let w{a} = select(1.0 - e{a}, e{a}, u{a}); let d{a} = select(-b{a}.y, b{a}.y, u{a});\n"
            for a in axes
        )
        return f"{start}  for (var corner = 0u; corner < {1 << rank}u; corner++) {{\n{taps}{inner}  }}\n"
    loops = "".join(f"  for (var j{a} = -1; j{a} <= 2; j{a}++) {{\n" for a in axes)
    taps = "".join(
        f"    let q{a} = floor(r{a}) + f32(j{a}); let t{a} = bounded(q{a}, s{a}).x;\n"
        f"    let w{a} = cubic(r{a} - q{a}); let d{a} = cubic_slope(r{a} - q{a});\n"
        for a in axes
    )
    return f"{loops}{taps}{inner}  {'}' * rank}\n"


def forward(rank: int, mode: int) -> str:
    """y[n, c, place] is x[n, c] at grid[n, place]; i is an element of y."""
    axes = range(rank)
    weight = " * ".join(f"w{a}" for a in axes)
    inner = (
        f"    let k = index_of(plane, {', '.join(f't{a}' for a in axes)});\n"
        f"    if (k >= 0) {{ sum += {weight} * load_x(u32(k)); }}\n"
    )
    return (
        "  let plane = i / p.places; let at = plane / p.channels * p.places + i % p.places;\n"
        f"{_located(rank)}  var sum = 0.0;\n{_over_taps(rank, mode, inner)}  store_y(i, sum);\n"
    )


def backward(rank: int, mode: int, of_input: bool) -> str:
    """i is a place of a grid: the gradient of it is stored, that of the input (if asked for) added up."""
    axes = range(rank)
    weight = " * ".join(f"w{a}" for a in axes)
    slopes = "".join(f"      g{a} += value * d{a}{''.join(f' * w{b}' for b in axes if b != a)};\n" for a in axes)
    inner = (
        "    for (var c = 0u; c < p.channels; c++) {\n      let plane = n * p.channels + c;\n"
        f"      let k = index_of(plane, {', '.join(f't{a}' for a in axes)});\n"
        "      if (k < 0) { break; }\n      let gradient = load_g(plane * p.places + place);\n"
        + (f"      add_gx(u32(k), gradient * {weight});\n" if of_input else "")
        + ("" if mode == NEAREST else f"      let value = gradient * load_x(u32(k));\n{slopes}")
        + "    }\n"
    )
    stored = "".join(f"  store_gg(i * {rank}u + {rank - 1 - a}u, g{a} * stretch(s{a}));\n" for a in axes)
    return (
        "  let at = i; let n = i / p.places; let place = i % p.places;\n"
        f"{_located(rank)}{''.join(f'  var g{a} = 0.0;' for a in axes)}\n{_over_taps(rank, mode, inner)}{stored}"
    )
