"""LSTM and GRU: one layer, one direction, all steps, as one node.

Written step by step with the small ops these would be some ten nodes per step; here the steps are a loop over arrays, and
the gradient is the same loop backwards ("through time"). L steps of B sequences; I numbers come in, H are in the state.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from anytorch.lite.autograd import Base, record
from anytorch.lite.dtypes import Array
from anytorch.lite.moving import on_gpu
from anytorch.lite.ops.elementwise import logistic

T = TypeVar("T", bound=Base)


def steps(name: str, forward: Any, backward: Any, x: T, states: tuple[T, ...], weights: tuple[T, ...]) -> T:
    """The node of all steps. `forward` gives the result and what `backward` needs, h before each step as the last of it;
    `backward` the gradients of the gates (L, B, gates·H), by way of x and by way of h, and those of the first states.
    """
    w_ih, w_hh = weights[:2]
    parents = (x, *states, *weights)
    result, kept = forward(*(p.data for p in parents))

    def of_parents(grad: Array) -> list[Array | None]:
        by_x, by_h, of_states = backward(grad, kept, w_hh.data)
        length, batch, wide = by_x.shape
        rows, hidden = length * batch, w_hh.data.shape[1]
        flat_x = by_x.reshape(rows, wide)
        flat_h = flat_x if by_h is by_x else by_h.reshape(rows, wide)
        of_bias = flat_x.sum(axis=0)
        return [
            flat_x.dot(w_ih.data).reshape(x.data.shape) if x.requires_grad else None,
            *of_states,
            flat_x.T.dot(x.data.reshape(rows, x.data.shape[2])),
            flat_h.T.dot(kept[-1][:length].reshape(rows, hidden)),
            of_bias,
            of_bias if flat_h is flat_x else flat_h.sum(axis=0),
        ]

    return record(name, result, parents, of_parents, (x, w_ih, w_hh))


def lstm_steps(x: T, h0: T, c0: T, w_ih: T, w_hh: T, b_ih: T, b_hh: T) -> T:
    """x (L, B, I), h0 and c0 (B, H), weights (4H, I) and (4H, H) → (L + 1, B, H): the outputs, then the last cell.

    Each step: gates i, f, o = σ(…), candidate g = tanh(…); c = f·c + i·g; h = o·tanh(c).
    """
    return steps("lstm", lstm_forward, lstm_backward, x, (h0, c0), (w_ih, w_hh, b_ih, b_hh))


@on_gpu
def lstm_forward(
    x: Array, h0: Array, c0: Array, w_ih: Array, w_hh: Array, b_ih: Array, b_hh: Array
) -> tuple[Array, Any]:
    """The outputs and the last cell (L + 1, B, H), and what the gradient needs."""
    (length, batch, _), hidden = x.shape, h0.shape[1]
    h2, h3 = 2 * hidden, 3 * hidden
    gates = x.reshape(length * batch, x.shape[2]).dot(w_ih.T) + (b_ih + b_hh)  # (L·B, 4H): all steps at once
    gates = gates.reshape(length, batch, 4 * hidden)
    cells = np.empty((length + 1, batch, hidden), x.dtype)
    outs = np.empty((length + 1, batch, hidden), x.dtype)  # h before each step, and after the last
    cells[0], outs[0] = c0, h0
    for t in range(length):
        a = gates[t]  # (B, 4H)
        a += outs[t].dot(w_hh.T)
        a[:, :h2] = logistic(a[:, :h2])  # i, f
        a[:, h2:h3] = np.tanh(a[:, h2:h3])  # g
        a[:, h3:] = logistic(a[:, h3:])  # o
        cells[t + 1] = a[:, hidden:h2] * cells[t] + a[:, :hidden] * a[:, h2:h3]
        outs[t + 1] = a[:, h3:] * np.tanh(cells[t + 1])
    return np.concatenate([outs[1:], cells[-1:]]), (gates, cells, outs)


@on_gpu
def lstm_backward(grad: Array, kept: Any, w_hh: Array) -> tuple[Array, Array, tuple[Array, ...]]:
    gates, cells, _ = kept
    length, hidden = grad.shape[0] - 1, grad.shape[2]
    h2, h3 = 2 * hidden, 3 * hidden
    dh, dc = np.zeros_like(cells[0]), grad[-1].copy()  # (B, H)
    da = np.empty_like(gates)  # (L, B, 4H): gradients of what went into σ and tanh
    for t in reversed(range(length)):
        i, f, g, o = (gates[t][:, k * hidden : (k + 1) * hidden] for k in range(4))
        dh = dh + grad[t]
        tanh_c = np.tanh(cells[t + 1])
        dc = dc + dh * o * (1 - tanh_c * tanh_c)
        d = da[t]
        d[:, :hidden] = dc * g * i * (1 - i)
        d[:, hidden:h2] = dc * cells[t] * f * (1 - f)
        d[:, h2:h3] = dc * i * (1 - g * g)
        d[:, h3:] = dh * tanh_c * o * (1 - o)
        dc = dc * f
        dh = d.dot(w_hh)
    return da, da, (dh, dc)


def gru_steps(x: T, h0: T, w_ih: T, w_hh: T, b_ih: T, b_hh: T) -> T:
    """x (L, B, I), h0 (B, H), weights (3H, I) and (3H, H) → (L, B, H).

    Each step: r, z = σ(…); n = tanh(from x + r · from h); h = (1 − z)·n + z·h.
    """
    return steps("gru", gru_forward, gru_backward, x, (h0,), (w_ih, w_hh, b_ih, b_hh))


@on_gpu
def gru_forward(x: Array, h0: Array, w_ih: Array, w_hh: Array, b_ih: Array, b_hh: Array) -> tuple[Array, Any]:
    """The outputs (L, B, H), and what the gradient needs."""
    (length, batch, _), hidden = x.shape, h0.shape[1]
    h2 = 2 * hidden
    from_x = (x.reshape(length * batch, x.shape[2]).dot(w_ih.T) + b_ih).reshape(length, batch, 3 * hidden)
    from_h = np.empty_like(from_x)
    gates = np.empty_like(from_x)  # r, z, n
    outs = np.empty((length + 1, batch, hidden), x.dtype)
    outs[0] = h0
    for t in range(length):
        from_h[t] = outs[t].dot(w_hh.T) + b_hh  # (B, 3H)
        a = gates[t]
        a[:, :h2] = logistic(from_x[t][:, :h2] + from_h[t][:, :h2])
        r, z = a[:, :hidden], a[:, hidden:h2]
        a[:, h2:] = np.tanh(from_x[t][:, h2:] + r * from_h[t][:, h2:])
        outs[t + 1] = a[:, h2:] + z * (outs[t] - a[:, h2:])
    return outs[1:], (from_h, gates, outs)


@on_gpu
def gru_backward(grad: Array, kept: Any, w_hh: Array) -> tuple[Array, Array, tuple[Array, ...]]:
    from_h, gates, outs = kept
    length, _, hidden = grad.shape
    h2 = 2 * hidden
    dh = np.zeros_like(outs[0])
    dx, dr = np.empty_like(gates), np.empty_like(gates)  # (L, B, 3H): of the input's part and of the recurrent part
    for t in reversed(range(length)):
        r, z, n = (gates[t][:, k * hidden : (k + 1) * hidden] for k in range(3))
        dh = dh + grad[t]
        dn = dh * (1 - z) * (1 - n * n)
        d = dx[t]
        d[:, :hidden] = dn * from_h[t][:, h2:] * r * (1 - r)
        d[:, hidden:h2] = dh * (outs[t] - n) * z * (1 - z)
        d[:, h2:] = dn
        dr[t][:, :h2] = d[:, :h2]
        dr[t][:, h2:] = dn * r
        dh = dh * z + dr[t].dot(w_hh)
    return dx, dr, (dh,)
