"""Every layer, loss and optimiser beside torch's: the same weights, the same results, the same gradients."""

# ruff: noqa: B023  (the functions made in loops are called there and then)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from anytorch import lite
from anytorch.errors import ModelError, UsageError
from anytorch.lite import functional as F
from anytorch.lite.create import wrap

TF = torch.nn.functional
Check = Callable[..., None]


def numbers(*shape: int, salt: int = 0) -> Any:
    return np.random.default_rng(salt + sum(shape)).standard_normal(shape).astype("float32")


def close(ours: Any, theirs: Any, tolerance: float = 2e-5) -> None:
    ours = np.asarray(ours.detach() if isinstance(ours, lite.CustomTensor) else ours)
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=tolerance, atol=tolerance)


def compare_modules(ours: Any, theirs: torch.nn.Module, *arrays: Any, pick: Callable[[Any], Any] = lambda y: y) -> None:
    """torch's weights in both; results, gradients of inputs and of every parameter."""
    ours.load_state_dict(theirs.state_dict())
    ours.train(theirs.training)
    a = [wrap(x, requires_grad=x.dtype.kind == "f") for x in arrays]
    b = [torch.from_numpy(x.copy()).requires_grad_(x.dtype.kind == "f") for x in arrays]
    y, z = pick(ours(*a)), pick(theirs(*b))
    close(y, z)
    weight = np.cos(np.arange(z.numel(), dtype="float32")).reshape(tuple(z.shape))
    y.backward(wrap(weight))
    z.backward(torch.from_numpy(weight))
    for mine, other in zip(a, b, strict=True):
        if other.grad is not None:
            close(mine.grad, other.grad, 1e-4)
    others = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        close(parameter.grad, others[name].grad, 1e-4)
    assert {n for n, _ in ours.named_parameters()} == set(others)


def test_linear() -> None:
    for shape in ((5, 3), (3,), (2, 4, 3), (0, 3)):
        compare_modules(lite.CustomLinear(3, 2), torch.nn.Linear(3, 2), numbers(*shape))
    compare_modules(lite.CustomLinear(3, 2, bias=False), torch.nn.Linear(3, 2, bias=False), numbers(4, 3))


@given(
    st.integers(0, 3), st.integers(1, 3), st.integers(1, 3), st.tuples(st.integers(3, 8), st.integers(3, 8)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)), st.integers(1, 3), st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.integers(1, 2), st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None, derandomize=True)
def test_conv2d(
    n: int, c: int, o: int, image: Any, kernel: Any, stride: int, padding: Any, dilation: int, grouped: bool
) -> None:
    assume(all(i + 2 * p >= dilation * (k - 1) + 1 for i, k, p in zip(image, kernel, padding, strict=True)))
    groups = c if grouped else 1
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    ours = lite.CustomConv2d(c, o * groups, kernel, **options)
    theirs = torch.nn.Conv2d(c, o * groups, kernel, **options)
    compare_modules(ours, theirs, numbers(n, c, *image))


def test_conv2d_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    from anytorch.lite.ops import conv

    monkeypatch.setattr(conv, "AT_ONCE", 2000)
    compare_modules(lite.CustomConv2d(3, 4, 3, padding=1), torch.nn.Conv2d(3, 4, 3, padding=1), numbers(7, 3, 6, 6))


