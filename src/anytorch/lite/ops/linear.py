"""Products of matrices."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from anytorch.errors import UsageError
from anytorch.lite.autograd import Base, array, fit, record
from anytorch.lite.dtypes import Array

T = TypeVar("T", bound=Base)


def product(a: Array, b: Array) -> Array:
    """a @ b. For two matrices `dot` is the same product, and calls BLAS with less ceremony."""
    return array(a.dot(b) if a.ndim <= 2 and b.ndim <= 2 else np.matmul(a, b))


def matmul(a: T, b: T) -> T:
    """Vectors, matrices and batches of matrices: (…, m, k) @ (…, k, n) → (…, m, n)."""
    x, y = a.data, b.data
    if x.dtype != y.dtype:
        raise UsageError(
            f"matmul of {x.dtype} and {y.dtype} is invalid: types differ", hint="convert one: a.to(b.dtype) @ b"
        )
    if x.ndim == 0 or y.ndim == 0 or x.shape[-1] != y.shape[0 if y.ndim == 1 else -2]:
        raise UsageError(f"matmul: the shapes {x.shape} and {y.shape} do not fit")

    def backward(g: Array) -> tuple[Array | None, Array | None]:
        left = x[None, :] if x.ndim == 1 else x  # (…, m, k)
        right = y[:, None] if y.ndim == 1 else y  # (…, k, n)
        if x.ndim == 1:
            g = np.expand_dims(g, -1 if y.ndim == 1 else -2)
        if y.ndim == 1:
            g = np.expand_dims(g, -1)  # (…, m, n)
        of_a = of_b = None
        if a.requires_grad:
            of_a = fit(product(g, np.swapaxes(right, -1, -2)), left.shape, x.dtype).reshape(x.shape)
        if b.requires_grad:
            of_b = fit(product(np.swapaxes(left, -1, -2), g), right.shape, y.dtype).reshape(y.shape)
        return of_a, of_b

    return record("matmul", product(x, y), (a, b), backward, (a, b))


def linear(x: T, weight: T, bias: T | None = None) -> T:
    """x @ weightᵀ + bias: (…, in) → (…, out), as one node."""
    if x.data.dtype != weight.data.dtype or x.data.shape[-1:] != weight.data.shape[1:]:
        raise UsageError(
            f"linear: {x.data.dtype} input of shape {x.data.shape} does not fit {weight.data.dtype} weights of shape "
            f"{weight.data.shape}"
        )
    out_features, in_features = weight.data.shape
    leading = x.data.shape[:-1]
    rows = x.data if x.data.ndim == 2 else x.data.reshape(int(np.prod(leading)), in_features)  # (R, in)
    out = rows.dot(weight.data.T)  # (R, out)
    if bias is not None:
        out += bias.data

    def backward(g: Array) -> list[Array | None]:
        g = g.reshape(-1, out_features)
        gradients: list[Array | None] = [
            g.dot(weight.data).reshape(x.data.shape) if x.requires_grad else None,
            g.T.dot(rows) if weight.requires_grad else None,
        ]
        if bias is not None:
            gradients.append(np.sum(g, axis=0) if bias.requires_grad else None)
        return gradients

    parents = (x, weight) if bias is None else (x, weight, bias)
    return record("linear", out.reshape(*leading, out_features), parents, backward, (x, weight))


def embedding(indices: Base, weight: T) -> T:
    """Rows of `weight` (n, d) by number: (…) → (…, d)."""
    where = indices.data
    if where.dtype.kind not in "iu":
        raise UsageError(f"embedding needs whole numbers, got {where.dtype}", hint="CustomTensor(ids, dtype='int64')")
    if where.size and (where.min() < 0 or where.max() >= weight.data.shape[0]):
        rows = f"rows 0 to {weight.data.shape[0] - 1}"
        raise UsageError(f"embedding: numbers {where.min()} to {where.max()} are out of range: there are {rows}")

    def backward(g: Array) -> tuple[Array]:
        grad = np.zeros_like(weight.data)
        np.add.at(grad, where.reshape(-1), g.reshape(where.size, -1))
        return (grad,)

    return record("embedding", weight.data[where], (weight,), backward)
