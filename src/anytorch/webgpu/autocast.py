"""Which ops change precision inside `torch.autocast("webgpu")`: torch's own lists for a GPU.

A Python kernel on the autocast key casts the arguments and calls the op again below that key.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from anytorch.webgpu.tensors import NAME, aten

KEY = "AutocastPrivateUse1"
_BELOW = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEY))


LOWER_PRECISION = (
    "matmul linear mm mv bmm addmm addmv addr addbmm baddbmm _addmm_activation chain_matmul linalg_multi_dot conv1d conv2d "
    "conv3d convolution _convolution conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d prelu "
    "scaled_dot_product_attention gru_cell lstm_cell rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell _thnn_fused_gru_cell"
)

FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm rms_norm "
    "group_norm native_layer_norm native_group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss "
    "cosine_embedding_loss nll_loss nll_loss2d cross_entropy_loss hinge_embedding_loss kl_div l1_loss smooth_l1_loss "
    "huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss "
    "multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp norm"
)

# These take a result dtype; setting it is cheaper than casting the input.
FLOAT32_RESULT = "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum"

WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == NAME
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast_one(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype is not dtype and _eligible(value) else value
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
        return [_cast_one(item, dtype) for item in value]
    return value


def _call(op: Any, args: Any, kwargs: dict[str, Any], dtype: torch.dtype | None = None) -> Any:
    """The op below autocast, with its tensors in `dtype` if there is one. The casts are recorded by autograd."""
    with torch._C._ExcludeDispatchKeyGuard(_BELOW):
        if dtype is not None:
            args = [_cast_one(value, dtype) for value in args]
            kwargs = {name: _cast_one(value, dtype) for name, value in kwargs.items()} if kwargs else kwargs
        return op(*args, **kwargs)


def _to(dtype: torch.dtype | None, op: Any) -> Callable[..., Any]:
    """The op in `dtype`; in the one autocast was asked for, if that is None."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return _call(op, args, kwargs, torch.get_autocast_dtype(NAME) if dtype is None else dtype)

    return call


_to_lower, _to_float32 = partial(_to, None), partial(_to, torch.float32)


def _result_float32(op: Any) -> Callable[..., Any]:
    names = [a.name for a in op._schema.arguments]
    if "dtype" not in names:
        return _to_float32(op)
    place = names.index("dtype")

    def call(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if place < len(args) else kwargs.get("dtype")
        if given is None and any(_eligible(v) for v in args):
            if place < len(args):
                args = (*args[:place], torch.float32, *args[place + 1 :])
            else:
                kwargs = {**kwargs, "dtype": torch.float32}
        return _call(op, args, kwargs)

    return call


def _to_widest(op: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        dtypes = {v.dtype for v in tree_leaves((args, kwargs)) if _eligible(v)}
        return _call(
            op, args, kwargs, torch.float32 if len(dtypes) > 1 else None
        )  # the widest of any two kinds is this

    return call


def _binary_cross_entropy(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: use "
        "binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss, which include the sigmoid"
    )


def _functional(name: str) -> list[Any]:
    """The overloads of an op that make their own result; none where this torch has no such op."""
    packet = getattr(aten, name, None)
    if packet is None:
        return []
    found = [getattr(packet, overload) for overload in packet.overloads()]
    return [
        op
        for op in found
        if not any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)
        and not any("Dimname" in str(a.type) for a in op._schema.arguments)
    ]


def register(library: torch.library.Library) -> None:
    for names, make in (
        (LOWER_PRECISION, _to_lower),
        (FLOAT32, _to_float32),
        (FLOAT32_RESULT, _result_float32),
        (WIDEST, _to_widest),
    ):
        for op in itertools.chain.from_iterable(map(_functional, names.split())):
            library.impl(op, make(op), KEY)
    library.impl("binary_cross_entropy", _binary_cross_entropy, KEY)
