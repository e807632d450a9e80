"""Normalisations: what they fold, and the kernel that scales a tensor by values of its channels."""

from __future__ import annotations

from dataclasses import dataclass

from anytorch.gpu.wgsl.reduce import MERGE_MOMENTS, MOMENTS, Reducer, add_moments, sums, thread_main
from anytorch.gpu.wgsl.rows import Twice
from anytorch.gpu.wgsl.softmax import RowRule
from anytorch.gpu.wgsl.types import KINDS, element, head, lane_bits, load, load_four, numbered, stored, stored_four

_ROW_MOMENTS = Reducer(MOMENTS, add_moments("x0"), MERGE_MOMENTS, ("s.mean", "inverseSqrt(s.m2 / n + p.s0)"))
# Welford's update divides for every element; with the elements at hand the mean comes first.
_MEAN_FIRST = Twice(
    "var total = 0.0; var count = 0.0;",
    "total += x0; count += 1.0;",
    "let middle = total / max(count, 1.0); var spread = 0.0;",
    "let d = x0 - middle; spread += d * d;",
    "s.n = count; s.mean = middle; s.m2 = spread;",
)
_SQUARES = sums(v="x0 * x0")
_TWO_SUMS = sums(a="x0", b="x0 * x1")
_DOT = sums(v="x0 * x1")


def normalise(weight: bool, bias: bool) -> RowRule:
    """Layer and group norm of x0 with weight and bias, where present, as the next inputs. s0 is epsilon."""
    value = "(x0 - mean) * rstd"
    if weight:
        value += " * x1"
    if bias:
        value += f" + x{2 if weight else 1}"
    prepare = "let mean = s.mean; let rstd = inverseSqrt(s.m2 / n + p.s0);"
    return RowRule(_ROW_MOMENTS, ("x0",), prepare, value, _MEAN_FIRST)


def normalise_backward(weight: bool) -> RowRule:
    """The gradient of x: x0 is the result's gradient, x1 the input, x2 mean and x3 rstd of the row, x4 the weight."""
    grad = "(x0 * x4)" if weight else "x0"
    centred = "((x1 - x2) * x3)"
    return RowRule(
        _TWO_SUMS,
        (grad, centred),
        "let first = s.a / n; let second = s.b / n;",
        f"x3 * ({grad} - first - {centred} * second)",
    )


def root_mean_square(weight: bool) -> RowRule:
    return RowRule(
        _SQUARES, ("x0",), "let rstd = inverseSqrt(s.v / n + p.s0);", "x0 * rstd * x1" if weight else "x0 * rstd"
    )


def root_mean_square_backward(weight: bool) -> RowRule:
    """x0 is the result's gradient, x1 the input, x2 rstd of the row, x3 the weight."""
    grad = "(x0 * x3)" if weight else "x0"
    return RowRule(_DOT, (grad, "(x1 * x2)"), "let share = s.v / n;", f"x2 * ({grad} - x1 * x2 * share)")


# Folds over the rows, for the gradients of weights: x0 gradient, x1 input, x2 mean, x3 rstd.
WEIGHT_AND_BIAS = sums(w="x0 * (x1 - x2) * x3", b="x0")
SCALE_ONLY = sums(w="x0 * x1 * x2")

# Batch norm over a channel: mean, rstd (s0 is epsilon), unbiased variance.
CHANNEL_MOMENTS = Reducer(
    MOMENTS,
    add_moments("x0"),
    MERGE_MOMENTS,
    ("s.mean", "inverseSqrt(s.m2 / n + p.s0)", "divided(s.m2, max(n - 1.0, 0.0))"),
)


@dataclass(frozen=True)
class Channelwise:
    """Each element from the same element of the inputs x0, x1, … and its channel's f32 values c0, c1, …"""

    expression: str
    inputs: tuple[str, ...]
    channels: int
    dtype: str
    fours: bool = False  # four neighbours, which are in one channel and start on a multiple of four, are one vec4


CHANNEL_THREADS = 256


def _channelwise_fours(kernel: Channelwise) -> str:
    """A thread computes four elements of one channel, with one load of each input."""
    inputs, channels = len(kernel.inputs), kernel.channels
    names = ["count", "inner", "channels", *[f"o{j}" for j in range(inputs)], *[f"q{j}" for j in range(channels)]]
    bound = [element(name, True) for name in kernel.inputs]
    lines = [
        head(
            *(
                names,
                {**numbered("b", bound), **numbered("h", ["f32"] * channels)},
                {"out": element(kernel.dtype, True)},
            ),
            (*kernel.inputs, kernel.dtype),
        ),
        thread_main(CHANNEL_THREADS),
        "  let i = thread * 4u; if (i >= p.count) { return; }\n  let channel = (i / p.inner) % p.channels;\n",
        *[f"  let x{j} = {load_four(name, f'b{j}', f'p.o{j} + i')};\n" for j, name in enumerate(kernel.inputs)],
        *[f"  let c{j} = h{j}[p.q{j} + channel];\n" for j in range(channels)],
        f"  let value = {kernel.expression};\n  out[thread] = {stored_four(kernel.dtype, 'value')};\n}}\n",
    ]
    return "".join(lines)


def render_channelwise(kernel: Channelwise) -> str:
    """A thread computes one element, or the elements of one word. Memory order: channels `inner` elements apart."""
    inputs, channels = len(kernel.inputs), kernel.channels
    if kernel.fours:
        return _channelwise_fours(kernel)
    names = ["count", "inner", "channels", *[f"o{j}" for j in range(inputs)], *[f"q{j}" for j in range(channels)]]
    loads = " ".join(f"let x{j} = {load(name, f'b{j}', f'(p.o{j} + i)')};" for j, name in enumerate(kernel.inputs))
    values = " ".join(f"let c{j} = h{j}[p.q{j} + channel];" for j in range(channels))
    lanes = KINDS[kernel.dtype].lanes
    if lanes == 1:
        main = f"  if (thread >= p.count) {{ return; }}\n  out[thread] = {stored(kernel.dtype, 'evaluate(thread)')};\n"
    else:
        bits = 32 // lanes
        main = (
            f"  let first = thread * {lanes}u; if (first >= p.count) {{ return; }}\n  var word = 0u;\n"
            f"  for (var k = 0u; k < {lanes}u && first + k < p.count; k++) "
            f"{{ word |= {lane_bits(kernel.dtype, 'evaluate(first + k)')} << (k * {bits}u); }}\n  out[thread] = word;\n"
        )
    return "".join(
        (
            head(names, {**numbered("b", kernel.inputs), **numbered("h", ["f32"] * channels)}, {"out": kernel.dtype}),
            f"fn evaluate(i: u32) -> f32 {{ let channel = (i / p.inner) % p.channels; {loads} {values} "
            f"return {kernel.expression}; }}\n",
            thread_main(CHANNEL_THREADS),
            main,
            "}\n",
        )
    )
