"""LSTM and GRU cells. torch sends this device's RNN modules to the fused cells, which have no kernel on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from anytorch.gpu.wgsl import recurrent as wgsl
from anytorch.webgpu.dtypes import FLOATS, computable
from anytorch.webgpu.per_element import computed
from anytorch.webgpu.tensors import KEY

Maybe = torch.Tensor | None


def _cell(
    inputs: dict[str, Maybe], results: Mapping[str, Sequence[int]], state: torch.Tensor, body: str
) -> list[torch.Tensor]:
    """Run a cell's body for every element of a state's shape, which the first result has; absent inputs are left out."""
    present = [(name, tensor) for name, tensor in inputs.items() if tensor is not None]
    return computed(present, results, state.dtype, [("hidden", "u32", state.shape[-1])], body, wgsl.FUNCTIONS)


def _biases(*given: Maybe) -> dict[str, Maybe]:
    return dict(zip(("xb", "hb"), given, strict=True)) if all(one is not None for one in given) else {}


def _check(name: str, *tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype not in FLOATS or not computable(tensor.dtype):
            raise RuntimeError(f"webgpu: {name} takes float32, float16 or bfloat16 on this adapter, not {tensor.dtype}")


def lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cx: torch.Tensor,
    input_bias: Maybe = None,
    hidden_bias: Maybe = None,
) -> list[torch.Tensor]:
    _check("an LSTM cell", input_gates, hidden_gates, cx)
    biases = _biases(input_bias, hidden_bias)
    inputs = {"x": input_gates, "h": hidden_gates, "c": cx, **biases}
    results = {"hy": cx.shape, "cy": cx.shape, "gates": input_gates.shape}
    return _cell(inputs, results, cx, wgsl.lstm(bool(biases)))


def lstm_cell_backward(
    grad_hy: Maybe, grad_cy: Maybe, cx: torch.Tensor, cy: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[Maybe, ...]:
    if grad_hy is None and grad_cy is None:
        return None, None, None
    inputs = {"gates": workspace, "c": cx, "cy": cy, "gh": grad_hy, "gc": grad_cy}
    body = wgsl.lstm_backward(grad_hy is not None, grad_cy is not None)
    to_c, gates = _cell(inputs, {"to_c": cx.shape, "to_gates": workspace.shape}, cx, body)
    return gates, to_c, gates.sum(0) if has_bias else None


def gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hx: torch.Tensor,
    input_bias: Maybe = None,
    hidden_bias: Maybe = None,
) -> list[torch.Tensor]:
    _check("a GRU cell", input_gates, hidden_gates, hx)
    biases = _biases(input_bias, hidden_bias)
    inputs = {"x": input_gates, "h": hidden_gates, "state": hx, **biases}
    return _cell(inputs, {"hy": hx.shape, "kept": (hx.shape[0], 5 * hx.shape[1])}, hx, wgsl.gru(bool(biases)))


def gru_cell_backward(grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> tuple[Any, ...]:
    gates = (grad_hy.shape[0], 3 * grad_hy.shape[1])
    results = {"to_state": grad_hy.shape, "to_x": gates, "to_h": gates}
    to_state, to_x, to_h = _cell({"g": grad_hy, "kept": workspace}, results, grad_hy, wgsl.GRU_BACKWARD)
    biases = (to_x.sum(0), to_h.sum(0)) if has_bias else (None, None)
    return (to_x, to_h, to_state, *biases)


def register(library: torch.library.Library) -> None:
    library.impl("_thnn_fused_lstm_cell", lstm_cell, KEY)
    library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward, KEY)
    library.impl("_thnn_fused_gru_cell", gru_cell, KEY)
    library.impl("_thnn_fused_gru_cell_backward", gru_cell_backward, KEY)
