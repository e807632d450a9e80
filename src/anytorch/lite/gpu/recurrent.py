"""LSTM and GRU on the GPU: per step one matrix product and one kernel for all gates; the same backwards.

A kernel may not read and write one buffer, so the states of a step have memory of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anytorch.gpu.wgsl import recurrent as wgsl
from anytorch.lite.gpu.array import GpuArray, check_devices
from anytorch.lite.gpu.kernels import new, threads

LSTM, LSTM_BACKWARD, GRU = wgsl.lstm(True), wgsl.lstm_backward(True, True), wgsl.gru(True)


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
    threads(body, given, made, {"hidden": hidden}, batch * hidden, wgsl.FUNCTIONS)


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
        cell(wgsl.GRU_BACKWARD, {"g": dh + of_out, "kept": there}, outputs, batch, hidden)
        dh = through + to_h.dot(w_hh)
    return of_x, of_h, (dh,)
