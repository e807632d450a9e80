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
    from anytorch.quant.explanation import explain as explain
    from anytorch.quant.formats import Format as Format
    from anytorch.quant.formats import parse as parse
    from anytorch.quant.linear import QuantLinear as QuantLinear
    from anytorch.quant.lora import LoRALinear as LoRALinear
    from anytorch.quant.lora import add_lora as add_lora
    from anytorch.quant.lora import lora_parameters as lora_parameters
    from anytorch.quant.lora import merge_lora as merge_lora
    from anytorch.quant.model import Report as Report
    from anytorch.quant.model import dequantize as dequantize
    from anytorch.quant.model import quantize as quantize
    from anytorch.quant.pruning import finish_pruning as finish_pruning
    from anytorch.quant.pruning import prune as prune
    from anytorch.quant.pruning import prune_neurons as prune_neurons
    from anytorch.quant.pruning import sparsity as sparsity
    from anytorch.quant.qat import convert as convert
    from anytorch.quant.qat import fake_quantize as fake_quantize
    from anytorch.quant.qat import prepare_qat as prepare_qat
    from anytorch.quant.store import load as load
    from anytorch.quant.store import save as save
    from anytorch.quant.tensor import QuantTensor as QuantTensor
    from anytorch.quant.tensor import pack as pack
    from anytorch.quant.tensor import unpack as unpack

PUBLIC = {
    "Format": "anytorch.quant.formats",
    "LoRALinear": "anytorch.quant.lora",
    "QuantLinear": "anytorch.quant.linear",
    "QuantTensor": "anytorch.quant.tensor",
    "Reader": "anytorch.quant.container",
    "Report": "anytorch.quant.model",
    "add_lora": "anytorch.quant.lora",
    "convert": "anytorch.quant.qat",
    "dequantize": "anytorch.quant.model",
    "explain": "anytorch.quant.explanation",
    "fake_quantize": "anytorch.quant.qat",
    "finish_pruning": "anytorch.quant.pruning",
    "load": "anytorch.quant.store",
    "lora_parameters": "anytorch.quant.lora",
    "merge_lora": "anytorch.quant.lora",
    "pack": "anytorch.quant.tensor",
    "parse": "anytorch.quant.formats",
    "prepare_qat": "anytorch.quant.qat",
    "prune": "anytorch.quant.pruning",
    "prune_neurons": "anytorch.quant.pruning",
    "quantize": "anytorch.quant.model",
    "save": "anytorch.quant.store",
    "save_tensors": "anytorch.quant.container",
    "sparsity": "anytorch.quant.pruning",
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
