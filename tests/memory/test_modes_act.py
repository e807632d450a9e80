"""A mode acts on the models that run while it is on, unasked: what becomes of their weights, memory, graphs and answers."""

from __future__ import annotations

import copy
import gc
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from anytorch_compat import modes as vb
from tests.memory.mode_models import EXACT, Block, Model, off_again, small_model  # noqa: F401  (an autouse fixture)
from torch import nn

import anytorch
from anytorch import settings
from anytorch.memory.fitted_model import HANDLE
from anytorch.quant import QuantLinear


@pytest.fixture
def model() -> Model:
    return small_model()


def nbytes(model: nn.Module) -> int:
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def train(model: nn.Module, steps: int = 6, **options: Any) -> list[float]:
    """The documented loop: the optimizer is torch's own, and was there before the first step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(1)
    x, y = torch.randn(16, 64, generator=random), torch.randn(16, 64, generator=random)
    losses = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_model_that_runs_in_memory_mode_has_packed_weights(model: Model) -> None:
    x = torch.randn(5, 64)
    want, before, plain = model(x), copy.deepcopy(model.state_dict()), nbytes(model)
    layer = model.blocks[0].up
    vb.enable_memory_mode(verbose=False, device="cpu")
    with torch.no_grad():
        found = model(x)
    assert isinstance(model.blocks[0].up, QuantLinear) and nbytes(model) < 0.25 * plain
    assert nn.functional.cosine_similarity(found, want).min() > 0.97 and not torch.equal(found, want)
    (described,) = vb.get_config()["models"]
    assert described["weights"]["layers"] == 6 and described["weights"]["nbytes"] == nbytes(model)
    assert "int4" in vb.explain()
    vb.disable()
    assert model.blocks[0].up is layer and torch.equal(model(x), want)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_model_that_trains_has_checkpointed_blocks_and_the_same_loss_curve(model: Model) -> None:
    twin = copy.deepcopy(model).train()
    runs: list[int] = []
    model.blocks[1].up.register_forward_hook(lambda *_: runs.append(1))
    with anytorch.mode("memory", device="cpu", **EXACT) as mode:
        losses = train(model.train())
        assert len(runs) == 12  # forward, and again in backward
        assert mode.describe()["models"][0]["checkpointed blocks"] == 3
        assert not any(isinstance(layer, QuantLinear) for layer in model.modules())
    assert losses == train(twin) and losses[-1] < losses[0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_an_optimizer_made_before_the_weights_were_packed_still_trains_them(model: Model) -> None:
    """Evaluate, train, evaluate: the layers that come back are those the optimizer knows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 64)
    twin, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    with anytorch.mode("memory", device="cpu", **EXACT) as mode:
        with torch.no_grad():
            model(x)
        assert isinstance(model.blocks[0].down, QuantLinear)
        model.train()(x).square().sum().backward()
        optimizer.step()
        assert type(model.blocks[0].down) is nn.Linear
        assert not torch.equal(model.blocks[0].down.weight, before["blocks.0.down.weight"])
        with torch.no_grad():
            model.eval()(x)
        assert type(model.blocks[0].down) is nn.Linear  # a model in training is not rounded for its evaluation
        assert "cannot be trained" in mode.describe()["models"][0]["not applied"]["weights"]
    twin.train()(x).square().sum().backward()
    torch.optim.SGD(twin.parameters(), lr=0.1)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_an_optimizer_made_after_the_weights_were_packed_trains_them_too(model: Model) -> None:
    with anytorch.mode("memory", device="cpu", **EXACT):
        with torch.no_grad():
            model(torch.ones(1, 64))
        losses = train(model.train())  # makes it
        assert losses[-1] < losses[0]
        with torch.no_grad():
            assert Model()(torch.ones(1, 64)).requires_grad is False
    assert type(model.blocks[0].up) is nn.Linear and model.blocks[0].up.weight.grad is not None


