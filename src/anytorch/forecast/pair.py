"""Check that a model and its tokenizer match, and prepare the model for inference."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from anytorch.errors import ModelError, UsageError
from anytorch.forecast.model import Kronos, KronosTokenizer
from anytorch.forecast.model.fused import Apply, Make, plain
from anytorch.quant.formats import parse
from anytorch.quant.linear import QuantLinear

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_pair(model: Any, tokenizer: Any) -> None:
    if isinstance(model, KronosTokenizer) and isinstance(tokenizer, Kronos):
        raise ModelError("model and tokenizer are in the wrong order", hint="KronosPredictor(model, tokenizer)")
    for name, given, cls in (("model", model, Kronos), ("tokenizer", tokenizer, KronosTokenizer)):
        other = isinstance(given, (Kronos, KronosTokenizer)) and not isinstance(given, cls)
        if other or not hasattr(given, "s1_bits"):  # what wraps one (torch.compile) passes its attributes on
            raise ModelError(
                f"the {name} is a {type(given).__name__}, not a {cls.__name__}",
                hint=f"load it with {cls.__name__}.from_pretrained, or both with anytorch.load_predictor",
            )
    if (model.s1_bits, model.s2_bits) != (tokenizer.s1_bits, tokenizer.s2_bits):
        raise ModelError(
            f"the model uses {model.s1_bits}+{model.s2_bits} bits, the tokenizer {tokenizer.s1_bits}+{tokenizer.s2_bits}",
            hint="load the tokenizer that the model was trained with",
        )
    if tokenizer.d_in != 6:
        raise ModelError(f"the tokenizer reads {tokenizer.d_in} columns; a forecast has 6")


def prepared(model: Kronos, device: torch.device, dtype: str | torch.dtype | None) -> Kronos:
    """The model in eval mode on its device, as it is or as a rounded copy."""
    if dtype is not None:
        wanted = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if wanted not in DTYPES.values():
            raise UsageError(f"dtype is {dtype!r}; use one of: {', '.join(DTYPES)}")
        if wanted != model.norm.weight.dtype:
            model = copy.deepcopy(model).to(wanted)
    return model.to(device).eval()


def layer_maker(quantization: str | None) -> Make:
    """What computes the blocks' linear layers: they are nine tenths of the model, and all that is quantized."""
    if quantization is None:
        return plain
    format = parse(quantization)

    def packed(weight: Tensor, bias: Tensor | None) -> Apply:
        layer = torch.nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], bias is not None, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)
        return QuantLinear.of(layer, format)

    return packed
