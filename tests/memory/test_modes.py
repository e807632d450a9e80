"""A mode sets what it says, for the process and for a model, and leaving it puts everything back to the bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from anytorch_compat import modes as vb_modes
from torch import nn

import anytorch
from anytorch.errors import BudgetTooSmall, UsageError
from anytorch.memory import modes
from anytorch.memory.fitted_model import HANDLE
from anytorch.quant import QuantLinear


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


class Model(nn.Module):
    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


# A processor with bfloat16 instructions is given bfloat16 by both of these; tests of the other steps want every bit.
EXACT: dict[str, Any] = {"mixed_precision": False, "matmul_precision": "highest"}


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(autouse=True)
def off_again(quick_packed_layers: None) -> Any:
    yield
    vb_modes.disable()
    assert modes.active() is None


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same_bits(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    after = model.state_dict()
    return after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_a_name_nobody_knows() -> None:
    with pytest.raises(UsageError, match="did you mean 'memory'"):
        anytorch.mode("memroy")
    with pytest.raises(UsageError, match="has no setting 'wieghts'; settings: mixed_precision"):
        anytorch.mode("memory", wieghts="int4")
    with pytest.raises(UsageError, match="matmul_precision='low': use one of highest, high, medium"):
        anytorch.mode("memory", matmul_precision="low")
    for changes, said in (
        ({"weights": "int5"}, "unknown quantization 'int5'"),
        ({"weights": 4}, "weights=4: use a format's name"),
        ({"device_share": 5}, "device_share=5 is invalid"),
        ({"device_share": 0}, "device_share=0 is invalid"),
        ({"checkpointing": "no"}, "checkpointing='no': use True or False"),
    ):
        with pytest.raises(UsageError, match=said):
            anytorch.mode("memory", **changes)


def test_the_process_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    order = torch._C._get_sdp_priority_order()
    with anytorch.mode("speed", device="cpu") as mode:
        assert torch.get_float32_matmul_precision() == "high" == mode.describe()["float32 matmul precision"]
        assert torch._C._get_sdp_priority_order()[0] == int(torch.nn.attention.SDPBackend.FLASH_ATTENTION)
        assert mode.describe()["attention"] == "flash"
    assert torch.get_float32_matmul_precision() == before
    assert torch._C._get_sdp_priority_order() == order


def test_only_one_mode_at_a_time() -> None:
    with (
        anytorch.mode("speed", device="cpu"),
        pytest.raises(UsageError, match="'memory' cannot be turned on while 'speed' is on"),
        anytorch.mode("memory", device="cpu"),
    ):
        pass


def test_memory_mode_quantizes_and_gives_every_bit_back(model: Model) -> None:
    x = torch.randn(5, 64)
    want, before = model(x), bits(model)
    plain = sum(tensor.nbytes for tensor in before.values())
    with torch.no_grad(), anytorch.mode("memory", device="cpu", **EXACT) as mode:
        assert mode.apply(model) is model
        assert not any(type(layer) is nn.Linear for layer in model.modules())
        assert sum(t.nbytes for t in (*model.parameters(), *model.buffers())) < 0.25 * plain
        found = model(x)
        assert torch.nn.functional.cosine_similarity(found, want).min() > 0.97
        assert not torch.equal(found, want)
    assert same_bits(model, before)
    assert torch.equal(model(x), want)


def test_training_in_memory_mode_checkpoints_and_keeps_the_gradients(model: Model) -> None:
    x = torch.randn(5, 64)
    model.train()
    plain = copy.deepcopy(model)
    plain(x).square().sum().backward()
    runs = []
    model.blocks[1].up.register_forward_hook(lambda *_: runs.append(1))
    with anytorch.mode("memory", device="cpu", **EXACT) as mode:
        mode.apply(model)
        (described,) = mode.describe()["models"]
        assert (
            described["model"] == "Model"
            and described["checkpointed blocks"] == 3
            and "weights" in described["not applied"]
        )
        model(x).square().sum().backward()
        assert len(runs) == 2  # forward, and again in backward
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and torch.equal(ours.grad, theirs.grad)
    runs.clear()
    model(x).sum().backward()
    assert len(runs) == 1 and "forward" not in vars(model.blocks[0])


def test_a_model_beyond_the_budget_is_streamed(model: Model, tmp_path: Path) -> None:
    x = torch.randn(5, 64)
    want, before = model(x), bits(model)
    block = sum(tensor.nbytes for tensor in model.blocks[0].state_dict().values())
    share = 2.5 * block / anytorch.memory("cpu").free
    with torch.no_grad(), anytorch.mode("balanced", device="cpu", device_share=share, **EXACT) as mode:
        mode.apply(model, disk=str(tmp_path / "disk"))
        assert "streamed" in mode.describe()["models"][0]
        assert torch.equal(model(x), want)
    assert HANDLE not in vars(model) and same_bits(model, before)
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_quantized_model_beyond_the_budget_rests_in_few_bits(model: Model, tmp_path: Path) -> None:
    x = torch.randn(5, 64)
    want, before = model(x), bits(model)
    block = sum(tensor.nbytes for tensor in model.blocks[0].state_dict().values())
    share = (
        1.2 * block / anytorch.memory("cpu").free
    )  # packed, the three blocks take half of one; streamed, one at a time
    with anytorch.mode("memory", device="cpu", device_share=share / 8, **EXACT) as mode, pytest.raises(BudgetTooSmall):
        mode.apply(model, disk=str(tmp_path / "disk"))
    assert same_bits(model, before)
    with torch.no_grad(), anytorch.mode("memory", device="cpu", device_share=share, weights="int8", **EXACT) as mode:
        mode.apply(model, disk=str(tmp_path / "disk"))
        assert torch.nn.functional.cosine_similarity(model(x), want).min() > 0.99
    assert same_bits(model, before) and torch.equal(model(x), want)


def test_mixed_precision_lasts_as_long_as_forward(model: Model) -> None:
    with anytorch.use(cpu_dtype="bfloat16"), anytorch.mode("balanced", device="cpu") as mode:
        mode.apply(model)
        assert model.blocks[0].up(torch.randn(2, 64)).dtype is torch.float32  # not through the model
        inside = []
        handle = model.blocks[0].up.register_forward_hook(lambda _, __, made: inside.append(made.dtype))
        model(torch.randn(2, 64))
        handle.remove()
        assert inside == [torch.bfloat16] and not torch.is_autocast_enabled("cpu")
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 63))
        assert not torch.is_autocast_enabled("cpu")
        assert torch.equal(copy.deepcopy(model)(torch.ones(1, 64)), model(torch.ones(1, 64)))
        assert model(torch.ones(1, 64)).dtype is torch.float32  # what the program sees is as without a mode
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_a_step_that_fails_leaves_the_model_as_it_was(model: Model, tmp_path: Path) -> None:
    before = bits(model)
    (tmp_path / "file").write_text("not a folder")
    with anytorch.mode("memory", device="cpu") as mode:
        with pytest.raises(UsageError, match="as the disk level"):
            mode.apply(model, disk=str(tmp_path / "file"))
        assert mode.describe()["models"] == []
        mode.apply(model)
        with pytest.raises(UsageError, match="prepared for mode 'memory' already"):
            mode.apply(model)
    assert same_bits(model, before)


def test_models_that_spell_attention_out_are_switched() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    bert = transformers.BertModel(config).eval()
    bert.set_attn_implementation("eager")
    ids = torch.arange(8).view(1, 8)
    want = bert(ids).last_hidden_state
    with torch.no_grad(), anytorch.mode("balanced", device="cpu", **EXACT) as mode:
        mode.apply(bert)
        assert bert.config._attn_implementation == "sdpa"
        torch.testing.assert_close(bert(ids).last_hidden_state, want)
    assert bert.config._attn_implementation == "eager"


def test_the_documented_names(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    assert not vb_modes.is_enabled() and vb_modes.get_config() == {} and vb_modes.get_stack() is None
    vb_modes.enable_memory_mode(device="cpu")
    assert capsys.readouterr().out  # the documented summary; what is so is in the models
    vb_modes.enable_balanced_mode(device="cpu", verbose=False)  # takes the other's place
    assert vb_modes.get_config()["mode"] == "balanced" and capsys.readouterr().out == ""
    assert vb_modes.optimize_model(model, "mine") is model
    assert [found["model"] for found in vb_modes.get_config()["models"]] == ["Model"]
    stack = vb_modes.get_stack()
    assert stack is not None and stack is vb_modes.get_stack()
    vb_modes.print_stats()
    assert "mode: balanced" in capsys.readouterr().out
    vb_modes.enable(use_mxfp4=True, gradient_checkpointing=True, device="cpu", verbose=False)
    with torch.no_grad():
        model(torch.ones(1, 64))
    assert {str(layer.format) for layer in model.modules() if isinstance(layer, QuantLinear)} == {"mxfp4"}


@pytest.mark.parametrize("name", ["speed", "balanced", "memory", "full"])
def test_the_environment(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert vb_modes.enable_from_environment() is None
    monkeypatch.setenv("ENABLE_VIRTUAL_BLACKWELL", "1")
    monkeypatch.setenv("VB_MODE", name)
    monkeypatch.setenv("ANYTORCH_BACKEND", "cpu")
    running = vb_modes.enable_from_environment()
    assert running is not None and running.mode.name == {"full": "memory"}.get(name, name)
    assert capsys.readouterr().out
