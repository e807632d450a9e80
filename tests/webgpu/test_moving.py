"""Modules keep their parameters when they are moved: ties, optimizers, gradients, hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.native


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.embedding(ids))
        return result


@pytest.fixture
def model(webgpu: Any) -> Tied:
    torch.manual_seed(0)
    return Tied()


IDS = torch.tensor([1, 5, 2])


def test_tied_weights_stay_one(model: Tied) -> None:
    weight = model.embedding.weight
    for target in ("webgpu", torch.float16, "cpu", torch.float32, "webgpu"):
        model.to(target)
        assert model.embedding.weight is weight and model.head.weight is weight
    assert weight.device.type == "webgpu" and weight.is_leaf and weight.requires_grad


def test_an_optimizer_made_before_the_move_trains_what_was_moved(model: Tied) -> None:
    other = Tied()
    other.load_state_dict(model.state_dict())
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, other))
    model.to("webgpu")
    for _ in range(2):
        for network, optimizer, device in ((model, first, "webgpu"), (other, second, "cpu")):
            optimizer.zero_grad()
            network(IDS.to(device)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(model.head.weight.detach().cpu(), other.head.weight.detach())


def test_gradients_attributes_and_hooks_come_along(model: Tied) -> None:
    weight = model.head.weight
    weight.note = "kept"  # type: ignore[attr-defined]
    seen: list[str] = []
    weight.register_hook(lambda gradient: seen.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    model(IDS).sum().backward()
    assert weight.grad is not None
    before = weight.grad.clone()
    model.to("webgpu")
    assert weight.grad is not None and weight.grad.device.type == "webgpu"
    torch.testing.assert_close(weight.grad.cpu(), before)
    assert weight.note == "kept"  # type: ignore[attr-defined]
    model(IDS.to("webgpu")).sum().backward()
    assert seen == ["gradient", "accumulated"] * 2
    torch.testing.assert_close(weight.grad.cpu(), 2 * before)


def test_a_graph_from_before_the_move_is_refused(model: Tied) -> None:
    loss = model(IDS).sum()
    model.to("webgpu")
    with pytest.raises(RuntimeError, match="before its parameters were moved"):
        loss.backward()
    assert model.head.weight.grad is None
    model(IDS.to("webgpu")).sum().backward()
    assert model.head.weight.grad is not None


def test_moving_in_inference_mode(model: Tied) -> None:
    """As ComfyUI does it: parameters that may have gradients, where nothing has any."""
    with torch.inference_mode():
        model.to("webgpu")
        moved = model(IDS.to("webgpu"))
        model.to("cpu")
        torch.testing.assert_close(moved.cpu(), model(IDS))


def test_modules_with_rules_of_their_own_still_move(webgpu: Any) -> None:
    lstm = torch.nn.LSTM(3, 4).to("webgpu")
    assert all(weight.device.type == "webgpu" for weight in lstm._flat_weights)
    lazy = torch.nn.LazyLinear(3).to("webgpu")
    assert lazy(torch.ones(2, 5, device="webgpu")).shape == (2, 3)
    with torch.device("meta"):
        empty = torch.nn.Linear(2, 2)
    assert empty.to_empty(device="webgpu").weight.device.type == "webgpu"


def test_printing_stays_off_the_list_of_fallbacks(webgpu: Any) -> None:
    assert repr(torch.tensor([1.5, -20.25], device="webgpu")) == "tensor([  1.5000, -20.2500], device='webgpu:0')"
    assert "..." in repr(torch.zeros(2000, device="webgpu"))
    assert repr(torch.tensor([True], device="webgpu")) == "tensor([True], device='webgpu:0')"


@pytest.mark.parametrize("first", ["cpu", "webgpu"])
def test_an_op_of_the_cpu_says_which_tensor_is_elsewhere(
    webgpu: Any, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.setenv("ANYTORCH_WEBGPU_FALLBACK", "silent")
    second = "webgpu" if first == "cpu" else "cpu"
    a, b = torch.eye(3, device=first), torch.ones(3, 1, device=second)
    culprit = "A" if first == "cpu" else "B"
    with pytest.raises(RuntimeError, match=f"all tensors to be on the same device, but got {culprit} is on cpu"):
        torch.linalg.solve(a, b)
    weight = torch.ones(1, 1, 2, device=second)
    with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
        torch.nn.functional.conv1d(torch.ones(1, 1, 4, device=first), weight)


def test_lengths_stay_on_the_host(webgpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYTORCH_WEBGPU_FALLBACK", "silent")
    scores = torch.randn(6, 2, 4).log_softmax(-1)
    targets, of_input, of_target = torch.tensor([[1, 2], [3, 1]]), torch.tensor([6, 5]), torch.tensor([2, 1])
    expected = torch.nn.functional.ctc_loss(scores, targets, of_input, of_target)
    found = torch.nn.functional.ctc_loss(scores.to("webgpu"), targets.to("webgpu"), of_input, of_target)
    torch.testing.assert_close(found.cpu(), expected)
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        torch.arange(6.0, device="webgpu").view(3, 2), torch.tensor([3, 1])
    )
    assert packed.data.tolist() == [0, 1, 2, 4] and packed.batch_sizes.device.type == "cpu"
