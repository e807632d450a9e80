"""Convolution and pooling on the GPU: the kernels of the torch device, which compute the windows' places as they load."""

from __future__ import annotations

from anytorch.gpu.launch import Plan
from anytorch.gpu.plans import plans
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl import conv as wgsl_conv
from anytorch.gpu.wgsl import pool as wgsl_pool
from anytorch.gpu.wgsl.matmul import Schedule, render
from anytorch.lite.gpu.array import GpuArray, as_gpu, check_devices
from anytorch.lite.gpu.folds import TILED, added, product_grid, splits_of
from anytorch.lite.gpu.kernels import F32, Layout, new, threads
from anytorch.lite.ops.windows import Windows

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
