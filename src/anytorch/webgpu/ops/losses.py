"""Losses: negative log likelihood, and those taken element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from anytorch.gpu.wgsl.loss import THREADS, TOTALS, Pick, PickBackward, render_pick, render_pick_backward
from anytorch.webgpu.copies import contiguous, narrowed
from anytorch.webgpu.dtypes import name_of, usable, word_dtype
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.faults import site_of
from anytorch.webgpu.folds import reduce_dims
from anytorch.webgpu.kernels import into, op_of, register_kernels
from anytorch.webgpu.launch import NoKernel, check_devices, launch, let_the_cpu_refuse
from anytorch.webgpu.pointwise import Rule, run
from anytorch.webgpu.tensors import KEY, aten, new_contiguous

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for `reduction`

Maybe = torch.Tensor | None


def _check_shapes(op: Any, self: torch.Tensor, target: torch.Tensor, weight: Maybe, *rest: int) -> None:
    """Raise if shapes do not fit, in the CPU's words. The meta kernel checks them too, but not of every op here."""
    try:
        _fit(op, self, target, weight)
    except RuntimeError:
        let_the_cpu_refuse(op, (self, target, weight, *rest), {})
        raise


def _fit(op: Any, self: torch.Tensor, target: torch.Tensor, weight: Maybe) -> None:
    mismatch = f"{op}: size mismatch (got input: {list(self.shape)}, target: {list(target.shape)})"
    if self.dim() > 1 and list(target.shape) != [*self.shape[:1], *self.shape[2:]]:
        raise RuntimeError(mismatch)
    if self.dim() == 0 or (self.dim() == 1 and target.numel() != 1):
        raise RuntimeError(mismatch)
    classes = self.size(1) if self.dim() > 1 else self.size(0)
    if weight is not None and (weight.dim() != 1 or weight.numel() != classes):
        raise RuntimeError(f"{op}: weight tensor should be defined either for all {classes} classes or no classes")


def _check_usable(self: torch.Tensor, target: torch.Tensor, weight: Maybe, ignore_index: int) -> None:
    kinds = self.is_floating_point() and not target.is_floating_point()
    dtypes = [t.dtype for t in (self, target, weight) if t is not None]
    if not kinds or not usable(*dtypes) or not -(2**31) < ignore_index < 2**31:
        raise NoKernel


def _geometry(self: torch.Tensor) -> tuple[int, int]:
    """Classes, and samples that lie side by side."""
    return (self.size(1), math.prod(self.shape[2:])) if self.dim() > 1 else (self.size(0), 1)


