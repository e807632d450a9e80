"""Sampling images and volumes at given places (`F.grid_sample`), with its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from anytorch.gpu.wgsl import grid_sample as wgsl
from anytorch.webgpu.copies import contiguous, narrowed
from anytorch.webgpu.dtypes import FLOATS, computable, word_dtype
from anytorch.webgpu.kernels import register_kernels
from anytorch.webgpu.launch import NoKernel, check_devices
from anytorch.webgpu.per_element import computed, per_element
from anytorch.webgpu.tensors import new_contiguous

Numbers = list[tuple[str, str, Any]]


def _numbers(op: str, rank: int, x: torch.Tensor, grid: torch.Tensor, mode: int) -> Numbers:
    check_devices(op, x, grid)
    if x.dtype not in FLOATS or not computable(x.dtype) or grid.dtype is not x.dtype or x.numel() == 0:
        raise NoKernel
    fits = x.dim() == grid.dim() == rank + 2 and grid.shape[-1] == rank and grid.shape[0] == x.shape[0]
    if not fits or (mode == wgsl.BICUBIC and rank != 2):
        raise NoKernel  # the CPU says what is wrong with them
    values = (x.shape[1], math.prod(grid.shape[1:-1]), *x.shape[2:])
    return [(name, "u32", value) for name, value in zip(wgsl.parameters(rank), values, strict=True)]


def _forward(rank: int) -> Callable[..., torch.Tensor]:
    def kernel(x: torch.Tensor, grid: torch.Tensor, mode: int, padding: int, align_corners: bool) -> torch.Tensor:
        numbers = _numbers(f"grid_sampler_{rank}d", rank, x, grid, mode)
        size = (*x.shape[:2], *grid.shape[1:-1])
        texts = wgsl.forward(rank, mode), wgsl.functions(rank, padding, align_corners)
        (made,) = computed([("x", x), ("grid", grid)], {"y": size}, x.dtype, numbers, *texts)
        return made

    return kernel


def _backward(rank: int) -> Callable[..., Any]:
    def kernel(
        gradient: torch.Tensor,
        x: torch.Tensor,
        grid: torch.Tensor,
        mode: int,
        padding: int,
        align_corners: bool,
        output_mask: Sequence[bool],
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        numbers = _numbers(f"grid_sampler_{rank}d_backward", rank, x, grid, mode)
        if gradient.dtype is not x.dtype or torch.are_deterministic_algorithms_enabled():
            raise NoKernel  # atomics add up in whatever order; the CPU has one
        inputs = [(name, contiguous(t)) for name, t in (("g", gradient), ("x", x), ("grid", grid))]
        of_grid = new_contiguous(grid.shape, word_dtype(x.dtype))
        of_input = new_contiguous(x.shape, torch.float32).zero_() if output_mask[0] else None
        outputs = [("gg", of_grid), *([("gx", of_input)] if of_input is not None else [])]
        per_element(
            *(inputs, outputs, numbers, grid.numel() // rank),
            wgsl.backward(rank, mode, of_input is not None),
            wgsl.functions(rank, padding, align_corners),
            added="gx" if of_input is not None else "",
        )
        return None if of_input is None else narrowed(of_input, x.dtype), narrowed(of_grid, x.dtype)

    return kernel


def register(library: torch.library.Library) -> None:
    for rank in (2, 3):
        kernels: dict[str, Callable[..., Any]] = {
            f"grid_sampler_{rank}d": _forward(rank),
            f"grid_sampler_{rank}d_backward": _backward(rank),
        }
        register_kernels(library, kernels)
