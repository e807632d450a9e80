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


def _has_kernel(*tensors: torch.Tensor) -> bool:
    return all(tensor.dtype in FLOATS and computable(tensor.dtype) for tensor in tensors)


def _summed(*terms: Maybe) -> torch.Tensor:
    """Gates and their biases."""
    first, *rest = [term for term in terms if term is not None]
    for term in rest:
        first = first + term
    return first


def lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cx: torch.Tensor,
    input_bias: Maybe = None,
    hidden_bias: Maybe = None,
) -> list[torch.Tensor]:
    if not _has_kernel(input_gates, hidden_gates, cx):
        return _lstm_by_ops(_summed(input_gates, hidden_gates, input_bias, hidden_bias), cx)
    biases = _biases(input_bias, hidden_bias)
    inputs = {"x": input_gates, "h": hidden_gates, "c": cx, **biases}
    results = {"hy": cx.shape, "cy": cx.shape, "gates": input_gates.shape}
    return _cell(inputs, results, cx, wgsl.lstm(bool(biases)))


def lstm_cell_backward(
    grad_hy: Maybe, grad_cy: Maybe, cx: torch.Tensor, cy: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[Maybe, ...]:
    if grad_hy is None and grad_cy is None:
        return None, None, None
    if not _has_kernel(workspace, cx):
        to_c, gates = _lstm_backward_by_ops(grad_hy, grad_cy, cx, cy, workspace)
        return gates, to_c, gates.sum(0) if has_bias else None
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
    if not _has_kernel(input_gates, hidden_gates, hx):
        return _gru_by_ops(_summed(input_gates, input_bias), _summed(hidden_gates, hidden_bias), hx)
    biases = _biases(input_bias, hidden_bias)
    inputs = {"x": input_gates, "h": hidden_gates, "state": hx, **biases}
    return _cell(inputs, {"hy": hx.shape, "kept": (hx.shape[0], 5 * hx.shape[1])}, hx, wgsl.gru(bool(biases)))


def gru_cell_backward(grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> tuple[Any, ...]:
    gates = (grad_hy.shape[0], 3 * grad_hy.shape[1])
    results = {"to_state": grad_hy.shape, "to_x": gates, "to_h": gates}
    if _has_kernel(grad_hy, workspace):
        to_state, to_x, to_h = _cell({"g": grad_hy, "kept": workspace}, results, grad_hy, wgsl.GRU_BACKWARD)
    else:
        to_state, to_x, to_h = _gru_backward_by_ops(grad_hy, workspace)
    biases = (to_x.sum(0), to_h.sum(0)) if has_bias else (None, None)
    return (to_x, to_h, to_state, *biases)


# --- other dtypes (float64): the same by ops of torch's, each of which has a kernel or runs on the CPU ------------------


def _lstm_by_ops(gates: torch.Tensor, cx: torch.Tensor) -> list[torch.Tensor]:
    into, kept, new, shown = gates.chunk(4, 1)
    into, kept, new, shown = into.sigmoid(), kept.sigmoid(), new.tanh(), shown.sigmoid()
    cy = kept * cx + into * new
    return [shown * cy.tanh(), cy, torch.cat((into, kept, new, shown), 1)]


def _lstm_backward_by_ops(
    grad_hy: Maybe, grad_cy: Maybe, cx: torch.Tensor, cy: torch.Tensor, workspace: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    into, kept, new, shown = workspace.chunk(4, 1)
    bounded = cy.tanh()
    hy = torch.zeros_like(cx) if grad_hy is None else grad_hy
    to_cy = hy * shown * (1 - bounded * bounded)
    to_cy = to_cy if grad_cy is None else to_cy + grad_cy
    gates = (
        to_cy * new * into * (1 - into),
        to_cy * cx * kept * (1 - kept),
        to_cy * into * (1 - new * new),
        hy * bounded * shown * (1 - shown),
    )
    return to_cy * kept, torch.cat(gates, 1)


def _gru_by_ops(x: torch.Tensor, h: torch.Tensor, hx: torch.Tensor) -> list[torch.Tensor]:
    (x_reset, x_update, x_new), (h_reset, h_update, h_new) = x.chunk(3, 1), h.chunk(3, 1)
    reset, update = (x_reset + h_reset).sigmoid(), (x_update + h_update).sigmoid()
    new = (x_new + reset * h_new).tanh()
    return [new + update * (hx - new), torch.cat((reset, update, new, hx, h_new), 1)]


def _gru_backward_by_ops(grad_hy: torch.Tensor, workspace: torch.Tensor) -> tuple[torch.Tensor, ...]:
    reset, update, new, hx, h_new = workspace.chunk(5, 1)
    to_new = grad_hy * (1 - update) * (1 - new * new)
    to_update = grad_hy * (hx - new) * update * (1 - update)
    to_reset = to_new * h_new * reset * (1 - reset)
    to_x = torch.cat((to_reset, to_update, to_new), 1)
    return grad_hy * update, to_x, torch.cat((to_reset, to_update, to_new * reset), 1)


def register(library: torch.library.Library) -> None:
    library.impl("_thnn_fused_lstm_cell", lstm_cell, KEY)
    library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward, KEY)
    library.impl("_thnn_fused_gru_cell", gru_cell, KEY)
    library.impl("_thnn_fused_gru_cell_backward", gru_cell_backward, KEY)