def _forward(op: Any) -> Callable[..., Any]:
    def kernel(
        self: torch.Tensor, target: torch.Tensor, weight: Maybe, reduction: int, ignore_index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_devices(op, self, target, weight)
        _check_shapes(op, self, target, weight, reduction, ignore_index)
        _check_usable(self, target, weight, ignore_index)
        size = [*self.shape[:1], *self.shape[2:]] if self.dim() > 1 else []
        samples, (classes, inner) = math.prod(size), _geometry(self)
        losses, weights = (new_contiguous((samples,), torch.float32) for _ in range(2))
        if samples and not classes:
            losses.fill_(math.nan)
            weights.fill_(math.nan)
        elif samples:
            tensors = [contiguous(t) for t in (self, target, weight) if t is not None]
            dtypes = [name_of(t.dtype) if t is not None else "" for t in (self, target, weight)]
            bound, head = [*tensors, losses, weights], (samples, classes, inner, ignore_index)
            site = site_of(op, (int(self.dim() > 1),), noun="target", buffers=len(bound))
            pick = Pick(dtypes[0], dtypes[1], dtypes[2], reports=site > 0)
            launch(pick, render_pick, bound, -(-samples // THREADS), placed=len(tensors), head=head, site=site)
        if reduction == NONE:
            return narrowed(losses, self.dtype).view(size), new_contiguous((), self.dtype).fill_(0)
        if not samples:
            empty = math.nan if reduction == MEAN else 0.0
            return new_contiguous((), self.dtype).fill_(empty), new_contiguous((), self.dtype).fill_(0)
        mean = (float(reduction == MEAN),)
        made = reduce_dims("totals", (losses, weights), (0,), [self.dtype] * 2, (), mean, "f32", TOTALS)
        return made[0], made[1]

    return kernel


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
        _check_usable(self, target, weight, ignore_index)
        if grad_output.dtype is not total_weight.dtype:
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


# --- losses taken element by element: the element's loss and its gradient are expressions, then one reduction ------------

_CROSS_ENTROPY = "binary_cross_entropy({0}, {1})"
_CROSS_ENTROPY_SLOPE = "{3} * {0} * ({1} - {2}) / maximum_{T}((1.0 - {1}) * {1}, 1e-12)"
# {0} the input, {1} the target, {2} beta, delta or the elements' weights; a second rule is for a call that has weights.
# Backward: {0} the gradient, {1} the input, {2} the target, {3} what an element counts (1/n for a mean), {4} as {2} before.
LOSSES = {
    "mse_loss": (Rule("({0} - {1}) * ({0} - {1})"),),
    "mse_loss_backward": (Rule("{3} * 2.0 * ({1} - {2}) * {0}"),),
    "smooth_l1_loss": (Rule("smooth_l1({0} - {1}, {2})"),),
    "smooth_l1_loss_backward": (Rule("{3} * {0} * smooth_l1_slope({1} - {2}, {4})"),),
    "huber_loss": (Rule("huber({0} - {1}, {2})"),),
    "huber_loss_backward": (Rule("{3} * {0} * minimum_{T}(maximum_{T}({1} - {2}, -{4}), {4})"),),
    "binary_cross_entropy": (Rule(_CROSS_ENTROPY), Rule(f"{{2}} * {_CROSS_ENTROPY}")),
    "binary_cross_entropy_backward": (Rule(_CROSS_ENTROPY_SLOPE), Rule(f"{{4}} * {_CROSS_ENTROPY_SLOPE}")),
}


def _result_like(*tensors: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The geometry of an elementwise result: the first tensor's strides if it has the result's shape."""

    def make() -> torch.Tensor:
        shape = torch.broadcast_shapes(*[tensor.shape for tensor in tensors])
        first = tensors[0]
        dtype = first.dtype
        for tensor in tensors[1:]:
            dtype = torch.promote_types(dtype, tensor.dtype)
        if first.shape == shape:
            return torch.empty_like(torch.empty_strided(shape, first.stride(), dtype=dtype, device="meta"))
        return torch.empty(shape, dtype=dtype, device="meta")

    return make


def _elementwise(op: Any, rules: Sequence[Rule]) -> Callable[..., Any]:
    arguments = op._schema.arguments
    names = [argument.name for argument in arguments]
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    backward = names[0] == "grad_output"

    def kernel(*args: Any, **kwargs: Any) -> Any:
        values = {**dict.fromkeys(names), **defaults, **dict(zip(names, args, strict=False)), **kwargs}
        out, reduction = values.pop("grad_input" if backward else "out", None), values.pop("reduction")
        operands = [v if isinstance(v, torch.Tensor) else float(v) for v in values.values() if v is not None]
        tensors = [v for v in operands if isinstance(v, torch.Tensor)]
        check_devices(op, *tensors)
        shaped = tensors
        if backward:
            operands.insert(3, 1.0 / max(values["self"].numel(), 1) if reduction == MEAN else 1.0)
            shaped = tensors[1:3]
        rule = rules[-1] if values.get("weight") is not None else rules[0]
        try:
            made = run(rule, op, operands, (), None, _result_like(*shaped))
        except NoKernel:
            return fallback(op, *args, **kwargs)
        if not backward:
            made = made.mean() if reduction == MEAN else made.sum() if reduction == SUM else made
        return into(out, made)

    return kernel


def register(library: torch.library.Library) -> None:
    for name in ("nll_loss", "nll_loss2d"):
        for way, make in (("forward", _forward), ("backward", _backward)):
            register_kernels(library, {f"{name}_{way}": make(op_of(f"{name}_{way}"))})
    for name, rules in LOSSES.items():
        packet = getattr(aten, name)
        for op in (getattr(packet, overload) for overload in packet.overloads()):
            library.impl(op, _elementwise(op, rules), KEY)
