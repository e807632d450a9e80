"""Losses: negative log likelihood. The elementwise ones are in `pointwise_losses`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from anytorch.gpu.wgsl.loss import THREADS, TOTALS, Pick, PickBackward, render_pick, render_pick_backward
from anytorch.webgpu.copies import contiguous, narrowed
from anytorch.webgpu.dtypes import name_of, usable, word_dtype
from anytorch.webgpu.folds import reduce_dims
from anytorch.webgpu.kernels import op_of, register_kernels
from anytorch.webgpu.launch import NoKernel, check_devices, launch
from anytorch.webgpu.tensors import new_contiguous

NONE, MEAN = 0, 1  # torch's numbers for `reduction`; 2 is a sum

Maybe = torch.Tensor | None


def _shape_error(op: Any, self: torch.Tensor, target: torch.Tensor, weight: Maybe) -> str | None:
    """What torch would say of shapes that do not fit. The meta kernel says it too, but not of every op here."""
    classes = self.size(1) if self.dim() > 1 else self.size(0) if self.dim() else 0
    samples = [*self.shape[:1], *self.shape[2:]] if self.dim() > 1 else []
    if (
        self.dim() == 0
        or (self.dim() > 1 and list(target.shape) != samples)
        or (self.dim() == 1 and target.numel() != 1)
    ):
        return f"{op}: size mismatch (got input: {list(self.shape)}, target: {list(target.shape)})"
    if weight is not None and (weight.dim() != 1 or weight.numel() != classes):
        return f"{op}: weight tensor should be defined either for all {classes} classes or no classes"
    return None


def _fits(self: torch.Tensor, target: torch.Tensor, weight: Maybe, ignore_index: int) -> bool:
    dtypes = [t.dtype for t in (self, target, weight) if t is not None]
    return (
        self.is_floating_point()
        and not target.is_floating_point()
        and usable(*dtypes)
        and -(2**31) <= ignore_index < 2**31
    )


def _geometry(self: torch.Tensor) -> tuple[int, int]:
    """Classes, and samples that lie side by side."""
    return (self.size(1), math.prod(self.shape[2:])) if self.dim() > 1 else (self.size(0), 1)


def _forward(op: Any) -> Callable[..., Any]:
    def kernel(
        self: torch.Tensor, target: torch.Tensor, weight: Maybe, reduction: int, ignore_index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_devices(op, self, target, weight)
        error = _shape_error(op, self, target, weight)
        if error:
            raise ValueError(error) if "mismatch" in error and self.dim() > 1 else RuntimeError(error)
        if not _fits(self, target, weight, ignore_index):
            raise NoKernel
        size = [*self.shape[:1], *self.shape[2:]] if self.dim() > 1 else []
        losses, weights = _pick(self, target, weight, ignore_index, math.prod(size))
        if reduction == NONE:
            return narrowed(losses, self.dtype).view(size), new_contiguous((), self.dtype).fill_(0)
        if not losses.numel():
            empty = math.nan if reduction == MEAN else 0.0
            return new_contiguous((), self.dtype).fill_(empty), new_contiguous((), self.dtype).fill_(0)
        mean = (float(reduction == MEAN),)
        made = reduce_dims("totals", (losses, weights), (0,), [self.dtype] * 2, (), mean, "f32", TOTALS)
        return made[0], made[1]

    return kernel


def _pick(
    self: torch.Tensor, target: torch.Tensor, weight: Maybe, ignore_index: int, samples: int
) -> tuple[torch.Tensor, torch.Tensor]:
    losses, weights = new_contiguous((samples,), torch.float32), new_contiguous((samples,), torch.float32)
    if not samples:
        return losses, weights
    classes, inner = _geometry(self)
    if not classes:
        return losses.fill_(math.nan), weights.fill_(math.nan)
    tensors = [contiguous(t) for t in (self, target, weight) if t is not None]
    kernel = Pick(name_of(self.dtype), name_of(target.dtype), name_of(weight.dtype) if weight is not None else "")
    head = (samples, classes, inner, ignore_index)
    bound = [*tensors, losses, weights]
    launch(kernel, render_pick, bound, -(-samples // THREADS), placed=len(tensors), head=head)
    return losses, weights


def _backward(op: Any) -> Callable[..., Any]:
    def kernel(
        grad_output: torch.Tensor,
        self: torch.Tensor,
        target: torch.Tensor,
        weight: Maybe,
        reduction: int,
        ignore_index: int,
        total_weight: torch.Tensor,
    ) -> torch.Tensor:
        check_devices(op, grad_output, self, target, weight, total_weight)
        same = grad_output.dtype is total_weight.dtype
        if not same or not _fits(self, target, weight, ignore_index):
            raise NoKernel
        out = new_contiguous(self.shape, word_dtype(self.dtype))
        if not out.numel():
            return narrowed(out, self.dtype)
        classes, inner = _geometry(self)
        tensors = [contiguous(t) for t in (grad_output, total_weight, target, weight) if t is not None]
        description = PickBackward(
            name_of(grad_output.dtype),
            name_of(target.dtype),
            name_of(weight.dtype) if weight is not None else "",
            name_of(out.dtype),
            reduction == MEAN,
            reduction == NONE and grad_output.dim() > 0,
        )
        head = (out.numel(), classes, inner, ignore_index)
        groups = -(-out.numel() // THREADS)
        launch(description, render_pick_backward, [*tensors, out], groups, placed=len(tensors), head=head)
        return narrowed(out, self.dtype)

    return kernel


def register(library: torch.library.Library) -> None:
    for name in ("nll_loss", "nll_loss2d"):
        for way, make in (("forward", _forward), ("backward", _backward)):
            register_kernels(library, {f"{name}_{way}": make(op_of(f"{name}_{way}"))})
