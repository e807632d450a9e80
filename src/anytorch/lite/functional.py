"""Everything that is a plain function of tensors, in one place: `from anytorch.lite import functional as F`."""

from __future__ import annotations

import numpy as np

from anytorch.lite.autograd import grad_enabled, no_grad
from anytorch.lite.create import generator, wrap
from anytorch.lite.ops.conv import avg_pool2d, conv2d, max_pool2d
from anytorch.lite.ops.elementwise import clamp, gelu, maximum, minimum, relu, sigmoid, silu, softplus, tanh, where
from anytorch.lite.ops.linear import embedding, linear, matmul
from anytorch.lite.ops.losses import bce_with_logits, cross_entropy, l1_loss, mse_loss
from anytorch.lite.ops.rows import batch_norm, layer_norm, log_softmax, softmax
from anytorch.lite.ops.shape import cat, split, stack
from anytorch.lite.tensors import CustomTensor


def dropout(x: CustomTensor, p: float = 0.5, training: bool = True) -> CustomTensor:
    """Set each number to 0 with probability `p`, and make up for it by scaling the rest."""
    if not training or p == 0:
        return x
    if p == 1:
        return x * 0.0
    mask = (generator().random(x.shape, np.float32) >= p).astype(x.dtype)
    return x * wrap(mask * x.dtype.type(1 / (1 - p)), x.device)


def scaled_dot_product_attention(
    q: CustomTensor, k: CustomTensor, v: CustomTensor, mask: CustomTensor | None = None, causal: bool = False
) -> CustomTensor:
    """softmax(q kᵀ / √d) v: (…, L, d), (…, S, d), (…, S, e) → (…, L, e).

    A boolean mask says where to look; any other is added to the scores.
    """
    scores: CustomTensor = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5  # (…, L, S)
    if causal:
        see = np.tri(q.shape[-2], k.shape[-2], dtype=bool)  # (L, S)
        scores = scores.masked_fill(wrap(~see, q.device), float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == bool else scores + mask
    return matmul(softmax(scores, -1), v)


__all__ = [
    "avg_pool2d",
    "batch_norm",
    "bce_with_logits",
    "cat",
    "clamp",
    "conv2d",
    "cross_entropy",
    "dropout",
    "embedding",
    "gelu",
    "grad_enabled",
    "l1_loss",
    "layer_norm",
    "linear",
    "log_softmax",
    "matmul",
    "max_pool2d",
    "maximum",
    "minimum",
    "mse_loss",
    "no_grad",
    "relu",
    "scaled_dot_product_attention",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "split",
    "stack",
    "tanh",
    "where",
]
