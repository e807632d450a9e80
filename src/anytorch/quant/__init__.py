"""Quantization: weights in 8, 4 or 2 bits, and linear layers that compute with them.

    from anytorch.quant import explain, quantize, save
    quantize(model, "int4")
    print(explain(model))
    save(model, "model-int4")

Importing the package imports no torch; each name below is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytorch.lazy import lazy_names

if TYPE_CHECKING:
    from anytorch.quant.container import Reader as Reader
    from anytorch.quant.container import load as load
    from anytorch.quant.container import save as save
    from anytorch.quant.container import save_tensors as save_tensors
    from anytorch.quant.formats import Format as Format
    from anytorch.quant.formats import parse as parse
    from anytorch.quant.linear import QuantLinear as QuantLinear
    from anytorch.quant.lora import LoRALinear as LoRALinear
    from anytorch.quant.lora import add_lora as add_lora
    from anytorch.quant.lora import lora_parameters as lora_parameters
    from anytorch.quant.lora import merge_lora as merge_lora
    from anytorch.quant.model import Report as Report
    from anytorch.quant.model import dequantize as dequantize
    from anytorch.quant.model import explain as explain
    from anytorch.quant.model import quantize as quantize
    from anytorch.quant.pruning import finish_pruning as finish_pruning
    from anytorch.quant.pruning import prune as prune
    from anytorch.quant.pruning import prune_neurons as prune_neurons
    from anytorch.quant.pruning import sparsity as sparsity
    from anytorch.quant.qat import convert as convert
    from anytorch.quant.qat import fake_quantize as fake_quantize
    from anytorch.quant.qat import prepare_qat as prepare_qat
    from anytorch.quant.tensor import QuantTensor as QuantTensor
    from anytorch.quant.tensor import pack as pack
    from anytorch.quant.tensor import unpack as unpack

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "container": "Reader load save save_tensors",
        "formats": "Format parse",
        "linear": "QuantLinear",
        "lora": "LoRALinear add_lora lora_parameters merge_lora",
        "model": "Report dequantize explain quantize",
        "pruning": "finish_pruning prune prune_neurons sparsity",
        "qat": "convert fake_quantize prepare_qat",
        "tensor": "QuantTensor pack unpack",
    },
)