def test_gradients_in_eval_mode_reach_the_weights(model: Model) -> None:
    with anytorch.mode("memory", device="cpu", **EXACT):
        with torch.no_grad():
            model(torch.ones(1, 64))
        model(torch.ones(1, 64)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_is_saved_and_loaded_are_original_weights(model: Model, tmp_path: Path) -> None:
    x = torch.randn(2, 64)
    before, other = copy.deepcopy(model.state_dict()), Model().eval()
    with torch.no_grad(), anytorch.mode("memory", device="cpu", **EXACT):
        model(x)
        torch.save(model.state_dict(), tmp_path / "model.pt")
        model.load_state_dict(other.state_dict())
        packed = model(x)
        assert isinstance(model.blocks[0].up, QuantLinear)
        assert nn.functional.cosine_similarity(packed, other(x)).min() > 0.9
        copied = copy.deepcopy(model)
    stored = torch.load(tmp_path / "model.pt", weights_only=True)
    assert stored.keys() == before.keys() and all(torch.equal(stored[key], before[key]) for key in before)
    assert torch.equal(model(x), other(x))
    assert torch.equal(copied(x), packed)  # packed weights of its own


def test_a_model_beyond_the_budget_streams(model: Model) -> None:
    x = torch.randn(5, 64)
    want = model(x)
    block = nbytes(model.blocks[0])
    share = 2.5 * block / anytorch.memory("cpu").free
    with torch.no_grad(), anytorch.mode("balanced", device="cpu", device_share=share, **EXACT) as mode:
        assert torch.equal(model(x), want)
        assert HANDLE in vars(model)
        assert anytorch.memory.fitted(model).ledger.use("device").peak <= 2.6 * block
        assert mode.describe()["models"][0]["streamed"]["size"] == nbytes(model)
    assert HANDLE not in vars(model) and torch.equal(model(x), want)


def test_a_model_that_is_trained_where_it_is_stays_there(model: Model) -> None:
    share = 2.5 * nbytes(model.blocks[0]) / anytorch.memory("cpu").free
    with anytorch.mode("balanced", device="cpu", device_share=share, **EXACT) as mode:
        losses = train(model.train(), 2)
        assert (
            HANDLE not in vars(model) and "TieredOptimizer" in mode.describe()["models"][0]["not applied"]["streaming"]
        )
    assert losses[1] < losses[0]


def test_precision_is_that_of_the_call_and_results_are_float32(model: Model) -> None:
    inside: list[torch.dtype] = []
    model.blocks[0].up.register_forward_hook(lambda _, __, made: inside.append(made.dtype))
    with anytorch.use(cpu_dtype="bfloat16"), anytorch.mode("speed", device="cpu") as mode:
        assert model(torch.randn(2, 64)).dtype is torch.float32
        assert inside == [torch.bfloat16] and not torch.is_autocast_enabled("cpu")
        assert mode.describe()["models"][0]["autocast"] == "bfloat16"
        with torch.autocast("cpu", enabled=True, dtype=torch.float16):  # the program's own goes first
            model(torch.randn(2, 64))
        assert inside[-1] is torch.float16
        half = Model().to(torch.bfloat16)
        assert half(torch.ones(1, 64, dtype=torch.bfloat16)).dtype is torch.bfloat16
        assert "bfloat16" in mode.describe()["models"][1]["not applied"]["mixed precision"]
        losses = train(Model().train())
        assert losses[-1] < losses[0]


def test_results_of_every_shape_are_float32() -> None:
    class Many(Model):
        def forward(self, x: torch.Tensor) -> Any:
            made = super().forward(x)
            return {"a": (made, [made.sum()]), "b": None, "c": made.bool()}

    with anytorch.use(cpu_dtype="bfloat16"), anytorch.mode("speed", device="cpu"):
        result = Many()(torch.ones(1, 64))
    assert result["a"][0].dtype is result["a"][1][0].dtype is torch.float32
    assert result["b"] is None and result["c"].dtype is torch.bool


def test_a_part_that_is_called_by_itself_belongs_to_its_model(model: Model) -> None:
    x = torch.randn(1, 64)
    with anytorch.mode("memory", device="cpu", **EXACT) as mode:
        with torch.no_grad():
            model(x)
        model.blocks[0].train()(x).sum().backward()  # trained now: nothing of the model may be packed
        assert type(model.blocks[2].up) is nn.Linear and model.blocks[0].down.weight.grad is not None
        assert len(mode.describe()["models"]) == 1


def test_what_is_left_alone_says_why(model: Model) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.one(x)

    with anytorch.mode("memory", device="cpu", **EXACT) as mode:
        Mixed()(torch.ones(1, 4)).sum().backward()
        gc.collect()
        kept = Mixed()
        kept(torch.ones(1, 4))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit
            script = torch.jit.trace(Mixed().eval(), torch.ones(1, 4), check_trace=False)
        script(torch.ones(1, 4))
        linear = nn.Linear(4, 4)
        with torch.no_grad():
            linear(torch.ones(1, 4))
        nn.MSELoss()(torch.ones(1), torch.ones(1))
        compiled = torch.compile(Model(), backend="eager")
        compiled(torch.ones(1, 64))
        left = {found["model"]: found["not applied"] for found in mode.describe()["models"]}
    assert set(left) == {"Mixed", type(script).__name__, "Linear", "OptimizedModule"}
    assert "no list of repeated blocks" in left["Mixed"]["checkpointing"]
    assert "TorchScript" in left[type(script).__name__]["everything"]
    assert "linear layer" in left["Linear"]["weights and place"]
    assert "compiled" in left["OptimizedModule"]["checkpointing"]


def test_a_model_elsewhere_is_prepared_when_it_comes(model: Model) -> None:
    model.to("meta")
    with torch.no_grad(), anytorch.mode("memory", device="cpu", **EXACT) as mode:
        model(torch.ones(1, 64, device="meta"))
        assert "runs on meta" in mode.describe()["models"][0]["not applied"]["everything"]
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.zero_()
        model(torch.ones(1, 64))
        assert isinstance(model.blocks[0].up, QuantLinear)


def originals() -> list[str]:
    """The folders of this process that hold original weights."""
    folder = settings.cache_folder() / "originals"
    return [one.name for one in folder.iterdir() if f"-{os.getpid()}-" in one.name] if folder.exists() else []


def test_a_model_that_is_dropped_is_freed_at_once() -> None:
    with torch.no_grad(), anytorch.mode("memory", device="cpu", **EXACT) as mode:
        gc.collect()
        gc.disable()
        try:
            made = Model().eval()
            made(torch.ones(1, 64))
            assert originals() and len(mode.describe()["models"]) == 1
            gone = weakref.ref(made)
            del made
            assert gone() is None and mode.describe()["models"] == [] and not originals()
        finally:
            gc.enable()


def test_sequential_blocks_count_as_repeated() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(Block(64), Block(64)), nn.Sequential(nn.ReLU(), nn.ReLU()))
    with anytorch.mode("memory", device="cpu", **EXACT) as mode:
        train(model, 1)
        assert mode.describe()["models"][0]["checkpointed blocks"] == 2


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.model(x))