def test_conv2d_of_a_strided_image() -> None:
    x = numbers(2, 8, 8, 3).transpose(0, 3, 1, 2)
    compare_modules(lite.CustomConv2d(3, 4, 1), torch.nn.Conv2d(3, 4, 1), x)


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, None, 0), (3, 2, 1), ((2, 3), (1, 2), (1, 0))])
def test_pooling(against_torch: Check, kernel: Any, stride: Any, padding: Any) -> None:
    for x in (numbers(2, 3, 6, 7), np.round(numbers(1, 2, 5, 6)), numbers(0, 2, 5, 6)):
        for ours, theirs in ((F.max_pool2d, TF.max_pool2d), (F.avg_pool2d, TF.avg_pool2d)):
            if theirs is TF.avg_pool2d or len(x):
                against_torch(
                    lambda t: ours(t, kernel, stride, padding), lambda t: theirs(t, kernel, stride, padding), x
                )


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(training: bool) -> None:
    for ours, theirs, shape in (
        (lite.BatchNorm2d(3), torch.nn.BatchNorm2d(3), (4, 3, 5, 2)),
        (lite.BatchNorm1d(3), torch.nn.BatchNorm1d(3), (4, 3)),
        (lite.BatchNorm1d(3), torch.nn.BatchNorm1d(3), (4, 3, 6)),
    ):
        torch.nn.init.uniform_(theirs.weight)
        torch.nn.init.uniform_(theirs.running_mean)
        torch.nn.init.uniform_(theirs.running_var, 0.5, 2)
        compare_modules(ours, theirs.train(training), numbers(*shape))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            close(getattr(ours, name), getattr(theirs, name))
    with pytest.raises(UsageError, match="more than one value"):
        lite.BatchNorm1d(3)(lite.zeros(1, 3))
    with pytest.raises(UsageError, match="3 channels"):
        lite.BatchNorm2d(3)(lite.zeros(1, 2, 4, 4))


def test_layer_norm() -> None:
    compare_modules(lite.LayerNorm(5), torch.nn.LayerNorm(5), numbers(3, 4, 5))
    compare_modules(lite.LayerNorm((4, 5)), torch.nn.LayerNorm((4, 5)), numbers(3, 4, 5))


def test_embedding() -> None:
    compare_modules(lite.Embedding(5, 3), torch.nn.Embedding(5, 3), np.array([[0, 4, 4], [1, 0, 2]]))
    with pytest.raises(UsageError, match="rows 0 to 4"):
        lite.Embedding(5, 3)(lite.tensor([5]))
    with pytest.raises(UsageError, match="whole numbers"):
        lite.Embedding(5, 3)(lite.zeros(1))


def test_dropout() -> None:
    layer = lite.Dropout(0.25)
    x = lite.ones(200, 100, requires_grad=True)
    y = layer(x)
    kept = y.detach().numpy() != 0
    assert 0.73 < kept.mean() < 0.77
    np.testing.assert_allclose(y.detach().numpy()[kept], 1 / 0.75, rtol=1e-6)
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), y.detach().numpy())
    assert layer.eval()(x) is x
    assert not lite.Dropout(1.0)(x).detach().numpy().any()


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}])
def test_recurrent(name: str, options: Any) -> None:
    for what in (0, 1):  # the outputs, then the last states
        ours, theirs = getattr(lite, name)(3, 4, **options), getattr(torch.nn, name)(3, 4, **options)

        def pick(result: Any, what: int = what) -> Any:
            state = result[1]
            return result[0] if what == 0 else state if not isinstance(state, tuple) else state[0] * 2 + state[1]

        compare_modules(ours, theirs, numbers(5, 2, 3), pick=pick)


def test_recurrent_from_a_state() -> None:
    x, h, c = numbers(4, 2, 3), numbers(1, 2, 5, salt=1), numbers(1, 2, 5, salt=2)
    theirs = torch.nn.LSTM(3, 5)
    ours = lite.LSTM(3, 5)
    ours.load_state_dict(theirs.state_dict())
    states = [lite.tensor(s, requires_grad=True) for s in (h, c)]
    other = [torch.from_numpy(s).requires_grad_() for s in (h, c)]
    y, (_, end) = ours(lite.tensor(x), tuple(states))
    z, (_, end2) = theirs(torch.from_numpy(x), tuple(other))
    (y.sum() + (end * end).sum()).backward()
    (z.sum() + (end2 * end2).sum()).backward()
    for mine, their in zip(states, other, strict=True):
        close(mine.grad, their.grad)
    with pytest.raises(UsageError, match="the last of 3"):
        ours(lite.zeros(4, 2, 7))


