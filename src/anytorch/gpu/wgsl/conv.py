"""Convolutions as matrix products whose operands are computed on load: no im2col buffer.

All are written for three spatial dimensions; one and two are the same with ones. A batch of the product is a group.

    gather    the plain convolution:
              C[o, (image, place)] = sum over (c, tap) of weight[o, c, tap] * x[image, c, place * s + tap * d - p]
    scatter   the transposed convolution, and the gradient of the input, written as a gather: the taps that reach a place
    weight    the gradient of the weight:
              C[o, (c, tap)] = sum over (image, place) of g[image, o, place] * x[image, c, place * s + tap * d - p]

Kernel size, stride, padding and dilation are written into the shader, which makes dividing by them cheap; sizes are
parameters.

A tiled gather whose channels fill whole tiles sums tap by tap (`by_taps`): a tile of B then lies at one tap, and each thread
works out once per tile where its column is and whether that is in the padding, instead of once per element.

A scatter with a stride can be taken apart (`by_phase`): places whose remainders by the stride are the same are reached by
the same taps, one of `stride` in each direction. Each such phase is a batch of the product with only those taps in its sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from anytorch.gpu.wgsl.matmul import SCHEDULE_PARAMETERS, Problem, load_functions
from anytorch.gpu.wgsl.types import KINDS, element, load, load_four, stored, stored_four

Triple = tuple[int, int, int]

A_ARGUMENTS = "batch: u32, m: u32, k: u32"

CONVOLUTION_PARAMETERS = (
    *SCHEDULE_PARAMETERS,
    "channels",  # of x per group
    *("xd", "xh", "xw"),  # spatial size of x, the side that is read with an offset
    *("od", "oh", "ow"),  # spatial size of the other side
    *("x_image", "x_channel", "x_place"),  # strides of x
    *("o_image", "o_channel", "o_place"),  # strides of the other side: of the result, or of g
)


@dataclass(frozen=True)
class Convolution:
    kind: str  # "gather", "scatter", "weight"
    dtype: str
    output: str
    kernel: Triple
    stride: Triple
    padding: Triple
    dilation: Triple
    bias: bool = False
    a_vector: bool = False  # gather only: rows of the weight are whole vec4s
    split: bool = False
    by_taps: bool = False  # k is tap * channels + channel, in the weight too; a tile of k has one tap
    b_vector: bool = False  # by_taps only: columns are read in whole vec4s (places are the input's own)
    columns: bool = False  # tiled: where a column is stored is worked out once
    c_vector: bool = False  # columns only: and written in whole vec4s
    by_phase: bool = False  # scatter only, not split: a batch is a group's phase, n its places, k its channels and taps


def convolution(spec: Convolution) -> Problem:
    functions = (
        _by_taps(spec)
        if spec.by_taps
        else _by_phase(spec)
        if spec.by_phase
        else {"gather": _gather, "scatter": _scatter, "weight": _weight}[spec.kind](spec)
    )
    storage = KINDS[spec.dtype].storage
    bias = (storage,) if spec.bias and not spec.split else ()
    return Problem(
        (
            element(spec.dtype, spec.a_vector),
            element(spec.dtype, spec.b_vector),
            *bias,
            element(spec.output, spec.c_vector),
        ),
        CONVOLUTION_PARAMETERS,
        functions + (_store_columns(spec) if spec.columns else _store_phase(spec) if spec.by_phase else _store(spec)),
        (spec.dtype, spec.output),
        KINDS[spec.dtype].compute,
        a_along="k",
        b_along="k" if spec.kind == "weight" else "n",
        a_vector=spec.a_vector,
        b_vector=spec.b_vector,
        column_b=spec.by_taps,
        column_c=spec.columns,
    )


def _read(spec: Convolution) -> str:
    """x at a place that may lie in the padding."""
    kind = KINDS[spec.dtype].compute
    return (
        f"fn x_at(image: u32, channel: u32, z: i32, y: i32, x: i32) -> {kind} {{\n"
        "  if (z < 0 || y < 0 || x < 0 || z >= i32(p.xd) || y >= i32(p.xh) || x >= i32(p.xw)) "
        f"{{ return {kind}(0); }}\n"
        "  let place = (u32(z) * p.xh + u32(y)) * p.xw + u32(x);\n"
        "  let i = p.b_at + image * p.x_image + channel * p.x_channel + place * p.x_place;\n"
        f"  return {load(spec.dtype, 'b', 'i')};\n}}\n"
    )


def _load_b(spec: Convolution, where: str, what: str, steps: str = "", source: str = "") -> str:
    """x at image and place `where`, channel and tap `what`; `source` is its place as z, y, x if `steps` have found it."""
    axes = zip("zyx", spec.stride, spec.dilation, spec.padding, strict=True)
    offset = ", ".join(f"o{axis} * {s} + t{axis} * {d} - {p}" for axis, s, d, p in axes)
    taps, (_, h, w) = prod(spec.kernel), spec.kernel
    return (
        f"fn load_b(batch: u32, k: u32, n: u32) -> {KINDS[spec.dtype].compute} {{\n"
        f"  let places = p.od * p.oh * p.ow; let image = {where} / places; let place = {where} % places;\n"
        f"  let channel = batch * p.channels + {what} / {taps}u; let tap = {what} % {taps}u;\n"
        f"  let tx = i32(tap % {w}u); let ty = i32((tap / {w}u) % {h}u); let tz = i32(tap / {h * w}u); "
        "let ox = i32(place % p.ow); let oy = i32((place / p.ow) % p.oh); let oz = i32(place / (p.oh * p.ow));\n"
        f"{steps}"
        f"  return x_at(image, channel, {source or offset});\n}}\n"
    )


def _gather(spec: Convolution) -> str:
    at = "p.a_at + (batch * p.m + m) * p.k + k"
    weight = load_functions("a", spec.dtype, spec.a_vector, A_ARGUMENTS, at)
    if spec.kernel == spec.stride == (1, 1, 1) and spec.padding == (0, 0, 0):  # places are the input's own
        return (
            f"{weight}fn load_b(batch: u32, k: u32, n: u32) -> {KINDS[spec.dtype].compute} {{\n"
            "  let places = p.od * p.oh * p.ow; let channel = batch * p.channels + k;\n"
            "  let i = p.b_at + (n / places) * p.x_image + channel * p.x_channel + (n % places) * p.x_place;\n"
            f"  return {load(spec.dtype, 'b', 'i')};\n}}\n"
        )
    return f"{_read(spec)}{weight}{_load_b(spec, 'n', 'k')}"


def _by_taps(spec: Convolution) -> str:
    """A gather with k = tap * channels + channel: what depends on the column, and on the tap, is worked out beforehand."""
    kind, (_, h, w) = KINDS[spec.dtype].compute, spec.kernel
    weight = load_functions("a", spec.dtype, spec.a_vector, A_ARGUMENTS, "p.a_at + (batch * p.m + m) * p.k + k")
    axes = list(zip("zyx", spec.stride, spec.dilation, spec.padding, strict=True))
    places = {"z": "place / (p.oh * p.ow)", "y": "(place / p.ow) % p.oh", "x": "place % p.ow"}
    taps = {"z": f"tap / {h * w}u", "y": f"(tap / {w}u) % {h}u", "x": f"tap % {w}u"}
    lines = [
        "var<private> b_image: u32; var<private> b_first: u32; var<private> b_base: u32; var<private> b_inside: bool;\n",
        *[f"var<private> b_{axis}: i32;\n" for axis in "zyx"],
        "fn start_b(batch: u32, n: u32) {\n"
        "  let places = p.od * p.oh * p.ow; let image = n / places; let place = n % places;\n"
        "  b_image = p.b_at + image * p.x_image + batch * p.channels * p.x_channel;\n",
        *[f"  b_{axis} = i32({places[axis]}) * {s} - {p};\n" for axis, s, _, p in axes],
        "}\nfn begin_b(k: u32) {\n  let tap = k / p.channels; b_first = tap * p.channels;\n",
        *[f"  let {axis} = b_{axis} + i32({taps[axis]}) * {d};\n" for axis, _, d, _ in axes],
        "  b_inside = z >= 0 && y >= 0 && x >= 0 && z < i32(p.xd) && y < i32(p.xh) && x < i32(p.xw);\n"
        "  b_base = b_image + ((u32(z) * p.xh + u32(y)) * p.xw + u32(x)) * p.x_place;\n}\n",
    ]
    name, value = ("load_b4", f"vec4<{kind}>") if spec.b_vector else ("load_b", kind)
    read = load_four(spec.dtype, "b", "i") if spec.b_vector else load(spec.dtype, "b", "i")
    lines.append(
        f"fn {name}(batch: u32, k: u32, n: u32) -> {value} {{\n  if (!b_inside) {{ return {value}(); }}\n"
        f"  let i = b_base + (k - b_first) * p.x_channel; return {read};\n}}\n"
    )
    return weight + "".join(lines)


def _store_columns(spec: Convolution) -> str:
    """start_c gives where a column is stored, and how many from it on are in the same image; store4_at writes there."""
    kind = KINDS[spec.dtype].compute
    value = f"value + vec4<{kind}>({load(spec.dtype, 'd', '(p.d_at + batch * p.m + m)')})" if spec.bias else "value"
    if spec.c_vector:
        writes = f"c[(at.x + m * p.o_channel) / 4u] = {stored_four(spec.output, 'v')};"
    else:
        writes = "let first = at.x + m * p.o_channel; let places = p.od * p.oh * p.ow; " + " ".join(
            f"if (n + {j}u < p.n) {{ c[select(first + {j}u * p.o_place, "
            f"first + p.o_image - (places - {j}u) * p.o_place, at.y <= {j}u)] = {stored(spec.output, f'v.{axis}')}; }}"
            for j, axis in enumerate("xyzw")
        )
    return (
        "fn start_c(batch: u32, n: u32) -> vec2<u32> {\n"
        "  let places = p.od * p.oh * p.ow; let image = n / places; let place = n % places;\n"
        "  let at = p.c_at + image * p.o_image + batch * p.m * p.o_channel + place * p.o_place;\n"
        "  return vec2<u32>(at, places - place);\n}\n"
        f"fn store4_at(batch: u32, m: u32, n: u32, at: vec2<u32>, value: vec4<{kind}>) {{ "
        f"if (n >= p.n) {{ return; }} let v = {value}; {writes} }}\n"
    )


def _scatter(spec: Convolution) -> str:
    kind, taps = KINDS[spec.dtype].compute, prod(spec.kernel)
    steps = "".join(
        f"  let s{axis} = o{axis} + {p} - t{axis} * {d};\n"
        f"  if (s{axis} < 0 || s{axis} % {s} != 0) {{ return {kind}(0); }}\n"
        for axis, s, d, p in zip("zyx", spec.stride, spec.dilation, spec.padding, strict=True)
    )
    sources = ", ".join(f"s{axis} / {s}" for axis, s in zip("zyx", spec.stride, strict=True))
    at = f"p.a_at + ((batch * p.channels + k / {taps}u) * p.m + m) * {taps}u + k % {taps}u"
    weight = load_functions("a", spec.dtype, False, A_ARGUMENTS, at)
    return f"{_read(spec)}{weight}{_load_b(spec, 'n', 'k', steps, sources)}"


def has_phases(kernel: Triple, stride: Triple, dilation: Triple) -> bool:
    """Whether there is more than one phase, each reached by fewer taps than the kernel has."""
    strided = [(k, d) for k, s, d in zip(kernel, stride, dilation, strict=True) if s > 1]
    return any(k > 1 for k, _ in strided) and all(d == 1 for _, d in strided)


def phase_taps(kernel: Triple, stride: Triple) -> Triple:
    """The taps of a phase in each direction, as many in all: the last may lie beyond the kernel."""
    z, y, x = (-(-k // s) for k, s in zip(kernel, stride, strict=True))
    return z, y, x


def phase_sizes(size: Triple, stride: Triple) -> Triple:
    """The places of a phase in each direction, as many in all: the last may lie beyond the result."""
    return phase_taps(size, stride)


def _phase(spec: Convolution) -> str:
    """`group`, the phase rz, ry, rx of a batch, and its places in each direction."""
    z, y, x = spec.stride
    return (
        f"  let group = batch / {z * y * x}u; let phase = batch % {z * y * x}u;\n"
        f"  let rx = phase % {x}u; let ry = (phase / {x}u) % {y}u; let rz = phase / {x * y}u;\n"
        f"  let qd = (p.od + {z - 1}u) / {z}u; let qh = (p.oh + {y - 1}u) / {y}u; let qw = (p.ow + {x - 1}u) / {x}u;\n"
        "  let places = qd * qh * qw;\n"
    )


def _by_phase(spec: Convolution) -> str:
    kind, reach, (kd, kh, kw) = KINDS[spec.dtype].compute, phase_taps(spec.kernel, spec.stride), spec.kernel
    axes = list(zip("zyx", spec.stride, spec.padding, spec.dilation, strict=True))
    tap = (
        f"  let channel = group * p.channels + k / {prod(reach)}u; let step = k % {prod(reach)}u;\n"
        f"  let jx = step % {reach[2]}u; let jy = (step / {reach[2]}u) % {reach[1]}u;\n"
        f"  let jz = step / {reach[1] * reach[2]}u;\n"
        + "".join(f"  let t{axis} = (r{axis} + {p}u) % {s}u + j{axis} * {s}u;\n" for axis, s, p, _ in axes)
        + f"  if (tz >= {kd}u || ty >= {kh}u || tx >= {kw}u) {{ return {kind}(0); }}\n"
    )
    sources = ", ".join(f"i32(q{axis} + (r{axis} + {p}u) / {s}u) - i32(j{axis} * {d}u)" for axis, s, p, d in axes)
    return (
        f"{_read(spec)}fn load_a({A_ARGUMENTS}) -> {kind} {{\n{_phase(spec)}{tap}"
        f"  let i = p.a_at + (channel * p.m + m) * {kd * kh * kw}u + (tz * {kh}u + ty) * {kw}u + tx;\n"
        f"  return {load(spec.dtype, 'a', 'i')};\n}}\n"
        f"fn load_b(batch: u32, k: u32, n: u32) -> {kind} {{\n{_phase(spec)}{tap}"
        "  let image = n / places; let place = n % places;\n"
        "  let qx = place % qw; let qy = (place / qw) % qh; let qz = place / (qw * qh);\n"
        f"  return x_at(image, channel, {sources});\n}}\n"
    )


def _store_phase(spec: Convolution) -> str:
    kind, (z, y, x) = KINDS[spec.dtype].compute, spec.stride
    value = "value"
    if spec.bias:
        value = f"value + vec4<{kind}>({load(spec.dtype, 'd', '(p.d_at + group * p.m + m)')})"
    return (
        f"fn store4(batch: u32, part: u32, m: u32, n: u32, value: vec4<{kind}>) {{\n{_phase(spec)}  var v = {value};\n"
        "  for (var j = 0u; j < 4u; j++) {\n    let place = (n + j) % places;\n"
        f"    let ox = (place % qw) * {x}u + rx; let oy = ((place / qw) % qh) * {y}u + ry;\n"
        f"    let oz = (place / (qw * qh)) * {z}u + rz;\n"
        "    if (n + j < p.n && oz < p.od && oy < p.oh && ox < p.ow) {\n"
        "      let at = p.c_at + ((n + j) / places) * p.o_image + (group * p.m + m) * p.o_channel;\n"
        f"      c[at + ((oz * p.oh + oy) * p.ow + ox) * p.o_place] = {stored(spec.output, 'v[j]')};\n"
        "    }\n  }\n}\n"
    )


def _weight(spec: Convolution) -> str:
    places = "(p.od * p.oh * p.ow)"
    at = f"p.a_at + (k / {places}) * p.o_image + (batch * p.m + m) * p.o_channel + (k % {places}) * p.o_place"
    return f"{_read(spec)}{load_functions('a', spec.dtype, False, A_ARGUMENTS, at)}{_load_b(spec, 'k', 'n')}"


def _store(spec: Convolution) -> str:
    kind = KINDS[spec.dtype].compute
    if spec.split:  # parts of [groups, splits, m, n]
        at = "p.c_at + ((batch * p.splits + part) * p.m + m) * p.n + n + {j}u"
    elif spec.kind == "weight":
        at = "p.c_at + (batch * p.m + m) * p.n + n + {j}u"
    else:
        at = (
            "p.c_at + ((n + {j}u) / places) * p.o_image + (batch * p.m + m) * p.o_channel "
            "+ ((n + {j}u) % places) * p.o_place"
        )
    value = "value"
    if spec.bias and not spec.split:
        value = f"value + vec4<{kind}>({load(spec.dtype, 'd', '(p.d_at + batch * p.m + m)')})"
    writes = " ".join(
        f"if (n + {j}u < p.n) {{ c[{at.replace('{j}', str(j))}] = {stored(spec.output, f'v.{axis}')}; }}"
        for j, axis in enumerate("xyzw")
    )
    return (
        f"fn store4(batch: u32, part: u32, m: u32, n: u32, value: vec4<{kind}>) {{ "
        f"if (n >= p.n) {{ return; }} let places = p.od * p.oh * p.ow; let v = {value}; {writes} }}\n"
    )