def test_a_model_outlives_the_wrapper_it_was_called_in(model: Model) -> None:
    x, before = torch.randn(2, 64), copy.deepcopy(model.state_dict())
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    with torch.no_grad():
        plain = model(x)
        with anytorch.mode("memory", device="cpu", **EXACT) as mode:
            for _ in range(3):  # one for each call, as evaluations make them
                Wrapper(model).eval()(x)
                assert isinstance(model.blocks[0].up, QuantLinear) and len(originals()) == 1
            packed = model.blocks[0].up
            model(x)
            assert model.blocks[0].up is packed and len(mode.describe()["models"]) == 1
            torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
            with torch.enable_grad():
                losses = train(model.train())
            assert losses[-1] < losses[0] and not originals()
            model.eval().load_state_dict(before)
        assert torch.equal(model(x), plain)
        with anytorch.mode("memory", device="cpu", **EXACT):
            Wrapper(model).eval()(x)
        assert torch.equal(model(x), plain) and not originals()
    assert {name: model.get_submodule(name) for name in layers} == layers


def test_blocks_of_a_model_that_outlives_its_wrapper_are_as_they_were(model: Model) -> None:
    with anytorch.mode("memory", device="cpu", **EXACT):
        train(Wrapper(model.train()), 1)
        gc.collect()
        assert "forward" in model.blocks[0].__dict__
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_wrappers_model_is_freed_with_its_last_user() -> None:
    with torch.no_grad(), anytorch.mode("memory", device="cpu", **EXACT) as mode:
        inner = Model().eval()
        Wrapper(inner).eval()(torch.ones(1, 64))
        assert originals() and len(mode.describe()["models"]) == 1
        gone = weakref.ref(inner)
        del inner
        gc.collect()
        assert gone() is None and mode.describe()["models"] == [] and not originals()


