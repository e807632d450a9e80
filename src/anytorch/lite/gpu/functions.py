"""Functions of arrays that NumPy does not have, on the GPU. `lite.moving.on_gpu` finds them here by name.

Convolution and pooling are the kernels of the torch device, which compute the windows' places as they load. LSTM and GRU
take one matrix product and one kernel for all gates per step, and the same backwards; a kernel may not read and write one
buffer, so the states of a step have memory of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from anytorch.gpu.launch import Plan, grid
from anytorch.gpu.plans import plans
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl import conv as wgsl_conv
from anytorch.gpu.wgsl import multi
from anytorch.gpu.wgsl import pool as wgsl_pool
from anytorch.gpu.wgsl import recurrent as wgsl_recurrent
from anytorch.gpu.wgsl.matmul import Schedule, render
from anytorch.gpu.wgsl.norm import normalise, normalise_backward
from anytorch.gpu.wgsl.softmax import LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD, SOFTMAX, SOFTMAX_BACKWARD, RowRule
from anytorch.lite.dtypes import Array
from anytorch.lite.gpu.array import GpuArray, as_gpu, check_devices, compute
from anytorch.lite.gpu.folds import TILED, added, by_rows, folded, product_grid, splits_of
from anytorch.lite.gpu.kernels import F32, Layout, new, threads, write
from anytorch.lite.ops.windows import Windows

# --- softmax, and other rules for whole rows -------------------------------------------------------------------------


def ruled(rule: RowRule) -> Callable[..., GpuArray]:
    """A function of arrays, and of the dimension along which their rows lie."""

    def run(*given: Any) -> GpuArray:
        arrays, dim, x = given[:-1], given[-1], given[0]
        return GpuArray(by_rows(rule, [(each.dense().layout, "element") for each in arrays], x.shape, dim % x.ndim)[0])

    return run


soft, of_soft = ruled(SOFTMAX), ruled(SOFTMAX_BACKWARD)
log_soft, of_log_soft = ruled(LOG_SOFTMAX), ruled(LOG_SOFTMAX_BACKWARD)


# --- layer norm ------------------------------------------------------------------------------------------------------

NORMALISE = lru_cache(normalise)  # a rule is known again by its identity
NORMALISE_BACKWARD = lru_cache(normalise_backward)
Kept = tuple[GpuArray, Layout, Layout]  # the rows, and the mean and 1 / deviation of each


def normed(rows: GpuArray, weight: GpuArray | None, bias: GpuArray | None, eps: float) -> tuple[GpuArray, Kept]:
    """(R, n) → (R, n)"""
    scale = [(each.dense().layout, "column") for each in (weight, bias) if each is not None]
    check_devices("layer_norm", [each for each in (weight, bias) if each is not None])
    rows = rows.dense()
    rule = NORMALISE(weight is not None, bias is not None)
    inputs = [(rows.layout, "element"), *scale]
    out, mean, inverse = by_rows(rule, inputs, rows.shape, 1, ("mean", "rstd"), (eps,))
    return GpuArray(out), (rows, mean, inverse)


def of_normed(g: GpuArray, kept: Kept, weight: GpuArray | None) -> tuple[GpuArray, GpuArray, GpuArray]:
    """The gradients of the rows (R, n), of the weight and of the bias (n,)."""
    rows, mean, inverse = kept
    g = g.dense()
    inputs = [(g.layout, "element"), (rows.layout, "element"), (mean, "row"), (inverse, "row")]
    if weight is not None:
        inputs.append((weight.dense().layout, "column"))
    (of_x,) = by_rows(NORMALISE_BACKWARD(weight is not None), inputs, rows.shape, 1)
    column = (rows.shape[0], 1)
    statistics = [GpuArray(Layout(each.memory, column, (1, 1))) for each in (mean, inverse)]
    hat = compute("x0 * (x1 - x2) * x3", (g, rows, *statistics))  # g times the normalised rows
    return GpuArray(of_x), hat.sum(0), g.sum(0)


# --- the loss of picking one class per row ---------------------------------------------------------------------------

LOSS = """  let t = load_target(i);
  if (t < 0) { store_loss(i, 0.0); return; }
  store_loss(i, -(1.0 - p.smoothing) * load_y(i * p.classes + u32(t)) - p.smoothing * load_mean(i));"""
SLOPE = """  let row = i / p.classes; let t = load_target(row);
  if (t < 0) { store_slope(i, 0.0); return; }
  let right = select(0.0, 1.0 - p.smoothing, u32(t) == i % p.classes);
  store_slope(i, (exp(load_y(i)) - right - p.smoothing / f32(p.classes)) * load_g(row));"""

Picked = tuple[GpuArray, Layout]  # the log-probabilities (R, C), and the class of each row or -1


def class_losses(logits: GpuArray, named: Array, kept: Array, smoothing: float) -> tuple[GpuArray, Picked]:
    """Logits (R, C) and classes (R,) → losses (R,); rows that are not kept cost nothing."""
    rows, classes = logits.shape
    y = log_soft(logits, 1)
    target = write(np.where(kept, named, -1), np.int32)
    (mean,) = folded("mean", y.layout, (1,))
    out = new((rows,))
    numbers = {"classes": classes, "smoothing": float(smoothing)}
    threads(LOSS, {"y": y.layout, "target": target, "mean": mean}, {"loss": out}, numbers, rows, whole=("target",))
    return GpuArray(out), (y, target)


def of_class_losses(g: GpuArray, picked: Picked, named: Array, kept: Array, smoothing: float) -> GpuArray:
    """The gradients of the losses (R,) → those of the logits (R, C)."""
    y, target = picked
    out = new(y.shape)
    numbers = {"classes": y.shape[1], "smoothing": float(smoothing)}
    inputs = {"y": y.layout, "target": target, "g": g.dense().layout}
    threads(SLOPE, inputs, {"slope": out}, numbers, out.size, whole=("target",))
    return GpuArray(out)


# --- others ----------------------------------------------------------------------------------------------------------


def gelu_of(x: GpuArray) -> tuple[GpuArray, Callable[[], GpuArray]]:
    slope = "normal_cdf(x0) + x0 * 0.3989422804014327 * exp_f32(-0.5 * x0 * x0)"
    return compute("x0 * normal_cdf(x0)", (x,)), lambda: compute(slope, (x,))


ADAM = multi.Multi(
    "v2 = b1 * v2 + (1.0 - b1) * v1; v3 = b2 * v3 + (1.0 - b2) * v1 * v1;\n"
    "    v0 = v0 - step * v2 / (scale * sqrt(v3) + eps);\n",
    (F32,) * 4,
    written=(True, False, True, True),
    numbers=("b1", "b2", "step", "scale", "eps"),
)


def adam_step(
    weight: GpuArray, g: GpuArray, m: GpuArray, v: GpuArray, b1: float, b2: float, step: float, scale: float, eps: float
) -> None:
    """All of a parameter's step in one launch; `weight`, `m` and `v` are dense and changed in place."""
    size = weight.size
    if not size:
        return
    plan = plans[key := ("lite adam", size)]
    if plan is None:
        x, y = grid(-(-size // multi.WORKGROUP))
        head = (size, x * multi.WORKGROUP)
        plan = plans[key] = Plan(ADAM, multi.render, (x, y), [4] * 4, ADAM.writable, head=head, numbers="5f")
    bound = (weight, g.dense(), m, v)  # a dense copy must live until the launch is recorded
    plan([each.layout.address for each in bound], b1, b2, step, scale, eps)


def channels_normed(
    x: GpuArray, mean: GpuArray, inverse: GpuArray, weight: GpuArray | None, bias: GpuArray | None
) -> tuple[GpuArray, GpuArray]:
    hat = compute("(x0 - x1) * x2", (x, mean, inverse))
    scaled = compute("x0 * x1 + x2", (hat, 1.0 if weight is None else weight, 0.0 if bias is None else bias))
    return scaled, hat


# --- convolution -----------------------------------------------------------------------------------------------------

# Loads are long functions here; on a software adapter fewer copies of them are faster.
DIRECT = Schedule("direct", tm=4, tn=4)


def correlated(x: GpuArray, weight: GpuArray, bias: GpuArray | None, windows: Windows, groups: int) -> GpuArray:
    """(N, C, H, W), (O, C/G, kh, kw) → (N, O, oh, ow)"""
    check_devices("conv2d", (weight, *(() if bias is None else (bias,))))
    n, o = x.shape[0], weight.shape[0]
    out = new((n, o, *windows.out))
    oh, ow = windows.out
    sizes = (o // groups, n * oh * ow, weight.size // o if o else 0)
    return GpuArray(multiply("gather", weight.dense(), x.dense(), bias, out, out, windows, groups, sizes))


def of_image(g: GpuArray, weight: GpuArray, windows: Windows, groups: int) -> GpuArray:
    """(N, O, oh, ow) → (N, C, H, W): what reached a place through each tap of the kernel, gathered."""
    n, o = g.shape[:2]
    channels = weight.shape[1] * groups
    h, w = windows.image
    out = new((n, channels, h, w))
    kh, kw = windows.kernel
    sizes = (weight.shape[1], n * h * w, o // groups * kh * kw)
    return GpuArray(multiply("scatter", weight.dense(), g.dense(), None, out, out, windows, groups, sizes))


def of_weight(g: GpuArray, x: GpuArray, weight_shape: tuple[int, ...], windows: Windows, groups: int) -> GpuArray:
    """(N, O, oh, ow), (N, C, H, W) → (O, C/G, kh, kw)"""
    out = new(weight_shape)
    o = weight_shape[0]
    g = g.dense()
    sizes = (o // groups, out.size // o, g.size // o)
    return GpuArray(multiply("weight", g, x.dense(), None, g.layout, out, windows, groups, sizes))


def multiply(
    kind: str,
    a: GpuArray,
    x: GpuArray,
    bias: GpuArray | None,
    other: Layout,
    out: Layout,
    windows: Windows,
    groups: int,
    sizes: tuple[int, int, int],
) -> Layout:
    """One matrix product per group, into `out` or, where its sums are cut into parts, beside it.

    `other` is the side that is walked place by place: `out`, or the gradient.
    """
    if not all(sizes):
        GpuArray(out)[...] = 0.0
        return out
    fours = kind == "gather" and sizes[2] % 4 == 0 and a.layout.offset % 4 == 0  # of the weights, read at once
    key = ("lite convolution", kind, windows, groups, sizes, x.shape, other.shape, bias is None, fours)
    known = plans[key]
    if known is None:
        schedule = DIRECT if open_runtime().adapter.software or sizes[0] <= 4 else TILED
        # The gradient of a small kernel is few sums, each over every place of every image.
        splits = splits_of(schedule, groups, *sizes) if kind == "weight" else 1
        kernel, stride, padding, dilation = windows.geometry
        spec = wgsl_conv.Convolution(
            *(kind, F32, F32, (1, *kernel), (1, *stride), (0, *padding), (1, *dilation)),
            bias=bias is not None,
            a_vector=fours and schedule.form == "tiled",
            split=splits > 1,
        )
        numbers, launched = product_grid(schedule, groups, *sizes, splits)
        geometry = (
            *(x.shape[1] // groups, 1, *x.shape[2:], 1, *other.shape[2:]),
            *(*x.layout.strides[:2], 1, *other.strides[:2], 1),
        )
        places = [4] * (3 if bias is None else 4)
        written = 1 << (len(places) - 1)
        tail = (*numbers, *geometry)
        plan = Plan((spec, schedule), render_convolution, launched, places, written, tail=tail)
        known = plans[key] = (plan, splits)
    plan, splits = known
    shift = None if bias is None else bias.dense().layout
    target = out if splits == 1 else new((groups, splits, *sizes[:2]))
    bound = (a.layout, x.layout, target) if shift is None else (a.layout, x.layout, shift, target)
    plan([layout.address for layout in bound])
    return out if splits == 1 else added(target, groups, splits, out.shape)


def render_convolution(key: tuple[wgsl_conv.Convolution, Schedule]) -> str:
    return render(wgsl_conv.convolution(key[0]), key[1])


# --- pooling ---------------------------------------------------------------------------------------------------------


def window_of(windows: Windows) -> wgsl_pool.Window:
    (kh, kw), (sh, sw), (ph, pw), _ = windows.geometry
    return wgsl_pool.Window(kernel=(1, kh, kw), stride=(1, sh, sw), padding=(0, ph, pw))


def pool(body: str, inputs: dict[str, Layout], outputs: dict[str, Layout], x: Layout, y: Layout, count: int) -> None:
    """Sizes and strides of (…, H, W) are given as the kernels want them: n, c, depth, height, width."""
    values = [
        x.shape[-3],
        *(1, *x.shape[-2:], 1, *y.shape[-2:]),
        *(n for layout in (x, y) for n in ([0, *layout.strides][-4], layout.strides[-3], 0, *layout.strides[-2:])),
    ]
    numbers = dict(zip(("channels", *wgsl_pool.SIZES, *wgsl_pool.STRIDES), values, strict=True))
    threads(body, inputs, outputs, numbers, count, whole=("index",))


def max_pooled(x: GpuArray, windows: Windows) -> tuple[GpuArray, Layout]:
    """The largest number of each window, and its place in the image."""
    shape = (*x.shape[:-2], *windows.out)
    out, places = new(shape), new(shape)
    body = wgsl_pool.maximum(window_of(windows), "f32", "i32")
    pool(body, {"x": x.layout}, {"y": out, "index": places}, x.layout, out, out.size)
    return GpuArray(out), places


def of_max_pooled(g: GpuArray, places: Layout, shape: tuple[int, ...], windows: Windows) -> GpuArray:
    out, given = new(shape), g.dense().layout
    body = wgsl_pool.maximum_backward(window_of(windows))
    pool(body, {"g": given, "index": places}, {"x": out}, out, given, out.size)
    return GpuArray(out)


def mean_pooled(x: GpuArray, windows: Windows) -> GpuArray:
    out = new((*x.shape[:-2], *windows.out))
    pool(wgsl_pool.average(window_of(windows)), {"x": x.layout}, {"y": out}, x.layout, out, out.size)
    return GpuArray(out)


def of_mean_pooled(g: GpuArray, shape: tuple[int, ...], windows: Windows) -> GpuArray:
    out, given = new(shape), as_gpu(g).dense().layout
    pool(wgsl_pool.average_backward(window_of(windows)), {"g": given}, {"x": out}, out, given, out.size)
    return GpuArray(out)


# --- LSTM and GRU ----------------------------------------------------------------------------------------------------

LSTM, LSTM_BACKWARD, GRU = wgsl_recurrent.lstm(True), wgsl_recurrent.lstm_backward(True, True), wgsl_recurrent.gru(True)


def empty(*shape: int) -> GpuArray:
    return GpuArray(new(shape))


def steps(x: GpuArray) -> list[GpuArray]:
    """x[0], x[1], … as views."""
    (length, *shape), (step, *strides), begin = x.layout.shape, x.layout.strides, x.layout.offset
    return [x.view(tuple(shape), tuple(strides), begin + t * step) for t in range(length)]


def cell(body: str, inputs: dict[str, GpuArray], outputs: dict[str, GpuArray], batch: int, hidden: int) -> None:
    """All gates of one step: a thread per hidden unit of each sequence."""
    given = {name: each.dense().layout for name, each in inputs.items()}
    made = {name: each.layout for name, each in outputs.items()}
    threads(body, given, made, {"hidden": hidden}, batch * hidden, wgsl_recurrent.FUNCTIONS)


def lstm_forward(
    x: GpuArray, h0: GpuArray, c0: GpuArray, w_ih: GpuArray, w_hh: GpuArray, b_ih: GpuArray, b_hh: GpuArray
) -> tuple[GpuArray, Any]:
    """x (L, B, I), states (B, H) → (L + 1, B, H): the outputs, then the last cell; and what the gradient needs."""
    check_devices("lstm", (h0, c0, w_ih, w_hh, b_ih, b_hh))
    (length, batch, _), hidden = x.shape, h0.shape[1]
    from_x = x.reshape(length * batch, x.shape[2]).dot(w_ih.T).reshape(length, batch, 4 * hidden)
    gates = empty(length, batch, 4 * hidden)
    outs = empty(length + 2, batch, hidden)  # h0, the outputs, the last cell
    outs[0] = h0
    cells, recurrent, out = [c0.dense()], w_hh.T, steps(outs)
    for t, (given, made) in enumerate(zip(steps(from_x), steps(gates), strict=True)):
        cells.append(empty(batch, hidden))
        inputs = {"x": given, "h": out[t].dot(recurrent), "c": cells[t], "xb": b_ih, "hb": b_hh}
        outputs = {"hy": out[t + 1], "cy": cells[t + 1], "gates": made}
        cell(LSTM, inputs, outputs, batch, hidden)
    outs[length + 1] = cells[-1]
    return outs[1:], (gates, cells, outs)


def lstm_backward(grad: GpuArray, kept: Any, w_hh: GpuArray) -> tuple[GpuArray, GpuArray, tuple[GpuArray, ...]]:
    gates, cells, _ = kept
    length, batch, hidden = grad.shape[0] - 1, grad.shape[1], grad.shape[2]
    of_gates = empty(length, batch, 4 * hidden)
    dh, dc = np.zeros_like(cells[0]), grad[length]
    gate, of_gate, of_out = steps(gates), steps(of_gates), steps(grad)
    for t in reversed(range(length)):
        inputs = {"gates": gate[t], "c": cells[t], "cy": cells[t + 1], "gh": dh + of_out[t], "gc": dc}
        dc = empty(batch, hidden)
        cell(LSTM_BACKWARD, inputs, {"to_gates": of_gate[t], "to_c": dc}, batch, hidden)
        dh = of_gate[t].dot(w_hh)
    return of_gates, of_gates, (dh, dc)


def gru_forward(
    x: GpuArray, h0: GpuArray, w_ih: GpuArray, w_hh: GpuArray, b_ih: GpuArray, b_hh: GpuArray
) -> tuple[GpuArray, Any]:
    """x (L, B, I), h0 (B, H) → (L, B, H), and what the gradient needs."""
    check_devices("gru", (h0, w_ih, w_hh, b_ih, b_hh))
    (length, batch, _), hidden = x.shape, h0.shape[1]
    from_x = x.reshape(length * batch, x.shape[2]).dot(w_ih.T).reshape(length, batch, 3 * hidden)
    kept = empty(length, batch, 5 * hidden)
    outs = empty(length + 1, batch, hidden)
    outs[0] = state = h0.dense()
    recurrent = w_hh.T
    for t, (given, saved) in enumerate(zip(steps(from_x), steps(kept), strict=True)):
        fresh = empty(batch, hidden)
        inputs = {"x": given, "h": state.dot(recurrent), "state": state, "xb": b_ih, "hb": b_hh}
        cell(GRU, inputs, {"hy": fresh, "kept": saved}, batch, hidden)
        outs[t + 1] = state = fresh
    return outs[1:], (kept, outs)


def gru_backward(grad: GpuArray, saved: Any, w_hh: GpuArray) -> tuple[GpuArray, GpuArray, tuple[GpuArray, ...]]:
    kept, outs = saved
    length, batch, hidden = grad.shape
    of_x, of_h = empty(length, batch, 3 * hidden), empty(length, batch, 3 * hidden)
    dh = np.zeros_like(outs[0])
    for of_out, there, to_x, to_h in reversed(list(zip(*map(steps, (grad, kept, of_x, of_h)), strict=True))):
        through = empty(batch, hidden)
        outputs = {"to_x": to_x, "to_h": to_h, "to_state": through}
        cell(wgsl_recurrent.GRU_BACKWARD, {"g": dh + of_out, "kept": there}, outputs, batch, hidden)
        dh = through + to_h.dot(w_hh)
    return of_x, of_h, (dh,)
