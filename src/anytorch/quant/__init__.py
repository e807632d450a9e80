"""Quantization: weights in 8, 4 or 2 bits, and linear layers that compute with them.

    from anytorch.quant import explain, quantize, save
    quantize(model, "int4")
    print(explain(model))
    save(model, "model-int4")

Importing the package imports no torch; each name below is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anytorch.quant.container import Reader as Reader
    from anytorch.quant.container import save_tensors as save_tensors
    from anytorch.quant.formats import Format as Format
    from anytorch.quant.formats import parse as parse
    from anytorch.quant.tensor import QuantTensor as QuantTensor
    from anytorch.quant.tensor import pack as pack
    from anytorch.quant.tensor import unpack as unpack

PUBLIC = {
    "Format": "anytorch.quant.formats",
    "QuantTensor": "anytorch.quant.tensor",
    "Reader": "anytorch.quant.container",
    "pack": "anytorch.quant.tensor",
    "parse": "anytorch.quant.formats",
    "save_tensors": "anytorch.quant.container",
    "unpack": "anytorch.quant.tensor",
}
__all__ = list(PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'anytorch.quant' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