def test_a_model_whose_part_ran_first_is_prepared_whole(model: Model) -> None:
    """As transformers' generate calls an encoder by itself, and then the whole."""
    whole = Wrapper(model).eval()
    with torch.no_grad(), anytorch.mode("memory", device="cpu", **EXACT) as mode:
        for _ in range(2):
            model.blocks[0](torch.ones(1, 64))
            whole(torch.ones(1, 64))
        assert all(isinstance(block.up, QuantLinear) for block in model.blocks)
        assert [found["model"] for found in mode.describe()["models"]] == ["Wrapper"]
    assert all(type(block.up) is nn.Linear for block in model.blocks) and not originals()


def test_two_models_with_a_part_in_common_both_run(model: Model) -> None:
    one, other, x = Wrapper(model).eval(), nn.Sequential(model, nn.Linear(64, 4)).eval(), torch.ones(1, 64)
    with torch.no_grad():
        plain = one(x), other(x)
        with anytorch.mode("memory", device="cpu", **EXACT):
            for _ in range(2):
                one(x), other(x)
            assert isinstance(other[1], QuantLinear) and isinstance(model.blocks[0].up, QuantLinear)
        assert torch.equal(one(x), plain[0]) and torch.equal(other(x), plain[1])


class Pair(nn.Module):
    """Builds what it calls anew for each call, of layers that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)


def test_layers_and_weights_of_a_model_that_is_gone_keep_their_values() -> None:
    pair, x = Pair().eval(), torch.ones(1, 64)
    with torch.no_grad():
        plain = pair.two(torch.relu(pair.one(x)))
        kept = Model().eval()
        layer, values = kept.blocks[0].up, [parameter.clone() for parameter in kept.parameters()]
        parameters = list(kept.parameters())
        with anytorch.mode("memory", device="cpu", **EXACT):
            for _ in range(2):
                nn.Sequential(pair.one, nn.ReLU(), pair.two).eval()(x)
            kept(x)
            del kept
            gc.collect()
        assert torch.equal(pair.two(torch.relu(pair.one(x))), plain)
        assert all(map(torch.equal, parameters, values)) and layer(x).shape == (1, 128) and not originals()


def test_two_models_that_share_a_layer_both_run() -> None:
    shared, x = nn.Linear(64, 64), torch.ones(1, 64)
    one, other = (nn.Sequential(nn.Linear(64, 64), shared, nn.Tanh()).eval() for _ in range(2))
    with torch.no_grad():
        plain = one(x), other(x)
        with anytorch.mode("memory", device="cpu", **EXACT) as mode:
            for _ in range(2):
                one(x), other(x)
            assert "another model" in mode.explain()
        assert torch.equal(one(x), plain[0]) and torch.equal(other(x), plain[1]) and not originals()


def test_another_threads_first_call_waits_until_the_model_is_prepared(model: Model) -> None:
    x, found = torch.randn(2, 64), []
    with anytorch.mode("memory", device="cpu", **EXACT):
        start = threading.Barrier(4)

        def call() -> None:
            start.wait()
            with torch.no_grad():
                found.append(model(x))

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with torch.no_grad():
            settled = model(x)
    assert len(found) == 4 and all(torch.equal(one, settled) for one in found)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("in_common", [lambda: nn.Linear(64, 64), lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh())])
def test_layers_that_a_model_trains_are_not_packed_for_another(
    in_common: Callable[[], nn.Module], training: bool
) -> None:
    """As an actor and a critic have them: one is trained, the other answers in between."""
    trunk, x = in_common(), torch.ones(1, 64)
    actor, critic = (nn.Sequential(trunk, nn.Linear(64, 64)).eval() for _ in range(2))
    weights = [parameter for name, parameter in actor.named_parameters() if name.endswith("weight")]
    with anytorch.mode("memory", device="cpu", **EXACT) as mode:
        for _ in range(2):
            actor.train(training)
            for _ in range(2):  # the second one finds the model as the critic left it
                actor.zero_grad()
                actor(x).sum().backward()
                assert all(weight.grad is not None and weight.grad.count_nonzero() for weight in weights)
                with torch.no_grad():
                    critic(x)
        assert "another model" in mode.explain()


def test_layers_packed_for_one_model_are_trained_in_another() -> None:
    trunk, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.ones(1, 64)
    actor, critic = (nn.Sequential(trunk, nn.Linear(64, 64)).eval() for _ in range(2))
    weight = trunk[0].weight
    with anytorch.mode("memory", device="cpu", **EXACT):
        with torch.no_grad():
            critic(x), actor(x)
        assert isinstance(trunk[0], QuantLinear)
        actor(x).sum().backward()
        assert weight.grad is not None and weight.grad.count_nonzero()


class Slow(nn.Module):
    """Waits between its layers, where gradients are wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
        self.between, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        if torch.is_grad_enabled():
            self.between.set()
            assert self.go_on.wait(60)
        result: torch.Tensor = self.two(x)
        return result


