"""Softmax and log-softmax in one launch each, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from anytorch.gpu.plans import plans
from anytorch.gpu.wgsl.softmax import LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD, SOFTMAX, SOFTMAX_BACKWARD, RowRule
from anytorch.webgpu.copies import contiguous, narrowed
from anytorch.webgpu.dtypes import usable
from anytorch.webgpu.kernels import register_kernels
from anytorch.webgpu.launch import NoKernel, check_devices, infer, made_by
from anytorch.webgpu.rows import row_geometry, row_plan, run_rows
from anytorch.webgpu.tensors import aten


def _forward(op: Any, rule: RowRule) -> Callable[..., Any]:
    own = id(op)

    def kernel(self: torch.Tensor, dim: int, half_to_float: bool) -> Any:
        address = self.data_ptr()
        key = (own, self.dtype, self.size(), self.stride(), dim, half_to_float, address & 15)
        dtype = torch.float32 if half_to_float else self.dtype
        plan = plans[key]
        if plan is not None:
            return narrowed(made_by(plan, (address,)), dtype)
        infer(op, self, dim, False)  # torch's own errors
        if not (self.is_floating_point() and usable(self.dtype)):
            raise NoKernel
        inputs, geometry = ((contiguous(self), "element"),), row_geometry(self, dim)
        if address and self.is_contiguous():
            plans[key] = row_plan(rule, inputs, geometry, self.size(), dtype, not address & 15)
        return run_rows(rule, inputs, geometry, self.size(), dtype)

    return kernel


def _backward(op: Any, rule: RowRule) -> Callable[..., Any]:
    def kernel(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> Any:
        if not usable(grad.dtype, output.dtype, input_dtype):
            raise NoKernel
        check_devices(op, grad, output)
        inputs = [(contiguous(grad), "element"), (contiguous(output), "element")]
        return run_rows(rule, inputs, row_geometry(grad, dim), grad.shape, input_dtype)

    return kernel


# --- with a mask ------------------------------------------------------------------------------------------------------


def masked_softmax(
    self: torch.Tensor, mask: torch.Tensor, dim: int | None = None, mask_type: int | None = None
) -> torch.Tensor:
    """Softmax over what the mask leaves in; a row with nothing left is 0."""
    if mask.dtype is not torch.bool:
        raise RuntimeError("Mask should be a boolean tensor")
    # Scores are (batch, heads, targets, sources); a mask of type 0 is per target and source, of type 1 per source.
    if mask.shape != self.shape and mask_type == 1 and self.dim() == 4:
        mask = mask.view(mask.size(0), 1, 1, mask.size(-1))
    left_out = mask.expand(self.shape)
    whole = self.masked_fill(left_out, -math.inf).softmax(-1 if dim is None else dim)
    return whole.masked_fill(left_out, 0.0)


def masked_softmax_backward(
    grad_output: torch.Tensor, output: torch.Tensor, mask: torch.Tensor, dim: int | None = None
) -> torch.Tensor:
    grad = grad_output.masked_fill(mask.expand(output.shape), 0.0)
    backward = aten._softmax_backward_data.default
    made: torch.Tensor = backward(grad, output, -1 if dim is None else dim, output.dtype)
    return made


KERNELS: dict[str, Callable[..., Any]] = {
    "_softmax": _forward(aten._softmax.default, SOFTMAX),
    "_log_softmax": _forward(aten._log_softmax.default, LOG_SOFTMAX),
    "_softmax_backward_data": _backward(aten._softmax_backward_data.default, SOFTMAX_BACKWARD),
    "_log_softmax_backward_data": _backward(aten._log_softmax_backward_data.default, LOG_SOFTMAX_BACKWARD),
    "_masked_softmax": masked_softmax,
    "_masked_softmax_backward": masked_softmax_backward,
}


def register(library: torch.library.Library) -> None:
    register_kernels(library, KERNELS)
