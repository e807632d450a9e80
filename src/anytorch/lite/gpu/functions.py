"""Functions of arrays that NumPy has no word for, on the GPU. `lite.moving.on_gpu` finds them here by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anytorch.gpu.launch import Plan, grid
from anytorch.gpu.plans import plans
from anytorch.gpu.wgsl import multi
from anytorch.lite.gpu import conv, recurrent, rows
from anytorch.lite.gpu.array import GpuArray, compute
from anytorch.lite.gpu.kernels import F32


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
    plan([each.layout.address for each in (weight, g.dense(), m, v)], b1, b2, step, scale, eps)


def channels_normed(
    x: GpuArray, mean: GpuArray, inverse: GpuArray, weight: GpuArray | None, bias: GpuArray | None
) -> tuple[GpuArray, GpuArray]:
    hat = compute("(x0 - x1) * x2", (x, mean, inverse))
    scaled = compute("x0 * x1 + x2", (hat, 1.0 if weight is None else weight, 0.0 if bias is None else bias))
    return scaled, hat


# What `on_gpu` looks for: everything here, and what these modules define.
NAMESAKES: dict[str, Any] = {**vars(conv), **vars(recurrent), **vars(rows), **globals()}
