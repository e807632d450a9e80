"""Tensors that are not dense arrays, nested and sparse ones: this device has none, and says so before C++ gets lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from anytorch.webgpu.kernels import op_of
from anytorch.webgpu.tensors import KEY

# What makes such a tensor of dense ones. torch's own kernels for these go on to allocate by a C++ allocator that a device
# written in Python does not have: the first of them ended the process.
NESTED = (
    "_nested_tensor_from_tensor_list",
    "_nested_view_from_buffer",
    "_nested_view_from_buffer_copy",
    "_nested_from_padded",
    "_nested_tensor_from_mask",
)
SPARSE = (
    "_to_sparse",
    "_to_sparse.sparse_dim",
    "_to_sparse_csr",
    "_to_sparse_csc",
    "_to_sparse_bsr",
    "_to_sparse_bsc",
    "sparse_coo_tensor.indices",
    "sparse_coo_tensor.indices_size",
    "_sparse_coo_tensor_unsafe",
    "_sparse_coo_tensor_with_dims",
    "_sparse_coo_tensor_with_dims_and_tensors",
    "sparse_compressed_tensor.comp_plain_value_size",
    "sparse_compressed_tensor.comp_plain_value",
    "_sparse_compressed_tensor_unsafe",
    "sparse_mask",
)


# Under which torch dispatches what such a tensor is asked for, if one came to be after all.
KEYS = {
    "NestedTensorPrivateUse1": "nested",
    "SparsePrivateUse1": "sparse",
    "SparseCsrPrivateUse1": "sparse",
    "QuantizedPrivateUse1": "quantized",
}
INSTEAD = {
    "nested": "Use a padded tensor and a mask, or layout=torch.jagged, or keep the nested tensor on the CPU.",
    "sparse": "Use a dense tensor (an embedding with sparse=False, Adam), or keep the sparse one on the CPU.",
    "quantized": "Use torchao's packed weights (docs/guide/quantize.md), or keep the tensor on the CPU.",
}


def refuse(op: Any, kind: str) -> NoReturn:
    raise NotImplementedError(f"{op}: the webgpu device has no {kind} tensors. {INSTEAD[kind]}")


def _refusing(op: Any, kind: str) -> Callable[..., NoReturn]:
    return lambda *_, **__: refuse(op, kind)


def _refusing_all(kind: str) -> Callable[..., NoReturn]:
    return lambda op, *_, **__: refuse(op, kind)


def register(library: torch.library.Library) -> None:
    for names, kind in ((NESTED, "nested"), (SPARSE, "sparse")):
        for name in names:
            op = op_of(name, None)
            if op is not None:
                for key in (KEY, "AutogradPrivateUse1"):
                    library.impl(op, _refusing(op, kind), key)


def register_fallbacks(everything: torch.library.Library) -> None:
    for key, kind in KEYS.items():
        everything.fallback(_refusing_all(kind), key)