def test_weights_are_not_packed_under_another_threads_call() -> None:
    model, x = Slow().eval(), torch.ones(1, 64)
    with anytorch.mode("memory", device="cpu", **EXACT), ThreadPoolExecutor(1) as other_thread:
        try:
            done = other_thread.submit(lambda: model(x).sum().backward())
            assert model.between.wait(60)
            with torch.no_grad():
                model(x)
                assert type(model.two) is nn.Linear
        finally:
            model.go_on.set()
        done.result()
        assert model.two.weight.grad is not None
        with torch.no_grad():
            model(x)
            assert isinstance(model.two, QuantLinear)


@torch.no_grad()
def test_hooks_of_a_packed_layer_are_called_and_those_set_meanwhile_stay(model: Model) -> None:
    layer, x, seen = model.blocks[0].up, torch.ones(1, 64), []
    early = layer.register_forward_hook(lambda *_: seen.append("early"))
    with anytorch.mode("memory", device="cpu", **EXACT):
        model(x)
        assert isinstance(model.blocks[0].up, QuantLinear) and seen == ["early"]
        late = model.blocks[0].up.register_forward_pre_hook(lambda *_: seen.append("late"))
        early.remove()
        model(x)
        assert seen == ["early", "late"]
    model(x)
    assert model.blocks[0].up is layer and seen == ["early", "late", "late"]
    late.remove()
    model(x)
    assert len(seen) == 3


@torch.no_grad()
def test_a_layer_whose_forward_is_replaced_is_not_packed(model: Model) -> None:
    """As accelerate's hooks do it."""
    layer, seen = model.blocks[0].up, []
    layer.forward = lambda x: seen.append(1) or nn.Linear.forward(layer, x)  # type: ignore[method-assign,func-returns-value]
    with anytorch.mode("memory", device="cpu", **EXACT):
        model(torch.ones(1, 64))
        assert seen and model.blocks[0].up is layer and isinstance(model.blocks[1].up, QuantLinear)


def test_a_model_that_is_unfrozen_while_it_is_packed_gets_gradients(model: Model) -> None:
    x = torch.ones(1, 64)
    model.requires_grad_(False)
    with anytorch.mode("memory", device="cpu", **EXACT):
        model(x)
        assert isinstance(model.blocks[0].up, QuantLinear)
        model.requires_grad_(True)
        model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
