"""Gradients of the larger ops against numeric differences: a second judge beside torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anytorch import lite
from anytorch.lite import functional as F
from anytorch.lite.ops.recurrent import gru_steps, lstm_steps

CLASSES = np.array([0, 2, 1])


def normed(x: Any, w: Any, b: Any) -> Any:
    """Batch norm with the batch's own statistics, which depend on x as well."""
    return F.batch_norm(x, w, b, x.data.mean(axis=(0, 2, 3)), x.data.var(axis=(0, 2, 3)), True, 1e-5)


OPS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "add": (lambda a, b: a + b, ((2, 3), (3,))),
    "sub": (lambda a, b: a - b, ((2, 1), (3,))),
    "mul": (lambda a, b: a * b, ((2, 3), (2, 1))),
    "div": (lambda a, b: a / (b * b + 1), ((2, 3), (3,))),
    "pow": (lambda a, b: (a * a + 0.5) ** b, ((2, 3), (3,))),
    "maximum": (F.maximum, ((2, 3), (3,))),
    "matmul": (lambda a, b: a @ b, ((2, 3, 4), (4, 2))),
    "linear": (F.linear, ((2, 3), (4, 3), (4,))),
    "sum": (lambda a: a.sum(1), ((2, 3),)),
    "mean": (lambda a: a.mean(0), ((2, 3),)),
    "var": (lambda a: a.var(1), ((2, 3),)),
    "amax": (lambda a: a.amax(1), ((2, 3),)),
    "max": (lambda a: a.max(0)[0], ((2, 3),)),
    "cumsum": (lambda a: a.cumsum(1), ((2, 3),)),
    "softmax": (lambda a: a.softmax(1), ((2, 3),)),
    "log_softmax": (lambda a: a.log_softmax(0), ((2, 3),)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, w, b, 4, 1e-5), ((3, 4), (4,), (4,))),
    "batch_norm": (normed, ((3, 2, 2, 2), (2,), (2,))),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, 2, 1, 1, 2), ((2, 4, 5, 4), (2, 2, 3, 2), (2,))),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2, 1), ((1, 2, 4, 3),)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2, 2, 1), ((1, 2, 4, 3),)),
    "getitem": (lambda a: a[[0, 1, 1], 1:], ((2, 3),)),
    "cat": (lambda a, b: F.cat([a, b, a], 1), ((2, 3), (2, 2))),
    "expand": (lambda a: a.expand(3, 2, 4), ((2, 1),)),
    "mse": (F.mse_loss, ((2, 3), (2, 3))),
    "l1": (F.l1_loss, ((2, 3), (2, 3))),
    "bce": (F.bce_with_logits, ((2, 3), (2, 3))),
    "cross_entropy": (lambda x: F.cross_entropy(x, lite.tensor(CLASSES), label_smoothing=0.2), ((3, 4),)),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, causal=True), ((3, 2), (3, 2), (3, 4))),
    "lstm": (lstm_steps, ((3, 2, 3), (2, 2), (2, 2), (8, 3), (8, 2), (8,), (8,))),
    "gru": (gru_steps, ((3, 2, 3), (2, 2), (6, 3), (6, 2), (6,), (6,))),
}


@pytest.mark.parametrize("name", OPS)
def test_gradient(name: str) -> None:
    op, shapes = OPS[name]
    random = np.random.default_rng(3)
    arrays = [random.standard_normal(shape) for shape in shapes]
    tensors = [lite.tensor(a, requires_grad=True) for a in arrays]
    out = op(*tensors)
    weight = random.standard_normal(out.shape)
    out.backward(lite.tensor(weight))

    def loss() -> float:
        return float((op(*(lite.tensor(a) for a in arrays)).numpy() * weight).sum())

    for number, (array, tensor) in enumerate(zip(arrays, tensors, strict=True)):
        numeric = np.zeros_like(array)
        for place in np.ndindex(array.shape):
            kept = array[place]
            array[place] = kept + 1e-6
            up = loss()
            array[place] = kept - 1e-6
            numeric[place] = (up - loss()) / 2e-6
            array[place] = kept
        np.testing.assert_allclose(
            tensor.grad.numpy(), numeric, rtol=1e-5, atol=1e-7, err_msg=f"{name}, input {number}"
        )
