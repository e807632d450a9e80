"""Resampling and padding: every element of the result is a weighted sum of a few elements of the input.

Along one axis that is a list of (place, weight) pairs; across axes the weights multiply. The backward pass walks the places
of the result that can reach an element and adds up what they hand back: a gather, so no atomics. For `wgsl.per_element`.
"""

from __future__ import annotations

REACH = {"nearest": 1, "exact": 1, "linear": 1, "cubic": 2}
# Keys' cubic with a = -0.75, of the distance x; the end of a function.
CUBIC = """  if (x <= 1.0) { return (1.25 * x - 2.25) * x * x + 1.0; }
  return ((-0.75 * x + 3.75) * x - 6.0) * x + 3.0;
}
"""
TAPS = {"nearest": 1, "exact": 1, "linear": 2, "cubic": 4}


def sizes(rank: int) -> tuple[str, ...]:
    """Parameters: sizes of x and y from the first axis to the last, strides of both (plane first), then scales."""
    names = [f"{side}{axis}: u32" for side in "xy" for axis in range(rank)]
    return (*names, *[f"scale{axis}: f32" for axis in range(rank)])


def interpolation(mode: str, align_corners: bool) -> str:
    """fn place(o, t, n, scale) and fn weight(o, t, n, scale): the t-th place on an axis of n that result place o reads."""
    if mode in ("nearest", "exact"):
        source = "(f32(o) + 0.5) * scale" if mode == "exact" else "f32(o) * scale"
        return (
            f"fn place(o: i32, t: i32, n: i32, scale: f32) -> i32 {{ return min(i32(floor({source})), n - 1); }}\n"
            "fn weight(o: i32, t: i32, n: i32, scale: f32) -> f32 { return 1.0; }\n"
        )
    real = "f32(o) * scale" if align_corners else "(f32(o) + 0.5) * scale - 0.5"
    if mode == "linear":
        source = real if align_corners else f"max({real}, 0.0)"
        return (
            f"fn source(o: i32, scale: f32) -> f32 {{ return {source}; }}\n"
            "fn place(o: i32, t: i32, n: i32, scale: f32) -> i32 "
            "{ return min(min(i32(floor(source(o, scale))), n - 1) + t, n - 1); }\n"
            "fn weight(o: i32, t: i32, n: i32, scale: f32) -> f32 {\n"
            "  let s = source(o, scale); let f = clamp(s - f32(min(i32(floor(s)), n - 1)), 0.0, 1.0);\n"
            "  return select(1.0 - f, f, t == 1);\n}\n"
        )
    return (
        f"fn source(o: i32, scale: f32) -> f32 {{ return {real}; }}\n"
        "fn place(o: i32, t: i32, n: i32, scale: f32) -> i32 "
        "{ return clamp(i32(floor(source(o, scale))) - 1 + t, 0, n - 1); }\n"
        "fn weight(o: i32, t: i32, n: i32, scale: f32) -> f32 {\n"
        "  let s = source(o, scale); let f = s - floor(s);\n"
        f"  let x = abs(f + 1.0 - f32(t));\n{CUBIC}"
    )


def _locate(side: str, rank: int) -> str:
    """Set plane and the place g0, g1, … of element i, which is contiguous, in a tensor with the sizes of `side`."""
    lines = ["  var rest = i;\n"]
    for axis in range(rank - 1, -1, -1):
        lines.append(f"  let g{axis} = i32(rest % p.{side}{axis}); rest /= p.{side}{axis};\n")
    return "".join(lines) + "  let plane = rest;\n"


def _index(side: str, rank: int, place: str) -> str:
    """The index of `place`0, `place`1, … in such a tensor."""
    at = "plane"
    for axis in range(rank):
        at = f"({at} * p.{side}{axis} + u32({place}{axis}))"
    return at


def _added(rank: int, source: str, target: str, place: str, weights: str = "") -> str:
    """The inside of `rank` loops that add up, and what follows them."""
    other = "x" if target == "y" else "y"
    return (
        f"    sum += {weights}load_{source}({_index(other, rank, place)});\n"
        f"  {'}' * rank}\n  store_{target}({_index(target, rank, 'g')}, sum);\n"
    )


def forward(mode: str, rank: int) -> str:
    lines = [_locate("y", rank), "  var sum = 0.0;\n"]
    for axis in range(rank):
        call = f"(g{axis}, t{axis}, i32(p.x{axis}), p.scale{axis})"
        lines.append(
            f"  for (var t{axis} = 0; t{axis} < {TAPS[mode]}; t{axis}++) "
            f"{{ let s{axis} = place{call}; let w{axis} = weight{call};\n"
        )
    weights = " * ".join(f"w{axis}" for axis in range(rank))
    return "".join(lines) + _added(rank, "x", "y", "s", f"{weights} * ")


def backward(mode: str, rank: int) -> str:
    """g has the sizes of y; the result those of x."""
    reach = REACH[mode]
    lines = [_locate("x", rank), "  var sum = 0.0;\n"]
    for axis in range(rank):
        lines.append(
            f"  var from{axis} = 0; var to{axis} = i32(p.y{axis}) - 1;\n"
            f"  if (p.scale{axis} > 0.0) {{\n"
            f"    if (g{axis} > 0) {{ from{axis} = max(i32(floor((f32(g{axis}) - {reach}.5) / p.scale{axis})) - 2, 0); }}\n"
            f"    if (g{axis} < i32(p.x{axis}) - 1) "
            f"{{ to{axis} = min(i32(ceil((f32(g{axis}) + {reach}.5) / p.scale{axis})) + 2, to{axis}); }}\n  }}\n"
        )
    for axis in range(rank):
        call = f"(o{axis}, t, i32(p.x{axis}), p.scale{axis})"
        lines.append(
            f"  for (var o{axis} = from{axis}; o{axis} <= to{axis}; o{axis}++) {{\n  var w{axis} = 0.0;\n"
            f"  for (var t = 0; t < {TAPS[mode]}; t++) "
            f"{{ if (place{call} == g{axis}) {{ w{axis} += weight{call}; }} }}\n"
            f"  if (w{axis} == 0.0) {{ continue; }}\n"
        )
    weights = " * ".join(f"w{axis}" for axis in range(rank))
    return "".join(lines) + _added(rank, "g", "x", "o", f"{weights} * ")


