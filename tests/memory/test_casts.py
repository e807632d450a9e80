"""Rounded weights that a mode keeps between calls: they are rounded once, and never answer for a weight that has changed."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import anytorch
from anytorch.memory import casts
from anytorch.memory.modes import ActiveMode


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        result: Tensor = self.head(x + self.down(torch.tanh(self.up(x))))
        return result


IDS = torch.tensor([[3, 1, 4]])


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(autouse=True)
def mode() -> Iterator[ActiveMode]:
    forward = nn.Linear.forward
    with anytorch.use(cpu_dtype="bfloat16"), anytorch.mode("speed", device="cpu") as on:
        yield on
    assert nn.Linear.forward is forward and "data" not in torch.Tensor.__dict__
    assert all(layer.kind.forward is layer.plain for layer in casts._layers)


def expected(net: nn.Module, call: Callable[[nn.Module], Tensor]) -> Tensor:
    """As torch's own autocast computes it, which rounds every weight at that time."""
    twin = Net().eval()
    twin.load_state_dict(net.state_dict())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return call(twin).float()


class Roundings(TorchDispatchMode):
    """Counts conversions of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].dim() == 2 and args[0].dtype == torch.float32:
            self.count += args[0].shape in (Net().up.weight.shape, Net().down.weight.shape)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_weights_are_rounded_once_and_answers_are_autocasts_to_the_bit(net: Net, mode: ActiveMode) -> None:
    first = net(IDS)
    with Roundings() as seen:
        again = net(IDS)
    assert seen.count == 0 and casts.held_nbytes(net) == 2 * sum(w.numel() for w in casts.layers_of(net).values())
    assert torch.equal(first, again) and torch.equal(first, expected(net, lambda it: it(IDS)))
    assert net.head.weight is net.words.weight and net.head.weight.dtype is torch.float32
    (found,) = mode.describe()["models"]
    assert found["rounded weights"] == {"nbytes": casts.held_nbytes(net)}
    for other in (copy.deepcopy(net), torch.load(saved(net), weights_only=False)):
        assert torch.equal(other(IDS), first) and type(other.up) is nn.Linear


def saved(net: Net) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return file


def _in_place(net: Net) -> None:
    net.up.weight.mul_(2)


def _loaded(net: Net) -> None:
    net.load_state_dict(Net().state_dict())


def _through_data(net: Net) -> None:
    net.up.weight.data[0] = 5


def _data_in_place(net: Net) -> None:
    net.up.weight.data += 1


def _other_data(net: Net) -> None:
    """Where the first ones lay, as far as the system gives the same place again."""
    for _ in range(3):
        net.up.weight.data = torch.randn_like(net.up.weight)


def _other_weight(net: Net) -> None:
    net.up.weight = nn.Parameter(torch.randn(12, 8))


def _other_layer(net: Net) -> None:
    net.down = nn.Linear(12, 8, bias=False)


def _moved(net: Net) -> None:
    net.double().float().up.weight.add_(1)


@torch.enable_grad()
def _trained(net: Net) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    net.train()(IDS).square().sum().backward()
    optimizer.step()
    net.eval()


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [_in_place, _loaded, _through_data, _data_in_place, _other_data, _other_weight, _other_layer, _moved, _trained],
)
def test_a_weight_that_was_changed_is_rounded_again(net: Net, change: Callable[[Net], None]) -> None:
    before = net(IDS)
    change(net)
    after = net(IDS)
    assert not torch.equal(before, after) and torch.equal(after, expected(net, lambda it: it(IDS)))


@torch.no_grad()
def test_a_weight_that_takes_the_place_of_a_freed_one_is_rounded() -> None:
    """The new object, and its memory, may have the very addresses of the old ones."""
    layer = nn.Linear(512, 512, bias=False).eval()
    x = torch.ones(1, 512)
    for value in range(100):
        del layer.weight
        layer.weight = nn.Parameter(torch.full((512, 512), float(value)))
        assert torch.equal(layer(x), torch.full((1, 512), 512.0 * value))


@pytest.mark.parametrize("cleared", [True, False])
def test_a_fused_optimizer_which_torch_does_not_count_is_seen(net: Net, cleared: bool) -> None:
    """The gradients come from elsewhere, as from a compiled step: no call with gradients is seen."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    with torch.no_grad():
        before = net(IDS)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if cleared:
        optimizer.zero_grad()
    with torch.no_grad():
        after = net(IDS)
        assert not torch.equal(before, after) and torch.equal(after, expected(net, lambda it: it(IDS)))


@torch.no_grad()
def test_one_whose_data_was_given_out_may_change_at_any_time(net: Net) -> None:
    net(IDS)
    alias = net.up.weight.data
    for value in (1.0, 2.0):
        alias.fill_(value)
        assert torch.equal(net(IDS), expected(net, lambda it: it(IDS)))


