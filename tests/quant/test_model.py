"""Whole models: quantized in place and one layer at a time, saved, loaded, calibrated, adapted, trained, pruned."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import prune as torch_prune

from anytorch.errors import InputError, ModelError, OutputError, UsageError
from anytorch.quant import (
    LoRALinear,
    QuantLinear,
    add_lora,
    convert,
    dequantize,
    explain,
    fake_quantize,
    finish_pruning,
    load,
    lora_parameters,
    merge_lora,
    pack,
    parse,
    prepare_qat,
    prune,
    prune_neurons,
    quantize,
    save,
    sparsity,
    unpack,
)
from anytorch.quant.calibrate import InputStatistics, gptq, input_scaling, output_error


class Small(nn.Module):
    """Embedding, two blocks and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(2))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


IDS = torch.arange(24).reshape(2, 12)


def test_quantize_replaces_layers_in_place() -> None:
    model = Small().eval()
    with torch.no_grad():
        before = model(IDS)
        report = quantize(model, "int8", skip="blocks.1")
        after = model(IDS)
    assert report.quantized == ("blocks.0.0", "blocks.0.2")
    assert report.skipped["blocks.1.0"] == "asked for" and "embed.weight" in report.skipped["head"]
    assert report.nbytes_after / report.nbytes_before < 0.30
    assert float((after - before).norm() / before.norm()) < 0.02
    assert "2 layers in int8" in str(report)


@pytest.mark.parametrize("rule", ["blocks.1", "*.2", lambda name, module: module.in_features == 96])
def test_skip_takes_names_patterns_and_functions(rule: object) -> None:
    report = quantize(Small(), "int4", skip=[rule, "blocks.1"])  # type: ignore[list-item]
    assert report.quantized == (("blocks.0.0", "blocks.0.2") if rule == "blocks.1" else ("blocks.0.0",))


def test_dequantize_gives_linear_layers_with_the_rounded_weights() -> None:
    model = Small().eval()
    quantize(model, "int4")
    with torch.no_grad():
        packed = model(IDS)
        assert dequantize(model) == 4
        assert not any(isinstance(module, QuantLinear) for module in model.modules())
        assert torch.allclose(model(IDS), packed, atol=2e-3)


def test_a_layer_whose_weight_is_computed_is_left_as_it_is() -> None:
    model = Small().eval()
    torch_prune.l1_unstructured(model.get_submodule("blocks.0.0"), "weight", 0.3)
    report = quantize(model, "int8")
    assert "computed" in report.skipped["blocks.0.0"] and "blocks.0.2" in report.quantized
    assert model(IDS).isfinite().all()


def test_quantizing_twice_leaves_packed_layers_alone() -> None:
    model = Small()
    quantize(model, "int8", skip="blocks.1")
    report = quantize(model, "int4")
    assert report.skipped["blocks.0.0"] == "packed already"
    assert str(model.get_submodule("blocks.0.0").format) == "int8"


def test_a_lone_layer_and_a_wrong_method_are_refused() -> None:
    with pytest.raises(UsageError, match="itself is a linear layer"):
        quantize(nn.Linear(4, 4), "int8")
    with pytest.raises(UsageError, match="needs calibration"):
        quantize(Small(), "int4", method="gptq")
    with pytest.raises(UsageError, match="use one of"):
        quantize(Small(), "int4", method="magic")  # type: ignore[arg-type]


# --- memory -----------------------------------------------------------------------------------------------------------


