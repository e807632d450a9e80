"""LSTM and GRU on the GPU: per step one matrix product and one kernel for all gates; the same backwards.

A kernel may not read and write one buffer, so the states of a step have memory of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anytorch.gpu.wgsl import recurrent as wgsl
from anytorch.lite.gpu.array import GpuArray, check_devices
from anytorch.lite.gpu.kernels import threads
from anytorch.lite.gpu.memory import new

LSTM, LSTM_BACKWARD, GRU = wgsl.lstm(True), wgsl.lstm_backward(True, True), wgsl.gru(True)


def empty(*shape: int) -> GpuArray:
    return GpuArray(new(shape))


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
    from_x = x.reshape(length * batch, -1).dot(w_ih.T).reshape(length, batch, -1)  # (L, B, 4H)
    gates = empty(length, batch, 4 * hidden)
    outs = empty(length + 2, batch, hidden)  # h0, the outputs, the last cell
    outs[0] = h0
    cells = [c0.dense()]
    for t in range(length):
        cells.append(empty(batch, hidden))
        inputs = {"x": from_x[t], "h": outs[t].dot(w_hh.T), "c": cells[t], "xb": b_ih, "hb": b_hh}
        outputs = {"hy": outs[t + 1], "cy": cells[t + 1], "gates": gates[t]}
        cell(LSTM, inputs, outputs, batch, hidden)
    outs[length + 1] = cells[-1]
    return outs[1:], (gates, cells, outs)


def lstm_backward(
    grad: GpuArray, kept: Any, x: GpuArray, w_ih: GpuArray, w_hh: GpuArray, wanted: bool
) -> list[GpuArray | None]:
    gates, cells, outs = kept
    length, batch, hidden = grad.shape[0] - 1, grad.shape[1], grad.shape[2]
    of_gates = empty(length, batch, 4 * hidden)
    dh, dc = np.zeros_like(cells[0]), grad[length]
    for t in reversed(range(length)):
        inputs = {"gates": gates[t], "c": cells[t], "cy": cells[t + 1], "gh": dh + grad[t], "gc": dc}
        dc = empty(batch, hidden)
        cell(LSTM_BACKWARD, inputs, {"to_gates": of_gates[t], "to_c": dc}, batch, hidden)
        dh = of_gates[t].dot(w_hh)
    flat = of_gates.reshape(length * batch, 4 * hidden)
    of_bias = flat.sum(0)
    return [
        flat.dot(w_ih).reshape(x.shape) if wanted else None,
        dh,
        dc,
        flat.T.dot(x.reshape(length * batch, -1)),
        flat.T.dot(outs[:length].reshape(length * batch, hidden)),
        of_bias,
        of_bias,
    ]


def gru_forward(
    x: GpuArray, h0: GpuArray, w_ih: GpuArray, w_hh: GpuArray, b_ih: GpuArray, b_hh: GpuArray
) -> tuple[GpuArray, Any]:
    """x (L, B, I), h0 (B, H) → (L, B, H), and what the gradient needs."""
    check_devices("gru", (h0, w_ih, w_hh, b_ih, b_hh))
    (length, batch, _), hidden = x.shape, h0.shape[1]
    from_x = x.reshape(length * batch, -1).dot(w_ih.T).reshape(length, batch, -1)  # (L, B, 3H)
    kept = empty(length, batch, 5 * hidden)
    outs = empty(length + 1, batch, hidden)
    outs[0] = state = h0.dense()
    for t in range(length):
        fresh = empty(batch, hidden)
        inputs = {"x": from_x[t], "h": state.dot(w_hh.T), "state": state, "xb": b_ih, "hb": b_hh}
        cell(GRU, inputs, {"hy": fresh, "kept": kept[t]}, batch, hidden)
        outs[t + 1] = state = fresh
    return outs[1:], (kept, outs)


def gru_backward(
    grad: GpuArray, saved: Any, x: GpuArray, w_ih: GpuArray, w_hh: GpuArray, wanted: bool
) -> list[GpuArray | None]:
    kept, outs = saved
    length, batch, hidden = grad.shape
    of_x, of_h = empty(length, batch, 3 * hidden), empty(length, batch, 3 * hidden)
    dh = np.zeros_like(outs[0])
    for t in reversed(range(length)):
        through = empty(batch, hidden)
        outputs = {"to_x": of_x[t], "to_h": of_h[t], "to_state": through}
        cell(wgsl.GRU_BACKWARD, {"g": dh + grad[t], "kept": kept[t]}, outputs, batch, hidden)
        dh = through + of_h[t].dot(w_hh)
    flat_x, flat_h = of_x.reshape(length * batch, -1), of_h.reshape(length * batch, -1)
    return [
        flat_x.dot(w_ih).reshape(x.shape) if wanted else None,
        dh,
        flat_x.T.dot(x.reshape(length * batch, -1)),
        flat_h.T.dot(outs[:length].reshape(length * batch, hidden)),
        flat_x.sum(0),
        flat_h.sum(0),
    ]
