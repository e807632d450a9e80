"""GPT-2's layers, `transformers`' Conv1D, packed like linear ones, and given back as what they were."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import anytorch
from anytorch.quant import QuantLinear, add_lora, dequantize, explain, load, merge_lora, quantize, save
from anytorch.quant.conv1d import QuantConv1D
from anytorch.quant.model import linear_targets, weight_errors

transformers = pytest.importorskip("transformers")

IDS = torch.arange(24).view(2, 12)
EXACT: dict[str, Any] = {"mixed_precision": False, "matmul_precision": "highest"}


def gpt2(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=50, n_positions=32)
    return transformers.GPT2LMHeadModel(config).eval()


def conv1d() -> Any:
    return transformers.pytorch_utils.Conv1D


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(IDS).logits
    return found


def twin(layer: nn.Module) -> nn.Linear:
    """The linear layer of the same weights."""
    made = nn.Linear(*layer.weight.shape)
    with torch.no_grad():
        made.weight.copy_(layer.weight.T)
        made.bias.copy_(layer.bias)
    return made


@pytest.mark.parametrize("name", ["int8", "int4", "nf4", "nvfp4", "int8-dynamic"])
def test_a_packed_conv1d_is_the_packed_linear_layer_of_the_same_weights(name: str) -> None:
    torch.manual_seed(0)
    conv = conv1d()(96, 64)
    nn.init.normal_(conv.bias)
    alike = nn.Sequential(twin(conv))
    model = nn.Sequential(conv)
    x = torch.randn(3, 5, 64)
    assert quantize(model, name).quantized == quantize(alike, name).quantized == ("0",)
    with torch.no_grad():
        assert torch.equal(model(x), alike(x))
    assert isinstance(model[0], QuantConv1D) and model[0].weight.shape == (64, 96)
    assert torch.equal(model[0].weight, alike[0].weight.T)
    assert dequantize(model) == dequantize(alike) == 1
    assert type(model[0]) is conv1d() and torch.equal(model[0].weight, alike[0].weight.T)
    torch.testing.assert_close(model(x), alike(x))


def test_gpt2_is_packed_explained_and_unpacked() -> None:
    model = gpt2()
    plain, state = logits(model), {name: value.clone() for name, value in model.state_dict().items()}
    report = quantize(model, "int8")
    assert len(report.quantized) == 8 and all(name.startswith("transformer.h.") for name in report.quantized)
    assert list(report.skipped) == ["lm_head"] and report.nbytes_after < 0.3 * report.nbytes_before
    assert (logits(model) - plain).abs().max() < 0.02 * plain.abs().max()
    errors = weight_errors(model, state)
    assert len(errors) == 8 and max(errors.values()) < 0.01
    assert "transformer.h.0.attn.c_attn" in str(explain(model, m=(1,)))
    packed = logits(model)
    assert dequantize(model) == 8 and type(model.transformer.h[0].attn.c_attn) is conv1d()
    assert {name: value.shape for name, value in model.state_dict().items()} == {k: v.shape for k, v in state.items()}
    torch.testing.assert_close(logits(model), packed, rtol=1e-4, atol=1e-4)


def test_saved_and_loaded(tmp_path: Path) -> None:
    model = gpt2()
    quantize(model, "int4")
    save(model, tmp_path)
    for fresh in (gpt2(1), copy.deepcopy(model)):
        assert torch.equal(logits(load(fresh, tmp_path)), logits(model))
        assert isinstance(fresh.transformer.h[1].mlp.c_proj, QuantConv1D)


def test_weights_come_from_a_file_and_examples_calibrate(tmp_path: Path) -> None:
    model = gpt2()
    save_file({name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}, tmp_path / "w")
    nearest, read = copy.deepcopy(model), gpt2(1)
    quantize(nearest, "int4")
    quantize(read.transformer, "int4", weights=tmp_path / "w")
    assert torch.equal(logits(read), logits(nearest))
    plain, calibrated = logits(model), copy.deepcopy(model)
    quantize(calibrated, "int4", calibration=[IDS], method="awq+gptq")
    assert (logits(calibrated) - plain).norm() < (logits(nearest) - plain).norm()


def test_adapters_on_packed_layers_are_merged_into_what_they_were() -> None:
    model = gpt2()
    quantize(model, "int8")
    add_lora(model, rank=2, only="*.c_attn")
    layer = model.transformer.h[0].attn.c_attn
    nn.init.normal_(layer.lora_b, std=0.02)
    adapted = logits(model)
    assert merge_lora(model) == 2 and type(model.transformer.h[0].attn.c_attn) is conv1d()
    torch.testing.assert_close(logits(model), adapted, rtol=1e-3, atol=1e-3)


def test_what_asks_for_linear_layers_gets_no_other() -> None:
    assert not linear_targets(gpt2())[0]


def test_a_mode_packs_gpt2_and_gives_every_bit_back() -> None:
    model = gpt2()
    plain, state = logits(model), {name: value.clone() for name, value in model.state_dict().items()}
    own = dict(model.named_parameters())
    with anytorch.mode("memory", device="cpu", weights="int8", **EXACT) as mode, torch.no_grad():
        first = logits(model)
        assert isinstance(model.transformer.h[0].mlp.c_fc, QuantConv1D) and "'layers': 8" in mode.explain()
        assert (first - plain).abs().max() < 0.02 * plain.abs().max()
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        other = gpt2(1).state_dict()
        model.load_state_dict(other)
        assert not torch.equal(logits(model), first)
        model.load_state_dict(state)
        assert torch.equal(logits(model), first)
    assert torch.equal(logits(model), plain) and all(value is own[name] for name, value in model.named_parameters())


def test_blocks_that_rest_in_few_bits(tmp_path: Path) -> None:
    model = gpt2()
    plain = logits(model)
    anytorch.memory.fit(
        model, "cpu", device_budget="300KB", host_budget="64MB", rest_format="int8", disk=str(tmp_path / "disk")
    )
    rests = anytorch.memory.fitted(model).plan
    assert rests.nbytes_at("host") > 0
    assert 0 < (logits(model) - plain).abs().max() < 0.02 * plain.abs().max()
    anytorch.memory.unfit(model)


def test_transformers_is_not_imported_for_it() -> None:
    program = (
        "import sys\nfrom torch import nn\nfrom anytorch.quant import quantize\n"
        "quantize(nn.Sequential(nn.Linear(64, 64)), 'int8')\nassert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_a_packed_layer_is_one_of_ours() -> None:
    assert issubclass(QuantConv1D, QuantLinear)
