"""Convolutions as matrix products whose operands are computed on load: no im2col buffer.

All are written for three spatial dimensions; one and two are the same with ones. A batch of the product is a group.

    gather    the plain convolution:
              C[o, (image, place)] = sum over (c, tap) of weight[o, c, tap] * x[image, c, place * s + tap * d - p]
    scatter   the transposed convolution, and the gradient of the input, written as a gather: the taps that reach a place
    weight    the gradient of the weight:
              C[o, (c, tap)] = sum over (image, place) of g[image, o, place] * x[image, c, place * s + tap * d - p]

Kernel size, stride, padding and dilation are written into the shader, which makes dividing by them cheap; sizes are
parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from anytorch.gpu.wgsl.matmul import SCHEDULE_PARAMETERS, Problem, load_four
from anytorch.gpu.wgsl.types import KINDS, load, stored

Triple = tuple[int, int, int]

CONVOLUTION_PARAMETERS = (
    *[f"{name}: u32" for name in SCHEDULE_PARAMETERS],
    "channels: u32",  # of x per group
    "xd: u32",  # spatial size of x, the side that is read with an offset
    "xh: u32",
    "xw: u32",
    "od: u32",  # spatial size of the other side
    "oh: u32",
    "ow: u32",
    "x_image: u32",  # strides of x
    "x_channel: u32",
    "x_place: u32",
    "o_image: u32",  # strides of the other side: of the result, or of g
    "o_channel: u32",
    "o_place: u32",
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


def convolution(spec: Convolution) -> Problem:
    functions = {"gather": _gather, "scatter": _scatter, "weight": _weight}[spec.kind](spec)
    storage = KINDS[spec.dtype].storage
    a = storage
    if spec.a_vector:
        a = "vec2<u32>" if spec.dtype == "bfloat16" else f"vec4<{storage}>"
    bindings = [a, storage]
    if spec.bias and not spec.split:
        bindings.append(storage)
    bindings.append(KINDS[spec.output].storage)
    return Problem(
        tuple(bindings),
        CONVOLUTION_PARAMETERS,
        functions + _store(spec),
        (spec.dtype, spec.output),
        KINDS[spec.dtype].compute,
        a_along="k",
        b_along="k" if spec.kind == "weight" else "n",
        a_vector=spec.a_vector,
    )


def _taps(spec: Convolution, name: str) -> str:
    """Statements that set tz, ty, tx from the tap `name`."""
    _, h, w = spec.kernel
    return f"let tx = i32({name} % {w}u); let ty = i32(({name} / {w}u) % {h}u); let tz = i32({name} / {h * w}u);"


def _places(name: str) -> str:
    """Statements that set oz, oy, ox from the place `name` on the other side."""
    return f"let ox = i32({name} % p.ow); let oy = i32(({name} / p.ow) % p.oh); let oz = i32({name} / (p.oh * p.ow));"


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


def _offset(spec: Convolution) -> str:
    axes = zip("zyx", spec.stride, spec.dilation, spec.padding, strict=True)
    return ", ".join(f"o{axis} * {s} + t{axis} * {d} - {p}" for axis, s, d, p in axes)


def _gather(spec: Convolution) -> str:
    kind = KINDS[spec.dtype].compute
    taps = spec.kernel[0] * spec.kernel[1] * spec.kernel[2]
    at = "let i = p.a_at + (batch * p.m + m) * p.k + k;"
    if spec.a_vector:
        four = load_four(spec.dtype, "a", "i")
        weight = (
            f"fn load_a4(batch: u32, m: u32, k: u32) -> vec4<{kind}> {{ {at} return {four}; }}\n"
            f"fn load_a(batch: u32, m: u32, k: u32) -> {kind} {{ {at} return {four}[i % 4u]; }}\n"
        )
    else:
        weight = f"fn load_a(batch: u32, m: u32, k: u32) -> {kind} {{ {at} return {load(spec.dtype, 'a', 'i')}; }}\n"
    if taps == 1 and spec.stride == (1, 1, 1) and spec.padding == (0, 0, 0):  # places are the input's own
        return (
            f"{weight}fn load_b(batch: u32, k: u32, n: u32) -> {kind} {{\n"
            "  let places = p.od * p.oh * p.ow; let channel = batch * p.channels + k;\n"
            "  let i = p.b_at + (n / places) * p.x_image + channel * p.x_channel + (n % places) * p.x_place;\n"
            f"  return {load(spec.dtype, 'b', 'i')};\n}}\n"
        )
    return (
        f"{_read(spec)}{weight}"
        f"fn load_b(batch: u32, k: u32, n: u32) -> {kind} {{\n"
        "  let places = p.od * p.oh * p.ow; let image = n / places; let place = n % places;\n"
        f"  let channel = batch * p.channels + k / {taps}u; let tap = k % {taps}u;\n"
        f"  {_taps(spec, 'tap')} {_places('place')}\n"
        f"  return x_at(image, channel, {_offset(spec)});\n}}\n"
    )


def _scatter(spec: Convolution) -> str:
    kind = KINDS[spec.dtype].compute
    taps = spec.kernel[0] * spec.kernel[1] * spec.kernel[2]
    steps = []
    for axis, s, d, p in zip("zyx", spec.stride, spec.dilation, spec.padding, strict=True):
        steps.append(f"  let s{axis} = o{axis} + {p} - t{axis} * {d};\n")
        steps.append(f"  if (s{axis} < 0 || s{axis} % {s} != 0) {{ return {kind}(0); }}\n")
    sources = ", ".join(f"s{axis} / {s}" for axis, s in zip("zyx", spec.stride, strict=True))
    return (
        f"{_read(spec)}"
        f"fn load_a(batch: u32, m: u32, k: u32) -> {kind} {{\n"
        f"  let i = p.a_at + ((batch * p.channels + k / {taps}u) * p.m + m) * {taps}u + k % {taps}u;\n"
        f"  return {load(spec.dtype, 'a', 'i')};\n}}\n"
        f"fn load_b(batch: u32, k: u32, n: u32) -> {kind} {{\n"
        "  let places = p.od * p.oh * p.ow; let image = n / places; let place = n % places;\n"
        f"  let channel = batch * p.channels + k / {taps}u; let tap = k % {taps}u;\n"
        f"  {_taps(spec, 'tap')} {_places('place')}\n{''.join(steps)}"
        f"  return x_at(image, channel, {sources});\n}}\n"
    )


def _weight(spec: Convolution) -> str:
    kind = KINDS[spec.dtype].compute
    taps = spec.kernel[0] * spec.kernel[1] * spec.kernel[2]
    return (
        f"{_read(spec)}"
        f"fn load_a(batch: u32, m: u32, k: u32) -> {kind} {{\n"
        "  let places = p.od * p.oh * p.ow;\n"
        "  let i = p.a_at + (k / places) * p.o_image + (batch * p.m + m) * p.o_channel + (k % places) * p.o_place;\n"
        f"  return {load(spec.dtype, 'a', 'i')};\n}}\n"
        f"fn load_b(batch: u32, k: u32, n: u32) -> {kind} {{\n"
        "  let places = p.od * p.oh * p.ow; let image = k / places; let place = k % places;\n"
        f"  let channel = batch * p.channels + n / {taps}u; let tap = n % {taps}u;\n"
        f"  {_taps(spec, 'tap')} {_places('place')}\n"
        f"  return x_at(image, channel, {_offset(spec)});\n}}\n"
    )


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
