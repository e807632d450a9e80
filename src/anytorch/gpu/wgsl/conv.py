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
from math import prod

from anytorch.gpu.wgsl.matmul import SCHEDULE_PARAMETERS, Problem, load_functions
from anytorch.gpu.wgsl.types import KINDS, element, load, stored

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


def convolution(spec: Convolution) -> Problem:
    functions = {"gather": _gather, "scatter": _scatter, "weight": _weight}[spec.kind](spec)
    storage = KINDS[spec.dtype].storage
    bias = (storage,) if spec.bias and not spec.split else ()
    return Problem(
        (element(spec.dtype, spec.a_vector), storage, *bias, KINDS[spec.output].storage),
        CONVOLUTION_PARAMETERS,
        functions + _store(spec),
        (spec.dtype, spec.output),
        KINDS[spec.dtype].compute,
        a_along="k",
        b_along="k" if spec.kind == "weight" else "n",
        a_vector=spec.a_vector,
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
