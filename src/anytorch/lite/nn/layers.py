"""The everyday layers. Names of parameters are torch's, so that its state dictionaries load."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from anytorch.errors import UsageError
from anytorch.lite import functional as F
from anytorch.lite.create import generator, ones, zeros
from anytorch.lite.dtypes import Array, float32, is_floating
from anytorch.lite.nn.module import Module, Parameter
from anytorch.lite.ops.recurrent import gru_steps, lstm_steps
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


# --- attention and the Transformer's encoder layer -------------------------------------------------------------------


class MultiheadAttention(Module):
    """Self- or cross-attention with several heads; batch first: (B, L, E), (B, S, E) → (B, L, E)."""

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0) -> None:
        if embed_dim % num_heads:
            raise UsageError(f"{embed_dim} cannot be divided among {num_heads} heads")
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.in_proj_weight = uniform(math.sqrt(6 / (4 * embed_dim)), 3 * embed_dim, embed_dim)
        self.in_proj_bias = Parameter(np.zeros(3 * embed_dim))
        self.out_proj = CustomLinear(embed_dim, embed_dim)

    def heads(self, x: CustomTensor) -> CustomTensor:
        """(B, L, E) → (B, heads, L, E / heads)"""
        b, length, e = x.shape
        return x.reshape(b, length, self.num_heads, e // self.num_heads).transpose(1, 2)

    def forward(
        self,
        query: CustomTensor,
        key: CustomTensor | None = None,
        value: CustomTensor | None = None,
        mask: CustomTensor | None = None,
        causal: bool = False,
    ) -> CustomTensor:
        e = self.embed_dim
        if query.ndim != 3 or query.shape[2] != e:
            raise UsageError(f"attention takes (batch, length, {e}), got {query.shape}")
        if key is None:  # self-attention: one product makes all three
            q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).split(e, dim=2)
        else:
            parts = zip((query, key, key if value is None else value), range(3), strict=True)
            q, k, v = (
                F.linear(x, self.in_proj_weight[i * e : (i + 1) * e], self.in_proj_bias[i * e : (i + 1) * e])
                for x, i in parts
            )
        out = F.scaled_dot_product_attention(self.heads(q), self.heads(k), self.heads(v), mask, causal)
        joined = out.transpose(1, 2).reshape(query.shape)  # (B, L, E)
        return F.dropout(self.out_proj(joined), self.dropout, self.training)


class TransformerEncoderLayer(Module):
    """Attention and a two-layer network, each added to what came in; batch first."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str = "relu",
        norm_first: bool = False,
    ) -> None:
        if activation not in ("relu", "gelu"):
            raise UsageError(f"unknown activation {activation!r}; known: 'relu', 'gelu'")
        self.self_attn = MultiheadAttention(d_model, nhead)
        self.linear1 = CustomLinear(d_model, dim_feedforward)
        self.linear2 = CustomLinear(dim_feedforward, d_model)
        self.norm1 = LayerNorm(d_model)
        self.norm2 = LayerNorm(d_model)
        self.dropout, self.norm_first = dropout, norm_first
        self.activation = activation

    def attend(self, x: CustomTensor, mask: CustomTensor | None, causal: bool) -> CustomTensor:
        return F.dropout(self.self_attn(x, mask=mask, causal=causal), self.dropout, self.training)

    def feed_forward(self, x: CustomTensor) -> CustomTensor:
        inner = (F.relu if self.activation == "relu" else F.gelu)(self.linear1(x))
        inner = F.dropout(inner, self.dropout, self.training)
        return F.dropout(self.linear2(inner), self.dropout, self.training)

    def forward(self, x: CustomTensor, mask: CustomTensor | None = None, causal: bool = False) -> CustomTensor:
        if self.norm_first:
            x = x + self.attend(self.norm1(x), mask, causal)
            return x + self.feed_forward(self.norm2(x))
        x = self.norm1(x + self.attend(x, mask, causal))
        return self.norm2(x + self.feed_forward(x))  # type: ignore[no-any-return]


# --- LSTM and GRU; the steps themselves are in `ops.recurrent` -------------------------------------------------------


