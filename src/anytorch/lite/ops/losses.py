"""Losses: how far predictions are from what they should be, as one number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from anytorch.errors import UsageError
from anytorch.lite.autograd import Base, array, record
from anytorch.lite.dtypes import Array
from anytorch.lite.moving import on_gpu
from anytorch.lite.ops.elementwise import logistic
from anytorch.lite.ops.rows import shifted

T = TypeVar("T", bound=Base)


def reduced(values: Array, reduction: str, n: int) -> tuple[Array, float]:
    """The loss, and what each number's gradient is multiplied by."""
    if reduction == "none":
        return values, 1.0
    if reduction not in ("mean", "sum"):
        raise UsageError(f"unknown reduction {reduction!r}; known: 'mean', 'sum', 'none'")
    share = (1 / n if n else float("nan")) if reduction == "mean" else 1.0
    return array(np.sum(values) * values.dtype.type(share)), share


def same_shape(name: str, prediction: Base, target: Base) -> None:
    if prediction.data.shape != target.data.shape:
        raise UsageError(
            f"{name}: the prediction has shape {prediction.data.shape}, the target {target.data.shape}",
            hint="reshape one of them; broadcasting here is nearly always a mistake",
        )


def of_difference(
    name: str, p: T, t: T, reduction: str, loss: Callable[[Array], Array], slope: Callable[[Array, Array], Array]
) -> T:
    """A loss of p − t; `slope(difference, g)` is its gradient."""
    same_shape(name, p, t)
    difference = p.data - t.data
    result, share = reduced(loss(difference), reduction, difference.size)

    def backward(g: Array) -> tuple[Array, Array]:
        grad = slope(difference, share * g)
        return grad, -grad

    return record(name, result, (p, t), backward)


def mse_loss(prediction: T, target: T, reduction: str = "mean") -> T:
    """(p − t)²"""
    return of_difference("mse_loss", prediction, target, reduction, lambda d: d * d, lambda d, g: d * (2 * g))


def l1_loss(prediction: T, target: T, reduction: str = "mean") -> T:
    """|p − t|"""
    return of_difference("l1_loss", prediction, target, reduction, np.abs, lambda d, g: np.sign(d) * g)


def bce_with_logits(logits: T, target: T, reduction: str = "mean") -> T:
    """−t·log σ(x) − (1−t)·log(1−σ(x)) = max(x, 0) − x·t + log(1 + e^−|x|), which never overflows."""
    same_shape("bce_with_logits", logits, target)
    x, t = logits.data, target.data
    loss, share = reduced(np.maximum(x, 0) - x * t + np.log1p(np.exp(-np.abs(x))), reduction, x.size)

    def backward(g: Array) -> tuple[Array, Array]:
        return (logistic(x) - t) * (share * g), -x * (share * g)

    return record("bce_with_logits", loss, (logits, target), backward, (logits, target))


@on_gpu
def class_losses(logits: Array, named: Array, kept: Array, smoothing: float) -> tuple[Array, Any]:
    """Logits (R, C) and classes (R,) → losses (R,), nothing for rows that are not kept; and what the gradient needs."""
    z = shifted(logits, 1)
    e = np.exp(z)  # (R, C)
    total = np.sum(e, axis=1, keepdims=True)  # (R, 1)
    log_total = np.log(total)[:, 0]
    losses = log_total - z[np.arange(len(z)), named]
    if smoothing:
        losses = (1 - smoothing) * losses + smoothing * (log_total - np.mean(z, axis=1))
    return losses * kept, (e, total)


@on_gpu
def of_class_losses(g: Array, state: Any, named: Array, kept: Array, smoothing: float) -> Array:
    """The gradients of the losses (R,) → those of the logits (R, C): the softmax, less 1 at the right class."""
    e, total = state
    grad = e / total
    grad[np.arange(len(grad)), named] -= 1 - smoothing
    grad -= smoothing / grad.shape[1]
    grad *= (g * kept)[:, None]
    return grad


def cross_entropy(
    logits: T, target: Base, reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0
) -> T:
    """−log softmax(logits)[target]: logits (N, C) or (N, C, …), targets the numbers of the classes, (N) or (N, …)."""
    if logits.data.ndim < 2 or target.data.shape != (logits.data.shape[0], *logits.data.shape[2:]):
        raise UsageError(f"cross_entropy: logits {logits.data.shape} and targets {target.data.shape} do not fit")
    if target.data.dtype.kind not in "iu":
        raise UsageError(f"cross_entropy: targets are class numbers, got {target.data.dtype}")
    classes = logits.data.shape[1]
    moved = np.moveaxis(logits.data, 1, -1)  # (N, …, C)
    kept = target.data.reshape(-1) != ignore_index  # (R,)
    named = np.where(kept, target.data.reshape(-1), 0)
    if named.size and (named.min() < 0 or named.max() >= classes):
        raise UsageError(f"cross_entropy: a target lies outside 0 … {classes - 1}")
    losses, state = class_losses(moved.reshape(-1, classes), named, kept, label_smoothing)
    loss, share = reduced(losses.reshape(target.data.shape), reduction, int(np.sum(kept)))

    def backward(g: Array) -> tuple[Array]:
        of_rows = np.broadcast_to(g, target.data.shape).reshape(-1) * g.dtype.type(share)
        grad = of_class_losses(of_rows, state, named, kept, label_smoothing)
        return (np.moveaxis(grad.reshape(moved.shape), -1, 1),)

    return record("cross_entropy", loss, (logits,), backward)