def test_attention() -> None:
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    ours = lite.MultiheadAttention(8, 2)
    ours.load_state_dict(theirs.state_dict())
    x, memory = numbers(2, 4, 8), numbers(2, 3, 8)
    a, b = lite.tensor(x), torch.from_numpy(x)
    close(ours(a), theirs(b, b, b)[0])
    close(ours(a, lite.tensor(memory)), theirs(b, torch.from_numpy(memory), torch.from_numpy(memory))[0])
    see = torch.ones(4, 4).tril().bool()
    expected = theirs(b, b, b, attn_mask=~see)[0]
    close(ours(a, causal=True), expected)
    close(ours(a, mask=lite.tensor(see.numpy())), expected)
    with pytest.raises(UsageError, match="3 heads"):
        lite.MultiheadAttention(8, 3)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_transformer_encoder_layer(norm_first: bool, activation: str) -> None:
    options: Any = {"dim_feedforward": 16, "dropout": 0.0, "activation": activation, "norm_first": norm_first}
    theirs = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True, **options)
    compare_modules(lite.TransformerEncoderLayer(8, 2, **options), theirs, numbers(2, 5, 8))


@pytest.mark.parametrize("name", ["ReLU", "GELU", "SiLU", "Sigmoid", "Tanh", "Softmax"])
def test_activations(name: str) -> None:
    theirs = torch.nn.Softmax(-1) if name == "Softmax" else getattr(torch.nn, name)()
    compare_modules(getattr(lite, name)(), theirs, numbers(3, 4))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses(against_torch: Check, reduction: str) -> None:
    p, t = numbers(4, 3), numbers(4, 3, salt=9)
    against_torch(lite.CustomMSELoss(reduction), torch.nn.MSELoss(reduction=reduction), p, t)
    against_torch(lite.L1Loss(reduction), torch.nn.L1Loss(reduction=reduction), p, t)
    unit = (t > 0).astype("float32")
    against_torch(lite.BCEWithLogitsLoss(reduction), torch.nn.BCEWithLogitsLoss(reduction=reduction), p * 50, unit)
    classes = np.array([0, 2, -100, 1])
    for smoothing in (0.0, 0.1):
        options: Any = {"reduction": reduction, "label_smoothing": smoothing}
        ours, theirs = lite.CrossEntropyLoss(**options), torch.nn.CrossEntropyLoss(**options)
        against_torch(lambda x: ours(x, lite.tensor(classes)), lambda x: theirs(x, torch.from_numpy(classes)), p)
        pixels = np.array([[0, 1], [2, 1]])
        against_torch(
            lambda x: ours(x, lite.tensor(pixels)), lambda x: theirs(x, torch.from_numpy(pixels)), numbers(2, 3, 2)
        )


def test_losses_refuse_what_is_nearly_always_a_mistake() -> None:
    with pytest.raises(UsageError, match="nearly always a mistake"):
        lite.CustomMSELoss()(lite.zeros(4, 1), lite.zeros(4))
    with pytest.raises(UsageError, match="outside 0 … 2"):
        lite.CrossEntropyLoss()(lite.zeros(1, 3), lite.tensor([3]))
    with pytest.raises(UsageError, match="unknown reduction"):
        lite.L1Loss("median")(lite.zeros(1), lite.zeros(1))


