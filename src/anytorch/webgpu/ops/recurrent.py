"""LSTM and GRU cells. torch sends this device's RNN modules to the fused cells, which have no kernel on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from anytorch.gpu.wgsl import recurrent as wgsl
from anytorch.webgpu.copies import contiguous, narrowed
from anytorch.webgpu.dtypes import FLOATS, computable
from anytorch.webgpu.dtypes import word_dtype as wide
from anytorch.webgpu.per_element import per_element
from anytorch.webgpu.tensors import new_contiguous


def _check(name: str, *tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype not in FLOATS or not computable(tensor.dtype):
            raise RuntimeError(f"webgpu: {name} takes float32, float16 or bfloat16 on this adapter, not {tensor.dtype}")


def _biases(input_bias: torch.Tensor | None, hidden_bias: torch.Tensor | None) -> list[tuple[str, torch.Tensor]]:
    if input_bias is None or hidden_bias is None:
        return []
    return [("xb", contiguous(input_bias)), ("hb", contiguous(hidden_bias))]


def lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check("an LSTM cell", input_gates, hidden_gates, cx)
    dtype = cx.dtype
    hy, cy = new_contiguous(cx.shape, wide(dtype)), new_contiguous(cx.shape, wide(dtype))
    gates = new_contiguous(input_gates.shape, wide(dtype))
    biases = _biases(input_bias, hidden_bias)
    inputs = [("x", contiguous(input_gates)), ("h", contiguous(hidden_gates)), ("c", contiguous(cx)), *biases]
    outputs = [("hy", hy), ("cy", cy), ("gates", gates)]
    hidden = [("hidden", "u32", cx.shape[-1])]
    per_element(inputs, outputs, hidden, cx.numel(), wgsl.lstm(bool(biases)), wgsl.FUNCTIONS)
    return narrowed(hy, dtype), narrowed(cy, dtype), narrowed(gates, dtype)


def lstm_cell_backward(
    grad_hy: torch.Tensor | None,
    grad_cy: torch.Tensor | None,
    cx: torch.Tensor,
    cy: torch.Tensor,
    workspace: torch.Tensor,
    has_bias: bool,
) -> tuple[torch.Tensor | None, ...]:
    if grad_hy is None and grad_cy is None:
        return None, None, None
    dtype = cx.dtype
    to_gates, to_c = new_contiguous(workspace.shape, wide(dtype)), new_contiguous(cx.shape, wide(dtype))
    inputs = [("gates", contiguous(workspace)), ("c", contiguous(cx)), ("cy", contiguous(cy))]
    if grad_hy is not None:
        inputs.append(("gh", contiguous(grad_hy)))
    if grad_cy is not None:
        inputs.append(("gc", contiguous(grad_cy)))
    body = wgsl.lstm_backward(grad_hy is not None, grad_cy is not None)
    hidden = [("hidden", "u32", cx.shape[-1])]
    per_element(inputs, [("to_gates", to_gates), ("to_c", to_c)], hidden, cx.numel(), body, wgsl.FUNCTIONS)
    gates = narrowed(to_gates, dtype)
    return gates, narrowed(to_c, dtype), gates.sum(0) if has_bias else None


def gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check("a GRU cell", input_gates, hidden_gates, hx)
    dtype = hx.dtype
    hy = new_contiguous(hx.shape, wide(dtype))
    kept = new_contiguous((hx.shape[0], 5 * hx.shape[1]), wide(dtype))
    biases = _biases(input_bias, hidden_bias)
    inputs = [("x", contiguous(input_gates)), ("h", contiguous(hidden_gates)), ("state", contiguous(hx)), *biases]
    hidden = [("hidden", "u32", hx.shape[-1])]
    per_element(inputs, [("hy", hy), ("kept", kept)], hidden, hx.numel(), wgsl.gru(bool(biases)), wgsl.FUNCTIONS)
    return narrowed(hy, dtype), narrowed(kept, dtype)


def gru_cell_backward(grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> tuple[Any, ...]:
    dtype = grad_hy.dtype
    rows, hidden = grad_hy.shape
    to_x, to_h = (new_contiguous((rows, 3 * hidden), wide(dtype)) for _ in range(2))
    to_state = new_contiguous(grad_hy.shape, wide(dtype))
    inputs = [("g", contiguous(grad_hy)), ("kept", contiguous(workspace))]
    outputs = [("to_x", to_x), ("to_h", to_h), ("to_state", to_state)]
    per_element(inputs, outputs, [("hidden", "u32", hidden)], grad_hy.numel(), wgsl.GRU_BACKWARD, wgsl.FUNCTIONS)
    made = [narrowed(tensor, dtype) for tensor in (to_x, to_h, to_state)]
    biases = (made[0].sum(0), made[1].sum(0)) if has_bias else (None, None)
    return (*made, *biases)


def register(library: torch.library.Library) -> None:
    library.impl("_thnn_fused_lstm_cell", lstm_cell, "PrivateUse1")
    library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward, "PrivateUse1")
    library.impl("_thnn_fused_gru_cell", gru_cell, "PrivateUse1")
    library.impl("_thnn_fused_gru_cell_backward", gru_cell_backward, "PrivateUse1")
