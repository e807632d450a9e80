"""Losses: how far predictions are from what they should be, as one number."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from anytorch.errors import UsageError
from anytorch.lite.autograd import Base, array, record
from anytorch.lite.dtypes import Array
from anytorch.lite.moving import through_host
from anytorch.lite.ops.elementwise import logistic
from anytorch.lite.ops.rows import shifted

T = TypeVar("T", bound=Base)


def reduced(values: Array, reduction: str, n: int) -> tuple[Array, float]:
    """The loss, and what each number's gradient is multiplied by."""
    if reduction == "none":
        return values, 1.0
    if reduction not in ("mean", "sum"):
        raise UsageError(f"unknown reduction {reduction!r}; there are 'mean', 'sum' and 'none'")
    share = (1 / n if n else float("nan")) if reduction == "mean" else 1.0
    return array(np.sum(values) * values.dtype.type(share)), share


def same_shape(name: str, prediction: Base, target: Base) -> None:
    if prediction.data.shape != target.data.shape:
        raise UsageError(
            f"{name}: the prediction has shape {prediction.data.shape}, the target {target.data.shape}",
            hint="reshape one of them; broadcasting here is nearly always a mistake",
        )


def mse_loss(prediction: T, target: T, reduction: str = "mean") -> T:
    """(p − t)²"""
    same_shape("mse_loss", prediction, target)
    difference = prediction.data - target.data
    loss, share = reduced(difference * difference, reduction, difference.size)

    def backward(g: Array) -> tuple[Array, Array]:
        grad = difference * (2 * share * g)
        return grad, -grad

    return record("mse_loss", loss, (prediction, target), backward)


def l1_loss(prediction: T, target: T, reduction: str = "mean") -> T:
    """|p − t|"""
    same_shape("l1_loss", prediction, target)
    difference = prediction.data - target.data
    loss, share = reduced(np.abs(difference), reduction, difference.size)

    def backward(g: Array) -> tuple[Array, Array]:
        grad = np.sign(difference) * (share * g)
        return grad, -grad

    return record("l1_loss", loss, (prediction, target), backward)


@through_host
def bce_with_logits(logits: T, target: T, reduction: str = "mean") -> T:
    """−t·log σ(x) − (1−t)·log(1−σ(x)) = max(x, 0) − x·t + log(1 + e^−|x|), which never overflows."""
    same_shape("bce_with_logits", logits, target)
    x, t = logits.data, target.data
    loss, share = reduced(np.maximum(x, 0) - x * t + np.log1p(np.exp(-np.abs(x))), reduction, x.size)

    def backward(g: Array) -> tuple[Array, Array]:
        return (logistic(x) - t) * (share * g), -x * (share * g)

    return record("bce_with_logits", loss, (logits, target), backward, (logits, target))


@through_host
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
    z = shifted(moved.reshape(-1, classes), 1)  # (R, C)
    e = np.exp(z)
    total = np.sum(e, axis=1, keepdims=True)
    where = target.data.reshape(-1)
    kept = where != ignore_index
    named = np.where(kept, where, 0)
    if named.size and (named.min() < 0 or named.max() >= classes):
        raise UsageError(f"cross_entropy: a target lies outside 0 … {classes - 1}")
    rows = np.arange(len(where))
    log_total = np.log(total)[:, 0]  # (R,)
    loss_of_row = log_total - z[rows, named]
    if label_smoothing:
        loss_of_row = (1 - label_smoothing) * loss_of_row + label_smoothing * (log_total - np.mean(z, axis=1))
    loss_of_row = loss_of_row * kept
    loss, share = reduced(loss_of_row.reshape(target.data.shape), reduction, int(np.sum(kept)))

    def backward(g: Array) -> tuple[Array]:
        grad = e / total  # the softmax
        grad[rows, named] -= 1 - label_smoothing
        grad -= label_smoothing / classes
        grad *= (np.broadcast_to(g, target.data.shape).reshape(-1, 1) * kept[:, None]) * grad.dtype.type(share)
        return (np.moveaxis(grad.reshape(moved.shape), -1, 1),)

    return record("cross_entropy", loss, (logits,), backward)
