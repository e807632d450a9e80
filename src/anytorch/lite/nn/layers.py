"""The everyday layers. Names of parameters are torch's, so that its state dictionaries load."""

from __future__ import annotations

import math

import numpy as np

from anytorch.errors import UsageError
from anytorch.lite import functional as F
from anytorch.lite.create import generator, ones, zeros
from anytorch.lite.dtypes import Array
from anytorch.lite.nn.module import Module, Parameter
from anytorch.lite.ops.windows import Pair, pair
from anytorch.lite.tensors import CustomTensor


def uniform(bound: float, *shape: int) -> Parameter:
    return Parameter(generator().uniform(-bound, bound, shape))


class CustomLinear(Module):
    """y = x Wᵀ + b: (…, in_features) → (…, out_features)"""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        if min(in_features, out_features) < 0:
            raise UsageError(f"invalid layer from {in_features} to {out_features} features: use numbers above 0")
        self.in_features, self.out_features = in_features, out_features
        bound = 1 / math.sqrt(in_features) if in_features else 0.0
        self.weight = uniform(bound, out_features, in_features)
        self.bias = uniform(bound, out_features) if bias else None

    def forward(self, x: CustomTensor) -> CustomTensor:
        return F.linear(x, self.weight, self.bias)

    def describe(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class CustomConv2d(Module):
    """(N, in_channels, H, W) → (N, out_channels, oh, ow)"""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise UsageError(f"{in_channels} and {out_channels} channels cannot be divided into {groups} groups")
        kh, kw = pair(kernel_size)
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, (kh, kw)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        bound = 1 / math.sqrt(in_channels // groups * kh * kw)
        self.weight = uniform(bound, out_channels, in_channels // groups, kh, kw)
        self.bias = uniform(bound, out_channels) if bias else None

    def forward(self, x: CustomTensor) -> CustomTensor:
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def describe(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, {self.kernel_size}, stride={self.stride}, padding={self.padding}"
        )


class BatchNorm2d(Module):
    """Normalises each channel of (N, C, H, W) over the batch; in `eval()` with the running statistics of training."""

    dims: tuple[int, ...] = (4,)

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True) -> None:
        self.eps, self.momentum = eps, momentum
        self.weight = Parameter(np.ones(num_features)) if affine else None
        self.bias = Parameter(np.zeros(num_features)) if affine else None
        self.running_mean = zeros(num_features)
        self.running_var = ones(num_features)
        self.num_batches_tracked = zeros(dtype=np.int64)

    def forward(self, x: CustomTensor) -> CustomTensor:
        if x.ndim not in self.dims or x.shape[1] != self.running_mean.shape[0]:
            raise UsageError(
                f"{type(self).__name__} has {self.running_mean.shape[0]} channels; the input has shape {x.shape}"
            )
        if self.training:
            mean, var = self.batch_statistics(x)
        else:
            mean, var = self.running_mean.data, self.running_var.data
        return F.batch_norm(x, self.weight, self.bias, mean, var, self.training, self.eps)

    def batch_statistics(self, x: CustomTensor) -> tuple[Array, Array]:
        over = (0, *range(2, x.ndim))
        n = x.numel() // x.shape[1]
        if n < 2:
            raise UsageError(f"training a batch norm needs more than one value per channel; the input is {x.shape}")
        mean, var = x.data.mean(axis=over), x.data.var(axis=over)
        keep = 1 - self.momentum
        self.running_mean.data[...] = keep * self.running_mean.data + self.momentum * mean
        self.running_var.data[...] = keep * self.running_var.data + self.momentum * var * (n / (n - 1))
        self.num_batches_tracked.data[...] += 1
        return mean, var


class BatchNorm1d(BatchNorm2d):
    """The same for (N, C) and (N, C, L)."""

    dims = (2, 3)


class LayerNorm(Module):
    """Normalises the last dimensions, `normalized_shape`, of each example by itself."""

    def __init__(self, normalized_shape: int | tuple[int, ...], eps: float = 1e-5, affine: bool = True) -> None:
        self.shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.weight = Parameter(np.ones(self.shape)) if affine else None
        self.bias = Parameter(np.zeros(self.shape)) if affine else None

    def forward(self, x: CustomTensor) -> CustomTensor:
        if x.shape[-len(self.shape) :] != self.shape:
            raise UsageError(f"LayerNorm over {self.shape}: the input has shape {x.shape}")
        return F.layer_norm(x, self.weight, self.bias, math.prod(self.shape), self.eps)


class Dropout(Module):
    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p <= 1:
            raise UsageError(f"invalid dropout probability {p}: use a number from 0 to 1")
        self.p = p

    def forward(self, x: CustomTensor) -> CustomTensor:
        return F.dropout(x, self.p, self.training)

    def describe(self) -> str:
        return f"p={self.p}"


class Embedding(Module):
    """A learned vector per number: (…) whole numbers → (…, embedding_dim)"""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        self.weight = Parameter(generator().standard_normal((num_embeddings, embedding_dim)))

    def forward(self, indices: CustomTensor) -> CustomTensor:
        return F.embedding(indices, self.weight)


class MaxPool2d(Module):
    def __init__(self, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> None:
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding

    def forward(self, x: CustomTensor) -> CustomTensor:
        return F.max_pool2d(x, self.kernel_size, self.stride, self.padding)


class AvgPool2d(MaxPool2d):
    def forward(self, x: CustomTensor) -> CustomTensor:
        return F.avg_pool2d(x, self.kernel_size, self.stride, self.padding)


class Flatten(Module):
    def forward(self, x: CustomTensor) -> CustomTensor:
        return x.flatten(1)


class ReLU(Module):
    def forward(self, x: CustomTensor) -> CustomTensor:
        return F.relu(x)


class GELU(Module):
    def forward(self, x: CustomTensor) -> CustomTensor:
        return F.gelu(x)


class SiLU(Module):
    def forward(self, x: CustomTensor) -> CustomTensor:
        return F.silu(x)


class Sigmoid(Module):
    def forward(self, x: CustomTensor) -> CustomTensor:
        return F.sigmoid(x)


class Tanh(Module):
    def forward(self, x: CustomTensor) -> CustomTensor:
        return F.tanh(x)


class Softmax(Module):
    def __init__(self, dim: int = -1) -> None:
        self.dim = dim

    def forward(self, x: CustomTensor) -> CustomTensor:
        return F.softmax(x, self.dim)


class Loss(Module):
    def __init__(self, reduction: str = "mean") -> None:
        self.reduction = reduction


class CustomMSELoss(Loss):
    """(prediction − target)², averaged"""

    def forward(self, prediction: CustomTensor, target: CustomTensor) -> CustomTensor:
        return F.mse_loss(prediction, target, self.reduction)


class L1Loss(Loss):
    """|prediction − target|, averaged"""

    def forward(self, prediction: CustomTensor, target: CustomTensor) -> CustomTensor:
        return F.l1_loss(prediction, target, self.reduction)


class BCEWithLogitsLoss(Loss):
    def forward(self, logits: CustomTensor, target: CustomTensor) -> CustomTensor:
        return F.bce_with_logits(logits, target, self.reduction)


class CrossEntropyLoss(Loss):
    """Logits (N, C, …) against the numbers of the right classes (N, …)."""

    def __init__(self, reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0) -> None:
        super().__init__(reduction)
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing

    def forward(self, logits: CustomTensor, target: CustomTensor) -> CustomTensor:
        return F.cross_entropy(logits, target, self.reduction, self.ignore_index, self.label_smoothing)