class Recurrent(Module):
    """What LSTM and GRU share. Parameters are named as torch names them: weight_ih_l0, weight_hh_l0_reverse, …"""

    gates: int

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
    ) -> None:
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.batch_first, self.dropout = batch_first, dropout
        self.directions = 2 if bidirectional else 1
        bound = 1 / math.sqrt(hidden_size)
        for layer in range(num_layers):
            inputs = input_size if layer == 0 else hidden_size * self.directions
            for suffix in self.suffixes(layer):
                setattr(self, f"weight_ih_{suffix}", uniform(bound, self.gates * hidden_size, inputs))
                setattr(self, f"weight_hh_{suffix}", uniform(bound, self.gates * hidden_size, hidden_size))
                setattr(self, f"bias_ih_{suffix}", uniform(bound, self.gates * hidden_size))
                setattr(self, f"bias_hh_{suffix}", uniform(bound, self.gates * hidden_size))

    def suffixes(self, layer: int) -> list[str]:
        return [f"l{layer}", f"l{layer}_reverse"][: self.directions]

    def weights(self, suffix: str) -> list[CustomTensor]:
        return [getattr(self, f"{name}_{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]

    def run(self, x: CustomTensor, states: list[CustomTensor]) -> tuple[CustomTensor, list[CustomTensor]]:
        """All layers and directions: (L, B, I) → (L, B, H · directions) and the last states, each (layers·dirs, B, H)."""
        if x.ndim != 3 or x.shape[2 if self.batch_first else -1] != self.input_size:
            raise UsageError(f"{type(self).__name__} takes 3 dimensions, the last of {self.input_size}; got {x.shape}")
        if self.batch_first:
            x = x.transpose(0, 1)
        shape = (self.num_layers * self.directions, x.shape[1], self.hidden_size)
        dtype = x.dtype if is_floating(x.dtype) else float32
        states = states or [zeros(*shape, dtype=dtype, device=x.device) for _ in range(self.state_count)]
        last: list[list[CustomTensor]] = [[] for _ in states]
        for layer in range(self.num_layers):
            outs = []
            for direction, suffix in enumerate(self.suffixes(layer)):
                start = [state[layer * self.directions + direction] for state in states]
                given = flip(x) if direction else x
                out, ends = self.steps(given, start, self.weights(suffix))
                outs.append(flip(out) if direction else out)
                for kept, end in zip(last, ends, strict=True):
                    kept.append(end)
            x = outs[0] if len(outs) == 1 else F.cat(outs, 2)
            if layer + 1 < self.num_layers:
                x = F.dropout(x, self.dropout, self.training)
        return (x.transpose(0, 1) if self.batch_first else x), [F.stack(kept) for kept in last]

    state_count = 1

    def steps(
        self, x: CustomTensor, start: list[CustomTensor], weights: list[CustomTensor]
    ) -> tuple[CustomTensor, list[CustomTensor]]:
        raise NotImplementedError


def flip(x: CustomTensor) -> CustomTensor:
    return x[::-1]


class LSTM(Recurrent):
    """`output, (h, c) = lstm(x, (h, c))`"""

    gates = 4
    state_count = 2

    def steps(
        self, x: CustomTensor, start: list[CustomTensor], weights: list[CustomTensor]
    ) -> tuple[CustomTensor, list[CustomTensor]]:
        packed = lstm_steps(x, start[0], start[1], *weights)  # (L + 1, B, H)
        return packed[:-1], [packed[-2] if len(packed) > 1 else start[0], packed[-1]]

    def forward(self, x: CustomTensor, state: tuple[CustomTensor, CustomTensor] | None = None) -> Any:
        out, ends = self.run(x, list(state or ()))
        return out, tuple(ends)


class GRU(Recurrent):
    """`output, h = gru(x, h)`"""

    gates = 3

    def steps(
        self, x: CustomTensor, start: list[CustomTensor], weights: list[CustomTensor]
    ) -> tuple[CustomTensor, list[CustomTensor]]:
        out = gru_steps(x, start[0], *weights)
        return out, [out[-1] if len(out) else start[0]]

    def forward(self, x: CustomTensor, h: CustomTensor | None = None) -> Any:
        out, ends = self.run(x, [] if h is None else [h])
        return out, ends[0]
