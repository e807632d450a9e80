"""Pooling: windows of up to three dimensions, of fixed or adaptive size. Bodies for `wgsl.per_element`.

Backward passes are gathers too: each element of the input adds up what the windows that contain it hand back, so no atomics.
Sizes and strides are parameters; the window is written into the shader.
"""

from __future__ import annotations

from dataclasses import dataclass

Triple = tuple[int, int, int]

AXES = "dhw"
SIZES = tuple(f"{side}{axis}" for side in "xy" for axis in AXES)  # of the input x and the result y
STRIDES = tuple(f"{side}s{part}" for side in "xy" for part in ("n", "c", *AXES))


@dataclass(frozen=True)
class Window:
    """Fixed windows have a size, stride, padding and dilation; adaptive ones follow from the sizes."""

    adaptive: bool = False
    kernel: Triple = (1, 1, 1)
    stride: Triple = (1, 1, 1)
    padding: Triple = (0, 0, 0)
    dilation: Triple = (1, 1, 1)
    include_padding: bool = True
    divisor: int = 0  # 0: the number of elements


def _locate(side: str) -> str:
    """Set n, c and the place pd, ph, pw of element i of a tensor with the sizes of `side`."""
    return (
        f"  var rest = i; let pw = i32(rest % p.{side}w); rest /= p.{side}w; let ph = i32(rest % p.{side}h); "
        f"rest /= p.{side}h; let pd = i32(rest % p.{side}d); rest /= p.{side}d;\n"
        "  let c = rest % p.channels; let n = rest / p.channels;\n"
    )


def _at(side: str, d: str, h: str, w: str) -> str:
    places = f"u32({d}) * p.{side}sd + u32({h}) * p.{side}sh + u32({w}) * p.{side}sw"
    return f"n * p.{side}sn + c * p.{side}sc + {places}"


def _window(window: Window, place: str) -> str:
    """Set from, to (exclusive) on each axis for the window at result places `place`d, `place`h, `place`w."""
    lines = []
    for i, axis in enumerate(AXES):
        o = f"{place}{axis}"
        if window.adaptive:
            lines.append(
                f"  let from{axis} = ({o} * i32(p.x{axis})) / i32(p.y{axis});\n"
                f"  let to{axis} = (({o} + 1) * i32(p.x{axis}) + i32(p.y{axis}) - 1) / i32(p.y{axis});\n"
            )
        else:
            first = f"{o} * {window.stride[i]} - {window.padding[i]}"
            lines.append(
                f"  let from{axis} = {first};\n"
                f"  let to{axis} = from{axis} + {(window.kernel[i] - 1) * window.dilation[i] + 1};\n"
            )
    return "".join(lines)


def _visit(window: Window, inner: str) -> str:
    """Run `inner` for every element d, h, w of the window that lies in the input."""
    lines = []
    for i, axis in enumerate(AXES):
        step = 1 if window.adaptive else window.dilation[i]
        lines.append(
            f"  for (var {axis} = from{axis}; {axis} < to{axis}; {axis} += {step}) {{\n"
            f"  if ({axis} < 0 || {axis} >= i32(p.x{axis})) {{ continue; }}\n"
        )
    return "".join(lines) + inner + "  }}}\n"


def _divisor(window: Window) -> str:
    """Set `divisor` from from* and to*: how many elements an average is over."""
    if window.divisor:
        return f"  let divisor = {float(window.divisor)};\n"
    lines = []
    for i, axis in enumerate(AXES):
        if window.adaptive:
            lines.append(f"  let many{axis} = to{axis} - from{axis};\n")
        elif window.include_padding:
            lines.append(f"  let many{axis} = min(to{axis}, i32(p.x{axis}) + {window.padding[i]}) - from{axis};\n")
        else:
            lines.append(f"  let many{axis} = min(to{axis}, i32(p.x{axis})) - max(from{axis}, 0);\n")
    return "".join(lines) + "  let divisor = f32(manyd * manyh * manyw);\n"


def maximum(window: Window, kind: str, index: str) -> str:
    """y and where it was found. `kind` is the compute type of x, `index` of the indices. A NaN wins."""
    better = "v > best || is_nan(v)" if kind == "f32" else "v > best"
    inner = (
        f"    let v = load_x({_at('x', 'd', 'h', 'w')});\n"
        f"    if (!found || {better}) "
        "{ best = v; found = true; where_found = (d * i32(p.xh) + h) * i32(p.xw) + w; }\n"
    )
    return (
        f"{_locate('y')}{_window(window, 'p')}"
        f"  var best = {kind}(0); var found = false; var where_found = 0;\n{_visit(window, inner)}"
        f"  let at = {_at('y', 'pd', 'ph', 'pw')};\n"
        f"  store_y(at, best); store_index(at, {index}(where_found));\n"
    )


def average(window: Window) -> str:
    inner = f"    sum += load_x({_at('x', 'd', 'h', 'w')});\n"
    return (
        f"{_locate('y')}{_window(window, 'p')}{_divisor(window)}  var sum = 0.0;\n{_visit(window, inner)}"
        f"  store_y({_at('y', 'pd', 'ph', 'pw')}, sum / divisor);\n"
    )


def _windows_round(window: Window, inner: str) -> str:
    """Run `inner` for every window od, oh, ow that may contain the input's place pd, ph, pw."""
    lines = []
    for i, axis in enumerate(AXES):
        if window.adaptive:
            first = f"(p{axis} * i32(p.y{axis})) / i32(p.x{axis})"
            last = f"((p{axis} + 1) * i32(p.y{axis}) + i32(p.x{axis}) - 1) / i32(p.x{axis}) - 1"
        else:
            reach, s, pad = (window.kernel[i] - 1) * window.dilation[i], window.stride[i], window.padding[i]
            first = f"max(p{axis} + {pad - reach} + {s - 1}, 0) / {s}"
            last = f"(p{axis} + {pad}) / {s}"
        lines.append(f"  for (var o{axis} = {first}; o{axis} <= min({last}, i32(p.y{axis}) - 1); o{axis}++) {{\n")
    return "".join(lines) + inner + "  }}}\n"


def maximum_backward(window: Window) -> str:
    """Outputs are g (laid out like y) and index; the result has the layout of x."""
    inner = (
        f"    let at = {_at('y', 'od', 'oh', 'ow')};\n    if (i32(load_index(at)) == here) {{ sum += load_g(at); }}\n"
    )
    return (
        f"{_locate('x')}  let here = (pd * i32(p.xh) + ph) * i32(p.xw) + pw;\n  var sum = 0.0;\n"
        f"{_windows_round(window, inner)}  store_x({_at('x', 'pd', 'ph', 'pw')}, sum);\n"
    )


def average_backward(window: Window) -> str:
    inside = " && ".join(f"p{axis} >= from{axis} && p{axis} < to{axis}" for axis in AXES)
    inner = (
        f"{_window(window, 'o')}{_divisor(window)}"
        f"    if ({inside}) {{ sum += load_g({_at('y', 'od', 'oh', 'ow')}) / divisor; }}\n"
    )
    return (
        f"{_locate('x')}  var sum = 0.0;\n{_windows_round(window, inner)}"
        f"  store_x({_at('x', 'pd', 'ph', 'pw')}, sum);\n"
    )
