"""Adapters on a frozen base that rests in few bits and streams: the numbers of the model in memory, within the budget."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import anytorch
from anytorch.errors import UsageError
from anytorch.memory.training import TieredOptimizer
from anytorch.quant import add_lora, lora_parameters
from anytorch.quant.linear import QuantLinear

pytestmark = pytest.mark.usefixtures("quant_builds")
WIDTH, LAYERS = 256, 8
WEIGHT = 4 * WIDTH * WIDTH * 4  # bytes of one unpacked matrix
BASES = ("unpacked", "codes")  # packed at rest and unpacked before use; or computed from the codes
KB = 2**10
# A layer has 2 MB of float32 weights, 0.27 MB of int4 codes; unpacking takes room for one layer.
LEVELS: dict[tuple[str, str], dict[str, Any]] = {
    ("unpacked", "disk"): {"device_budget": 2900 * KB},
    ("unpacked", "host"): {"device_budget": 2900 * KB, "host_budget": "8MB"},
    ("codes", "disk"): {"device_budget": 800 * KB},
    ("codes", "host"): {"device_budget": 800 * KB, "host_budget": "4MB"},
}


class Model(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def adapted(models: Any, base: str, rank: int = 1) -> Model:
    torch.manual_seed(0)
    model = Model(models.Layer)
    if base == "codes":
        for layer in model.layers:
            layer.up, layer.down = QuantLinear.of(layer.up, "int4"), QuantLinear.of(layer.down, "int4")
    add_lora(model, rank)
    for parameter in lora_parameters(model):
        nn.init.normal_(parameter, std=0.05)
    return model


def fit(model: Model, base: str, level: str, given: dict[str, Any]) -> Any:
    rest_format = "int4" if base == "unpacked" else None
    anytorch.memory.fit(model, "cpu", rest_format=rest_format, **LEVELS[base, level], **given)
    handle = anytorch.memory.fitted(model)
    assert sum(home == level for home in handle.plan.homes.values()) >= LAYERS - 2, "a few layers fit, most do not"
    assert bool(handle.packings) == (base == "unpacked")
    return handle


def in_memory(model: Model) -> Model:
    """The same weights in a model that is in memory as a whole: those that the packed ones stand for, or the codes."""
    anytorch.memory.unfit(model)
    return copy.deepcopy(model)


def train(model: Model, optimizer: torch.optim.Optimizer, steps: int = 3, watch: Any = None) -> list[float]:
    torch.manual_seed(7)
    losses = []
    for _ in range(steps):
        x = torch.randn(3, WIDTH)
        loss = (model(x) - x.roll(1)).square().mean()
        if watch is not None:
            watch()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def tensor_nbytes() -> int:
    """All memory that tensors hold, also what autograd keeps of them."""
    # By type: `isinstance` would wake what other packages have put off.
    storages = [one.untyped_storage() for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@contextmanager
def watched_backward(model: Model, seen: list[int]) -> Iterator[None]:
    """How much memory tensors hold whenever backward comes to a layer."""

    def watch(layer: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.register_hook(lambda gradient: seen.append(tensor_nbytes()))

    handles = [layer.register_forward_hook(watch) for layer in model.layers]
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("way", ["keep", "checkpoint", "offload"])
@pytest.mark.parametrize("level", ["disk", "host"])
@pytest.mark.parametrize("base", BASES)
def test_the_losses_of_the_model_in_memory_within_the_budget(
    models: Any, given: dict[str, Any], base: str, level: str, way: str
) -> None:
    model = adapted(models, base)
    start = [p.detach().clone() for p in lora_parameters(model)]
    handle = fit(model, base, level, given)
    anytorch.memory.activations(model, way)
    before = tensor_nbytes()
    kept: list[int] = []
    with watched_backward(model, kept):
        found = train(
            model, torch.optim.AdamW(lora_parameters(model), lr=1e-2), watch=lambda: kept.append(tensor_nbytes())
        )
    assert len(kept) > LAYERS
    # One layer at work may have a copy of its codes that the chosen kernel wants; all layers' codes would be 2 MB.
    assert max(kept) - before < 1.4 * WEIGHT, "weights are kept for backward besides the budget"
    for use in handle.stats()["levels"].values():
        assert use["peak"] <= use["capacity"]
    plain = in_memory(model)
    trained = [p.detach().clone() for p in lora_parameters(model)]
    with torch.no_grad():
        for parameter, value in zip(lora_parameters(plain), start, strict=True):
            parameter.copy_(value)
    want = train(plain, torch.optim.AdamW(lora_parameters(plain), lr=1e-2))
    assert found == want and found[-1] < found[0]
    assert all(torch.equal(a, b) for a, b in zip(trained, lora_parameters(plain), strict=True))


@pytest.mark.parametrize("level", ["disk", "host"])
def test_adapters_too_large_to_stay_move_with_their_layer(models: Any, given: dict[str, Any], level: str) -> None:
    """The base's codes are read and written back with them, bit for bit."""
    model = adapted(models, "codes", rank=8)
    plain = copy.deepcopy(model)
    codes = {name: tensor.clone() for name, tensor in model.named_buffers()}
    want = train(plain, torch.optim.AdamW(lora_parameters(plain), lr=1e-2))
    levels = {"device_budget": "1.2MB", "reserve": "0.4MB"}
    if level == "host":
        levels |= {"host_budget": "8MB", "host_reserve": "1MB"}
    anytorch.memory.fit(model, "cpu", **levels, **given)
    optimizer = TieredOptimizer(model, torch.optim.AdamW, lora_parameters(model), lr=1e-2)
    assert train(model, optimizer) == want
    optimizer.close()
    anytorch.memory.unfit(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert all(torch.equal(tensor, codes[name]) for name, tensor in model.named_buffers())


@pytest.mark.parametrize("base", BASES)
def test_backward_twice_through_one_graph_and_in_another_order(models: Any, given: dict[str, Any], base: str) -> None:
    model = adapted(models, base).eval()
    handle = fit(model, base, "disk", given)
    x = torch.randn(3, WIDTH, requires_grad=True)

    def gradients() -> list[torch.Tensor]:
        first, second = model.layers[1](x), model.layers[5](x)
        again = model.layers[1](second)
        found = [torch.autograd.grad(first.sum(), x, retain_graph=True)[0] for _ in range(2)]
        return [*found, torch.autograd.grad((again * first).sum(), x)[0]]

    streamed = gradients()
    assert not handle.running._holding
    assert all(torch.equal(a, b) for a, b in zip(streamed, gradients(), strict=True))
    plain = in_memory(model)
    model.layers = plain.layers
    assert all(torch.equal(a, b) for a, b in zip(streamed, gradients(), strict=True))


@pytest.mark.parametrize("base", BASES)
def test_a_backward_and_forwards_of_other_threads(models: Any, given: dict[str, Any], base: str) -> None:
    """Whoever has the room, or a block of the ring, keeps it until its tensors are used."""
    model = adapted(models, base).eval()
    fit(model, base, "disk", given)
    x = torch.randn(3, WIDTH)

    def gradient() -> torch.Tensor:
        own = x.clone().requires_grad_()
        return torch.autograd.grad(model(own).square().sum(), own)[0]

    with torch.no_grad():
        answer = model(x)
    want = gradient()
    wrong: list[str] = []

    def work(forward: bool) -> None:
        try:
            for _ in range(6):
                with torch.no_grad():
                    if forward and not torch.equal(model(x), answer):
                        wrong.append("forward")
                if not forward and not torch.equal(gradient(), want):
                    wrong.append("backward")
        except BaseException as exc:  # noqa: BLE001  (shown below)
            wrong.append(repr(exc))

    threads = [threading.Thread(target=work, args=(forward,)) for forward in (True, False, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    anytorch.memory.unfit(model)


def test_a_backward_that_was_broken_off_leaves_the_room_free(models: Any, given: dict[str, Any]) -> None:
    model = adapted(models, "unpacked").eval()
    handle = fit(model, "unpacked", "disk", given)
    x = torch.randn(3, WIDTH, requires_grad=True)
    between = model.layers[4](model.layers[3](x))

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("in the middle of backward")

    between.register_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        model.layers[6](model.layers[5](between)).sum().backward()
    gc.collect()
    done: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: done.append(model(x)))
    thread.start()
    thread.join(timeout=120)
    assert done and handle.running.scratch._owner is None
    anytorch.memory.unfit(model)


class Calling(nn.Module):
    """Uses a layer that is not its own."""

    def __init__(self, other: nn.Module | None) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.__dict__["other"] = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x if self.other is None else self.other(x)
        result: torch.Tensor = self.own(inner)
        return result


def test_a_packed_layer_within_another_is_refused(given: dict[str, Any]) -> None:
    """There is room for one of them, and a wrong number would be the answer."""
    torch.manual_seed(0)
    inner = Calling(None)
    model = nn.ModuleList([inner, Calling(inner), *(Calling(None) for _ in range(4))])
    anytorch.memory.fit(model, "cpu", rest_format="int8", device_budget=450 * KB, blocks=["?"], **given)
    assert len(anytorch.memory.fitted(model).packings) >= 5
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        model[0](x)
        with pytest.raises(UsageError, match="within the forward of '1'"):
            model[1](x)
        model[2](x)
    anytorch.memory.unfit(model)