OPTIMIZERS = {
    "SGD": [
        {"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, {"lr": 0.01, "momentum": 0.9, "nesterov": True},
    ],
    "Adam": [{"lr": 0.05}, {"lr": 0.05, "weight_decay": 0.1}],
    "AdamW": [{"lr": 0.05}, {"lr": 0.05, "weight_decay": 0.2, "betas": (0.8, 0.9)}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "options"), [(n, o) for n, many in OPTIMIZERS.items() for o in many])
def test_optimizers(name: str, options: Any) -> None:
    start = numbers(3, 2)
    x, y = lite.Parameter(start), torch.nn.Parameter(torch.from_numpy(start.copy()))
    ours, theirs = getattr(lite, name)([x], **options), getattr(torch.optim, name)([y], **options)
    for _ in range(7):
        for optimizer, p in ((ours, x), (theirs, y)):
            optimizer.zero_grad()
            ((p * p - p) ** 2).sum().backward()
            optimizer.step()
    close(x, y, 1e-5)
    again = getattr(lite, name)([x], **options)
    again.load_state_dict(ours.state_dict())
    assert again.steps == 7


def test_schedules() -> None:
    def rates(make: Any, theirs: Any) -> tuple[list[float], list[float]]:
        ours = lite.SGD([lite.Parameter([1])], lr=0.5)
        other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
        schedule, their_schedule = make(ours), theirs(other)
        found: tuple[list[float], list[float]] = ([], [])
        for _ in range(8):
            found[0].append(ours.lr)
            found[1].append(other.param_groups[0]["lr"])
            schedule.step()
            other.step()
            their_schedule.step()
        return found

    of = torch.optim.lr_scheduler
    for make, theirs in (
        (lambda o: lite.step_schedule(o, 3, 0.5), lambda o: of.StepLR(o, 3, 0.5)),
        (lambda o: lite.exponential_schedule(o, 0.9), lambda o: of.ExponentialLR(o, 0.9)),
        (lambda o: lite.cosine_schedule(o, 8), lambda o: of.CosineAnnealingLR(o, 8)),
    ):
        ours, other = rates(make, theirs)
        np.testing.assert_allclose(ours, other, rtol=1e-6, atol=1e-9)
    optimizer = lite.SGD([lite.Parameter([1])], lr=1.0)
    schedule = lite.cosine_schedule(optimizer, epochs=6, warmup=2)
    seen = [optimizer.lr]
    for _ in range(6):
        schedule.step()
        seen.append(optimizer.lr)
    assert seen[:3] == [0.5, 1.0, 1.0]
    assert seen[-1] == 0.0


def test_clipping() -> None:
    start = numbers(5)
    x, y = lite.Parameter(start), torch.nn.Parameter(torch.from_numpy(start.copy()))
    (x * x * 9).sum().backward()
    (y * y * 9).sum().backward()
    norm = lite.clip_grad_norm([x], 1.5)
    assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_([y], 1.5).item(), rel=1e-5)
    close(x.grad, y.grad)
    lite.clip_grad_value([x], 0.1)
    torch.nn.utils.clip_grad_value_([y], 0.1)
    close(x.grad, y.grad)


def test_module_state() -> None:
    model = lite.Sequential(lite.CustomLinear(3, 4), lite.BatchNorm1d(4), lite.ReLU(), lite.CustomLinear(4, 2))
    theirs = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    assert list(model.state_dict()) == list(theirs.state_dict())
    compare_modules(model, theirs, numbers(6, 3))
    state = model.state_dict()
    state["3.bias"].fill_(5)
    assert model[3].bias.tolist() == [5, 5], "the state shares the module's memory"
    broken = {**state, "extra": lite.zeros(1)}
    del broken["0.weight"]
    with pytest.raises(ModelError, match=r"missing 0\.weight; unexpected extra"):
        model.load_state_dict(broken)
    model.load_state_dict(broken, strict=False)
    with pytest.raises(ModelError, match=r"0\.weight.*\(1,\)"):
        model.load_state_dict({**state, "0.weight": lite.zeros(1)})
    theirs.bfloat16()
    model.load_state_dict(theirs.state_dict())
    assert "(0): CustomLinear(3, 4, bias=True)" in repr(model)
    assert not model.eval()[1].training


def test_shared_parameters_are_counted_once() -> None:
    class Tied(lite.Module):
        def __init__(self) -> None:
            self.a = lite.CustomLinear(2, 2)
            self.b = lite.CustomLinear(2, 2)
            self.b.weight = self.a.weight

    assert len(Tied().parameters()) == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: lite.CustomDevice("webgpu", 1),
        lambda: lite.CustomDevice("webgpu:1"),
        lambda: lite.CustomDevice("custom", -1),
        lambda: lite.tensor("abc"),
        lambda: lite.tensor(np.array([None])),
        lambda: lite.tensor(1j),
        lambda: lite.CustomLinear(-1, 4),
        lambda: lite.CustomConv2d(1, 1, 3, stride=0)(lite.ones(1, 1, 8, 8)),
        lambda: lite.CustomConv2d(1, 1, 3, padding=-1)(lite.ones(1, 1, 8, 8)),
        lambda: lite.MaxPool2d(2, stride=0)(lite.ones(1, 1, 8, 8)),
        lambda: lite.ones(4).split(0),
        lambda: lite.Adam([lite.ones(1, requires_grad=True)], betas=(1.0, 2.0)),
    ],
)
def test_what_cannot_be_made_says_so(make: Callable[[], object]) -> None:
    with pytest.raises(UsageError):
        make()