# --- padding -------------------------------------------------------------------------------------------------------


def padding_source(mode: str) -> str:
    """fn place(o, n, left): where on an axis of n the result's place o is read."""
    if mode == "replication":
        body = "return clamp(o - left, 0, n - 1);"
    else:  # reflection: the border itself is not repeated
        body = "var s = abs(o - left); let last = n - 1; if (s > last) { s = 2 * last - s; } return s;"
    return f"fn place(o: i32, n: i32, left: i32) -> i32 {{ {body} }}\n"


def padding_parameters(rank: int) -> tuple[str, ...]:
    return (
        *[f"{side}{axis}: u32" for side in "xy" for axis in range(rank)],
        *[f"left{axis}: i32" for axis in range(rank)],
    )


def padding_forward(rank: int) -> str:
    lines = [_locate("y", rank)]
    lines += [f"  let s{axis} = place(g{axis}, i32(p.x{axis}), p.left{axis});\n" for axis in range(rank)]
    value = f"load_x({_index('x', rank, 's')})"
    return "".join(lines) + f"  store_y({_index('y', rank, 'g')}, {value});\n"


def padding_backward(mode: str, rank: int) -> str:
    """The places that read element g of an axis: a run of them (replication), or up to three mirror images."""
    lines = [_locate("x", rank), "  var sum = 0.0;\n"]
    for axis in range(rank):
        lines.append(f"  let n{axis} = i32(p.x{axis}); let last{axis} = i32(p.y{axis}) - 1;\n")
        if mode == "replication":
            lines.append(
                f"  let from{axis} = select(max(g{axis} + p.left{axis}, 0), 0, g{axis} == 0);\n"
                f"  let to{axis} = select(min(g{axis} + p.left{axis}, last{axis}), last{axis}, g{axis} == n{axis} - 1);\n"
            )
    for axis in range(rank):
        if mode == "replication":
            lines.append(f"  for (var o{axis} = from{axis}; o{axis} <= to{axis}; o{axis}++) {{\n")
            continue
        lines.append(
            f"  for (var m{axis} = 0; m{axis} < 3; m{axis}++) {{\n  var o{axis} = g{axis} + p.left{axis};\n"
            f"  if (m{axis} == 1) {{ if (g{axis} == 0) {{ continue; }} o{axis} = p.left{axis} - g{axis}; }}\n"
            f"  if (m{axis} == 2) {{ if (g{axis} == n{axis} - 1) {{ continue; }} "
            f"o{axis} = 2 * (n{axis} - 1) + p.left{axis} - g{axis}; }}\n"
            f"  if (o{axis} < 0 || o{axis} > last{axis}) {{ continue; }}\n"
        )
    return "".join(lines) + _added(rank, "g", "x", "o")


# --- unfolding -----------------------------------------------------------------------------------------------------

UNFOLD_PARAMETERS = ("xh: u32", "xw: u32", "yh: u32", "yw: u32")


def unfold(
    kernel: tuple[int, int], dilation: tuple[int, int], padding: tuple[int, int], stride: tuple[int, int]
) -> str:
    """im2col: y[plane, tap, place] from x[plane, h, w]."""
    taps = kernel[0] * kernel[1]
    return (
        "  let places = p.yh * p.yw; let place = i % places; "
        f"let tap = i32((i / places) % {taps}u); let plane = i / (places * {taps}u);\n"
        f"  let h = i32(place / p.yw) * {stride[0]} + (tap / {kernel[1]}) * {dilation[0]} - {padding[0]};\n"
        f"  let w = i32(place % p.yw) * {stride[1]} + (tap % {kernel[1]}) * {dilation[1]} - {padding[1]};\n"
        "  if (h < 0 || w < 0 || h >= i32(p.xh) || w >= i32(p.xw)) { store_y(i, 0.0); return; }\n"
        "  store_y(i, load_x((plane * p.xh + u32(h)) * p.xw + u32(w)));"
    )


def fold(kernel: tuple[int, int], dilation: tuple[int, int], padding: tuple[int, int], stride: tuple[int, int]) -> str:
    """col2im: x[plane, h, w] from y[plane, tap, place]."""
    taps = kernel[0] * kernel[1]
    return (
        "  let w = i32(i % p.xw); let h = i32((i / p.xw) % p.xh); let plane = i / (p.xw * p.xh);\n  var sum = 0.0;\n"
        f"  for (var tap = 0; tap < {taps}; tap++) {{\n"
        f"    let oh = h + {padding[0]} - (tap / {kernel[1]}) * {dilation[0]};\n"
        f"    let ow = w + {padding[1]} - (tap % {kernel[1]}) * {dilation[1]};\n"
        f"    if (oh < 0 || ow < 0 || oh % {stride[0]} != 0 || ow % {stride[1]} != 0) {{ continue; }}\n"
        f"    let y = u32(oh / {stride[0]}); let x = u32(ow / {stride[1]});\n"
        "    if (y >= p.yh || x >= p.yw) { continue; }\n"
        f"    sum += load_y(((plane * {taps}u + u32(tap)) * p.yh + y) * p.yw + x);\n  }}\n  store_x(i, sum);"
    )