@torch.no_grad()
@pytest.mark.parametrize("view", [lambda w: w.data, lambda w: w.detach().numpy(), lambda w: w.view(-1)])
def test_one_that_others_have_a_view_of_may_change_at_any_time(net: Net, view: Callable[[Tensor], Any]) -> None:
    early = view(net.up.weight)
    net(IDS)
    early[:] = 3.0
    assert torch.equal(net(IDS), expected(net, lambda it: it(IDS)))
    late = view(net.down.weight)
    late[:] = 2.0
    assert torch.equal(net(IDS), expected(net, lambda it: it(IDS)))


@torch.no_grad()
def test_memory_that_processes_share_is_not_kept(net: Net) -> None:
    net(IDS)
    assert casts.held_nbytes(net) > 0
    net.share_memory()
    for _ in range(2):
        net(IDS)
        assert casts.held_nbytes(net) == 0


@torch.no_grad()
def test_a_bias_may_be_computed(net: Net) -> None:
    class Hundred(nn.Module):
        def forward(self, bias: Tensor) -> Tensor:
            return bias + 100

    layer = nn.Linear(4, 3).eval()
    torch.nn.utils.parametrize.register_parametrization(layer, "bias", Hundred())
    x = torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = layer(x).float()
    assert torch.equal(layer(x), wanted) and torch.equal(layer(x), wanted)


@torch.no_grad()
def test_other_dtypes_and_swapped_tensors(net: Net) -> None:
    net(IDS)
    double = net.double()(IDS)
    assert double.dtype is torch.float64
    net.float()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net(IDS)
        net.load_state_dict(Net().state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert torch.equal(net(IDS), expected(net, lambda it: it(IDS)))


@torch.no_grad()
def test_tensors_put_in_for_one_call_count(net: Net) -> None:
    net(IDS)
    other = {name: torch.randn_like(value) for name, value in net.named_parameters()}

    def call(it: nn.Module) -> Tensor:
        return torch.func.functional_call(it, other, (IDS,))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(call(net), call(Net().eval()))


def test_gradients_of_inputs_and_of_weights_are_autocasts(net: Net) -> None:
    layer = net.up
    x = torch.randn(2, 8)
    for trains in (False, True):
        layer.requires_grad_(trains)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        with torch.inference_mode():
            layer(x)  # kept from here on
        layer(mine).sum().backward()
        grad, layer.weight.grad = layer.weight.grad, None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            nn.functional.linear(theirs, layer.weight, layer.bias).float().sum().backward()
        assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad)
        if trains:
            assert grad is not None and layer.weight.grad is not None and torch.equal(grad, layer.weight.grad)


@torch.no_grad()
def test_a_model_compiled_meanwhile_reads_its_weights_itself(net: Net) -> None:
    compiled: Any = torch.compile(net, backend="eager", fullgraph=True)
    first = compiled(IDS)
    assert torch.equal(first, expected(net, lambda it: it(IDS)))
    net.up.weight.mul_(3)
    assert torch.equal(compiled(IDS), expected(net, lambda it: it(IDS))) and not torch.equal(compiled(IDS), first)


@pytest.mark.filterwarnings("ignore:`torch.jit.script. is deprecated:DeprecationWarning")
def test_layers_are_scripted_as_without_a_mode() -> None:
    from transformers.pytorch_utils import Conv1D

    for layer in (nn.Linear(4, 3), Conv1D(3, 4)):
        casts.watch()  # transformers may be loaded only now
        scripted = torch.jit.script(nn.Sequential(layer, nn.ReLU()))
        x = torch.randn(2, 4)
        weight = layer.weight.T if isinstance(layer, nn.Linear) else layer.weight
        torch.testing.assert_close(scripted(x), torch.addmm(layer.bias, x, weight).relu())


@torch.no_grad()
def test_what_is_beyond_the_budget_is_not_kept(net: Net, mode: ActiveMode, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(tensor.nbytes for tensor in net.parameters())
    monkeypatch.setattr("anytorch.memory.prepared.device_budget", lambda *_: size + 10)
    assert torch.equal(net(IDS), expected(net, lambda it: it(IDS))) and casts.held_nbytes(net) == 0
    assert "exceed the budget" in mode.explain()


@torch.no_grad()
def test_nothing_is_kept_of_a_model_that_is_gone(net: Net) -> None:
    short = Net().eval()
    short(IDS)
    held = weakref.ref(casts._casts[short.up])
    del short
    gc.collect()
    assert held() is None


@torch.no_grad()
def test_gpt2s_layers_keep_theirs() -> None:
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(Conv1D(12, 8), nn.Tanh(), Conv1D(4, 12)).eval()
    x = torch.randn(2, 3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = model(x).float()
    for _ in range(2):
        assert torch.equal(model(x), wanted)
    assert casts.held_nbytes(model) == 2 * (8 * 12 + 12 * 4)