def live_nbytes() -> int:
    """Bytes of all float tensors made since this module began (tests/conftest.py), shared storage counted once."""
    gc.collect()
    storages = {}
    for one in gc.get_objects():
        # Subclasses are other tests' (torch.compile's fake tensors have no storage to ask).
        if type(one) in (torch.Tensor, nn.Parameter) and one.is_floating_point() and not one.is_meta:
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.filterwarnings("ignore")  # looking at every object there is wakes up deprecated ones
def test_never_two_whole_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float weights go as packed ones come: while layer k is rounded, layers before it have no float weight left."""
    base = live_nbytes()
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    whole = live_nbytes() - base
    seen: list[int] = []
    real = QuantLinear.set_packed

    def watch(self: QuantLinear, packed: object) -> None:
        seen.append(live_nbytes() - base)
        real(self, packed)  # type: ignore[arg-type]

    monkeypatch.setattr(QuantLinear, "set_packed", watch)
    quantize(model, "int4")
    one = 256 * 256 * 4
    assert len(seen) == 8
    assert max(seen) < whole + one  # the layer at hand, in groups; never a second model
    assert seen[-1] < 2.5 * one + 8 * one * 0.2
    assert live_nbytes() - base < 0.19 * whole + 8 * 1100


def headless() -> Small:
    model = Small().eval()
    model.head = nn.Identity()  # type: ignore[assignment]
    return model


def test_weights_are_read_from_a_file_layer_by_layer(tmp_path: Path) -> None:
    original = headless()
    # As checkpoints of a larger model name them, in two files.
    state = {f"model.{name}": value for name, value in original.state_dict().items()}
    for number in (0, 1):
        part = {name: state[name] for name in sorted(state)[number::2]}
        save_file({**part, f"other.{number}": torch.ones(1)}, tmp_path / f"part-{number}.safetensors")
    with torch.device("meta"):
        empty = headless()
    quantize(empty, "int8", weights=tmp_path)
    quantize(original, "int8")
    with torch.no_grad():
        assert torch.equal(empty(IDS), original(IDS))


def test_what_a_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(UsageError, match="on the meta device"):
        quantize(empty, "int8")
    save_file({"0.weight": torch.randn(64, 64)}, tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match=r"no tensor '0\.bias'"):
        quantize(empty, "int8", weights=tmp_path / "m.safetensors")
    save_file({"0.weight": torch.randn(64, 32), "0.bias": torch.randn(64)}, tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match=r"0\.weight is \(64, 32\); the model has \(64, 64\)"):
        quantize(empty, "int8", weights=tmp_path / "m.safetensors")
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="runs the code in it"):
        quantize(empty, "int8", weights=tmp_path / "pickles")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"0.weight": "../m.safetensors"}}, "names a file in another folder"),
        ({"weight_map": {"0.weight": "gone.safetensors"}}, r"gone\.safetensors: this shard is missing"),
        ([], "cannot be read as an index of shards"),
    ],
)
def test_an_index_that_cannot_be_followed(index: object, message: str, tmp_path: Path) -> None:
    save_file({"0.weight": torch.randn(64, 64), "0.bias": torch.randn(64)}, tmp_path / "m.safetensors")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(ModelError, match=message):
        quantize(empty, "int8", weights=tmp_path / "model")


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "nvfp4", "nf4"])
def test_save_and_load(tmp_path: Path, name: str) -> None:
    model = Small().eval()
    quantize(model, name)
    with torch.no_grad():
        wanted = model(IDS)
        save(model, tmp_path)
        again = load(Small().eval(), tmp_path)
        assert torch.equal(again(IDS), wanted)
        assert again.head.weight is again.embed.weight  # type: ignore[union-attr]


def test_input_scales_are_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64)).eval()
    examples = [torch.randn(64, 64) * torch.logspace(-2, 2, 64) for _ in range(2)]
    report = quantize(model, "int4", calibration=examples, method="awq")
    assert report.scaled_inputs == ("0",)
    save(model, tmp_path)
    with torch.no_grad():
        assert torch.equal(load(nn.Sequential(nn.Linear(64, 64)), tmp_path)(examples[0]), model(examples[0]))


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = Small()
    with pytest.raises(UsageError, match="no packed layers"):
        save(model, tmp_path)
    quantize(model, "int8")
    save(model, tmp_path)
    with pytest.raises(ModelError, match="no such layer"):
        load(nn.Sequential(nn.Linear(4, 4)), tmp_path)
    wider = Small()
    wider.blocks[0] = nn.Sequential(nn.Linear(64, 80), nn.GELU(), nn.Linear(80, 64))
    with pytest.raises(ModelError, match=r"is \(96, 64\); the model's is \(80, 64\)"):
        load(wider, tmp_path)
    longer = Small()
    longer.more = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"lacks more\.bias, more\.weight"):
        load(longer, tmp_path)


def test_a_disk_that_takes_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    quantize(model, "int8")
    kept = save(model, tmp_path).read_bytes()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # the system names no path for an open file

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError) as caught:
        save(model, tmp_path)
    assert caught.value.message == f"cannot write {tmp_path / 'model.safetensors'}: No space left on device"
    assert caught.value.hint.startswith("nothing was changed")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("model.safetensors", kept)]
    with pytest.raises(OutputError, match=r"cannot write .*inside.model\.safetensors: \w"):
        save(model, tmp_path / "model.safetensors" / "inside")


# --- calibration ------------------------------------------------------------------------------------------------------


def correlated(rows: int = 512, columns: int = 128) -> torch.Tensor:
    """Inputs as layers see them: a few directions carry most of what there is."""
    mixing = torch.randn(24, columns, generator=torch.Generator().manual_seed(3))
    return torch.randn(rows, 24) @ mixing + 0.3 * torch.randn(rows, columns)


@pytest.mark.parametrize("name", ["int8-g64", "int8", "int4", "int4-sym-g32", "int2", "nvfp4", "mxfp4", "nf4"])
def test_gptq_lowers_the_output_error(name: str) -> None:
    weight, x = torch.randn(48, 128), correlated()
    hessian = x.t() @ x
    plain = output_error(weight, unpack(pack(weight, name, refine=True)), hessian)
    packed = gptq(weight, parse(name), hessian)
    packed.check()
    assert output_error(weight, unpack(packed), hessian) < 0.9 * plain


def test_gptq_with_a_short_last_group_and_unused_columns() -> None:
    weight, x = torch.randn(16, 100), correlated(256, 100)
    x[:, 7] = 0
    hessian = x.t() @ x
    plain = output_error(weight, unpack(pack(weight, "int4", refine=True)), hessian)
    assert output_error(weight, unpack(gptq(weight, parse("int4"), hessian)), hessian) < plain


def test_scaling_helps_where_inputs_differ_in_size() -> None:
    weight, statistics = torch.randn(48, 128), InputStatistics(128, torch.device("cpu"))
    statistics.add(torch.randn(256, 128) * torch.logspace(-2, 1, 128))
    factors = input_scaling(weight, parse("int4"), statistics)
    assert factors is not None
    scaled = unpack(pack(weight / factors, "int4", refine=True)) * factors
    plain = unpack(pack(weight, "int4", refine=True))
    assert output_error(weight, scaled, statistics.hessian) < 0.9 * output_error(weight, plain, statistics.hessian)


def test_scaling_is_left_out_where_it_does_not_help() -> None:
    statistics = InputStatistics(128, torch.device("cpu"))
    statistics.add(torch.randn(4096, 128))
    assert input_scaling(torch.randn(48, 128), parse("int8"), statistics) is None


def test_calibrating_a_model_brings_it_closer() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 64)).eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    examples = [correlated(64) for _ in range(6)]
    tried = correlated(64)
    wanted = model(tried).detach()
    errors = {}
    for method in ("nearest", "gptq", "awq", "awq+gptq"):
        again = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 64)).eval()
        again.load_state_dict(state)
        quantize(again, "int4", calibration=examples if method != "nearest" else None, method=method)  # type: ignore[arg-type]
        errors[method] = float((again(tried).detach() - wanted).norm() / wanted.norm())
    assert errors["gptq"] < errors["nearest"] and errors["awq+gptq"] < errors["nearest"]


def test_portions_of_layers_are_calibrated_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anytorch.quant.model.STATISTICS_NBYTES", 128 * 128 * 4)
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 8))
    assert len(quantize(model, "int4", calibration=[correlated(64)]).quantized) == 3


def test_calibration_that_cannot_work_is_refused() -> None:
    model = nn.ModuleDict({"used": nn.Linear(64, 64), "unused": nn.Linear(64, 64)})
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    with pytest.raises(InputError, match="never reached the layer unused"):
        quantize(model, "int4", calibration=[torch.randn(8, 64)])
    with pytest.raises(InputError, match="no examples"):
        quantize(Small(), "int4", calibration=[])
    with pytest.raises(UsageError, match="can be read only once"):
        quantize(Small(), "int4", calibration=iter([IDS]))
    with pytest.raises(InputError, match="not finite"):
        quantize(nn.Sequential(nn.Linear(64, 64)), "int4", calibration=[torch.full((8, 64), torch.nan)])


# --- explaining -------------------------------------------------------------------------------------------------------


def test_explain_says_what_computes_each_kind_of_layer() -> None:
    model = Small()
    quantize(model, "int4")
    found = explain(model, m=(1, 20))
    text = str(found)
    assert len(found.rows) == 4 and found.rows[0].like_it == 2
    assert "blocks.0.0 (and 1 like it)" in text and "int4-asym-g64" in text and re.search(r"\d [µm]s", text)
    assert found.nbytes / found.nbytes_float < 0.2
    assert all(row.speedup is None or row.speedup > 0 for row in found.rows)
    assert ("slower than float here" in text) == bool(found.slower)


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_adapters_train_on_a_packed_model() -> None:
    model = Small()
    quantize(model, "int4")
    with torch.no_grad():
        start = model(IDS)
        names = add_lora(model, 4, only="blocks")
        assert torch.allclose(model(IDS), start, rtol=1e-4, atol=1e-3)
    assert names == ["blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2"]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all("lora_" in name for name in trained) and len(trained) == 8
    optimizer = torch.optim.Adam(lora_parameters(model), lr=0.02)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten().roll(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    with torch.no_grad():
        adapted = model(IDS)
        assert merge_lora(model) == 4
        assert not any(isinstance(module, LoRALinear) for module in model.modules())
        assert float((model(IDS) - adapted).norm() / adapted.norm()) < 1e-3


def test_adapters_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="rank=100"):
        add_lora(Small(), 100)
    with pytest.raises(UsageError, match="no linear layer"):
        add_lora(Small(), 4, only="nothing")


# --- training with rounding -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "nvfp4", "nf4"])
def test_fake_quantize_is_what_packing_gives(name: str) -> None:
    weight = torch.randn(8, 100, requires_grad=True)
    rounded = fake_quantize(weight, name)
    assert torch.equal(rounded, unpack(pack(weight, name)))
    (rounded * 3).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.full_like(weight, 3.0))


def test_what_was_trained_is_what_is_packed() -> None:
    model = Small()
    parameters = set(model.parameters())
    assert len(prepare_qat(model, "int4", skip="blocks.1")) == 2
    assert set(model.parameters()) == parameters  # an optimiser goes on working
    model.eval()
    with torch.no_grad():
        wanted = model(IDS)
        assert convert(model) == ["blocks.0.0", "blocks.0.2"]
        assert float((model(IDS) - wanted).norm() / wanted.norm()) < 1e-3


def test_dynamic_int8_rounds_inputs_in_training() -> None:
    model = nn.Sequential(nn.Linear(64, 8, bias=False))
    prepare_qat(model, "int8-dynamic")
    x = torch.randn(2, 64, requires_grad=True)
    out = model(x)
    step = x.abs().amax(1, keepdim=True) / 127
    rounded = (x / step).round() * step
    assert torch.allclose(out, rounded @ unpack(pack(model[0].weight, "int8")).t(), atol=1e-5)  # type: ignore[arg-type]
    out.sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


# --- pruning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["global", "layer", "2:4"])
def test_pruned_weights_stay_zero_in_training(pattern: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    shares = prune(model, 0.5, pattern=pattern)  # type: ignore[arg-type]
    assert sparsity(model) == pytest.approx(0.5, abs=0.01)
    if pattern != "global":
        assert all(share == pytest.approx(0.5, abs=0.01) for share in shares.values())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    zero = model[0].weight == 0  # type: ignore[operator]
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().sum().backward()
        optimizer.step()
    assert finish_pruning(model) == 2
    assert (model[0].weight[zero] == 0).all() and sparsity(model) == pytest.approx(0.5, abs=0.01)  # type: ignore[index]
    model(torch.randn(2, 64)).sum().backward()


def test_two_of_four_keeps_the_largest() -> None:
    model = nn.Sequential(nn.Linear(8, 1, bias=False))
    model[0].weight.data = torch.tensor([[1.0, -4, 3, 2, 0.1, 0.2, -0.3, 0.4]])
    prune(model, 0.5, pattern="2:4")
    assert model[0].weight.tolist() == [[0, -4, 3, 0, 0, 0, pytest.approx(-0.3), pytest.approx(0.4)]]  # type: ignore[operator]


def test_neurons_are_taken_out_of_both_layers() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    with torch.no_grad():
        model[0].weight[::2] *= 1e-6  # type: ignore[operator]
        model[0].bias[::2] = 0  # type: ignore[operator, index]
        x = torch.randn(5, 16)
        before = model(x)
        assert prune_neurons(model, [("0", "2")], 0.5) == {"0": 16}
        assert model[0].weight.shape == (16, 16) and model[2].weight.shape == (4, 16)
        assert torch.allclose(model(x), before, rtol=1e-4, atol=1e-3)


def test_pruning_that_makes_no_sense_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    with pytest.raises(UsageError, match="from 0 to below 1"):
        prune(model, 1.0)
    with pytest.raises(UsageError, match="exactly half"):
        prune(model, 0.3, pattern="2:4")
    with pytest.raises(UsageError, match="needs a multiple of 4"):
        prune(model, 0.5, pattern="2:4")
    with pytest.raises(UsageError, match="must be equal"):
        prune_neurons(model, [("1", "0")], 0.5)
