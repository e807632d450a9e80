"""The same on a GPU (llvmpipe where there is none): equal answers and gradients, and what has a kernel stays there."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anytorch import lite
from anytorch.errors import UsageError
from anytorch.lite import functional as F


@pytest.fixture
def gpu(adapter: None) -> Iterator[lite.CustomDevice]:
    from anytorch.lite.gpu.array import fallbacks

    fallbacks.clear()
    yield lite.CustomDevice("webgpu")


def fallen() -> dict[str, int]:
    from anytorch.lite.gpu.array import fallbacks

    return dict(fallbacks)


def numbers(*shape: int, salt: int = 0) -> Any:
    return np.random.default_rng(sum(shape) + 10 * salt).standard_normal(shape).astype("float32")


@contextmanager
def staying() -> Iterator[None]:
    """Inside, no array comes down from the GPU."""
    from anytorch.lite.gpu.array import GpuArray

    def refused(*_: Any) -> Any:
        raise AssertionError("an array on the GPU was brought to the host")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GpuArray, "__array__", refused)
        yield


def both(gpu: Any, op: Callable[..., Any], *arrays: Any, grad: bool = True, stays: bool = False) -> None:
    """`op` on the host and on the GPU: results and gradients."""
    sides: list[list[Any]] = []
    for device in (None, gpu):
        tensors = [lite.tensor(x, device=device, requires_grad=grad) for x in arrays]
        with staying() if stays else nullcontext():
            result = op(*tensors)
            assert result.device.is_gpu == (device is gpu)
            if grad:
                weight = np.cos(np.arange(result.numel(), dtype="float32")).reshape(result.shape)
                result.backward(lite.tensor(weight, device=device))
        sides.append([result.detach().numpy(), *([t.grad.numpy() for t in tensors] if grad else [])])
    for host, there in zip(*sides, strict=True):
        assert host.dtype == there.dtype
        # A result near zero is the difference of large sums: it is as exact as they are.
        largest = float(np.abs(host).max(initial=0)) if host.dtype.kind == "f" else 0.0
        np.testing.assert_allclose(there, host, rtol=3e-5, atol=max(3e-5, 3e-6 * largest))


ON_DEVICE = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - 2 * b,
    "mul": lambda a, b: a * b + 1,
    "div": lambda a, b: a / (b * b + 1),
    "power": lambda a, b: (a * a + 1) ** 2.0 * 1 + b,
    "broadcast": lambda a, b: a * b[0] + b[:, :1],
    "matmul": lambda a, b: a @ b.T,
    "matmul of views": lambda a, b: a.T @ b[:, 1:],
    "vectors": lambda a, b: a[0] @ b[1],
    "batches": lambda a, b: a.reshape(2, 2, 5) @ b.reshape(2, 5, 2),
    "sum": lambda a, b: a.sum(0) * b.sum() + a.sum(1, keepdim=True).sum(),
    "mean": lambda a, b: a.mean(1) + b.mean(),
    "exp": lambda a, b: (a * 0.5).exp() + (b * b + 1).log() + (b * b + 1).sqrt(),
    "trigonometry": lambda a, b: a.sin() * b.cos(),
    "activations": lambda a, b: F.relu(a) + F.sigmoid(b) + F.tanh(a) + F.silu(b),
    "softmax": lambda a, b: a.softmax(1) * b.softmax(0),
    "log_softmax": lambda a, b: a.log_softmax(-1) + b,
    "shapes": lambda a, b: a.transpose(0, 1).reshape(2, 10) + b.reshape(10, 2).permute(1, 0),
    "slices": lambda a, b: a[1:3, ::2] * b[None, 0, 2:],
    "cat": lambda a, b: F.cat([a, b, a], 1) * 2,
    "stack": lambda a, b: F.stack([a, b], 1),
    "expand": lambda a, b: a.unsqueeze(0).expand(3, -1, -1) * b,
    "layer norm": lambda a, b: F.layer_norm(a, b[0], b[1], 5, 1e-5),
    "linear": lambda a, b: F.linear(a, b[:3], a[0, :3]),
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "attention": lambda a, b: F.scaled_dot_product_attention(a, b, b),
}


def layer(make: Callable[[], Any], run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`run` with a layer of the same weights on either side, whose gradients are added to the answer to be compared."""

    def op(a: Any, b: Any) -> Any:
        lite.seed(0)
        made = make()
        if a.device.is_gpu:
            made.to(a.device)
        result = run(made, a) + b[0, 0]
        (result * result).sum().backward(retain_graph=True)
        total = sum((p.grad.sum() + (p.grad * p.grad).sum() for p in made.parameters()), start=a.sum() * 0)
        a.grad = b.grad = None
        return result + total.detach()

    return op


IMAGE = (2, 1, 2, 5)  # the shape of the 20 numbers as (N, C, H, W)

ON_DEVICE |= {
    "extremes": lambda a, b: a.amax(1) + b.amin((0, 1)) + a.max(),
    "extremes with places": lambda a, b: a.max(1)[0] * b.min(0)[0].sum() + b.max(0, keepdim=True)[0].sum(),
    "var": lambda a, b: a.var(0) * b.std(),
    "gelu": lambda a, b: F.gelu(3 * a) * b,
    "softplus": lambda a, b: F.softplus(5 * a) * b,
    "clamp": lambda a, b: a.clamp(-0.5, 0.5) * b.clamp(min=0.1) + a.clamp(max=0.3),
    "cumsum": lambda a, b: a.cumsum(0) * b.cumsum(-1),
    "where": lambda a, b: F.where(a > b, a, b) + F.where((a <= 0.5) & ~(b < 0) | (a == b), a * 2, b),
    "masked fill": lambda a, b: a.masked_fill(b > 0, -1.0) * b.masked_fill(b != b, 0.0),
    "maximum": lambda a, b: F.maximum(a, b) + F.minimum(a, b * 2) + F.maximum(a, 0.25),
    "index": lambda a, b: a[[0, 2, 2]] * b[:3] + a[np.array([[-1], [1], [1]])].sum(1),
    "backwards": lambda a, b: a[::-1] * b[:, 3:0:-1].sum() + b[::-2, :1].sum(),
    "causal attention": lambda a, b: F.scaled_dot_product_attention(a, b, b, causal=True),
    "masked attention": lambda a, b: F.scaled_dot_product_attention(a, b, b, (a @ b.T) > -1),
    "bce": lambda a, b: F.bce_with_logits(a, F.sigmoid(b)),
    "softmax down": lambda a, b: a.reshape(2, 5, 2).softmax(1) * b.reshape(2, 5, 2).log_softmax(0),
    "layer norm without weights": lambda a, b: F.layer_norm(a, None, None, 5, 1e-5) * b,
    "conv2d": lambda a, b: F.conv2d(a.reshape(IMAGE), b[:2, :2].reshape(1, 1, 2, 2), b[0, :1], padding=1),
    "conv2d stride": lambda a, b: F.conv2d(a.reshape(1, 1, 4, 5), b[:3, :4].reshape(3, 1, 2, 2), None, (2, 1), (0, 2)),
    "conv2d groups": lambda a, b: F.conv2d(a.reshape(1, 2, 2, 5), b[:, :4].reshape(4, 1, 2, 2), None, 1, 2, (2, 3), 2),
    "conv2d 1x1": lambda a, b: F.conv2d(a.reshape(1, 2, 2, 5), b[:2, :4].reshape(4, 2, 1, 1), b[0, :4]),
    "conv2d of views": lambda a, b: F.conv2d(a.T.reshape(1, 1, 5, 4).transpose(2, 3), b[::2, :2].reshape(1, 1, 2, 2)),
    "max pool": lambda a, b: F.max_pool2d(a.reshape(1, 1, 4, 5), 2) + b[0, 0],
    "max pool overlapping": lambda a, b: F.max_pool2d(a.reshape(IMAGE), (2, 3), 1, (1, 1)) * F.max_pool2d(b[None], 1).sum(),
    "mean pool": lambda a, b: F.avg_pool2d(a.reshape(1, 1, 4, 5), 3, 2, 1) + F.avg_pool2d(b.reshape(1, 4, 5), 2).sum(),
    "lstm": layer(lambda: lite.LSTM(5, 3), lambda net, a: net(a.reshape(2, 2, 5))[0]),
    "lstm states": layer(lambda: lite.LSTM(5, 3, 2, bidirectional=True), lambda net, a: sum(net(a.reshape(4, 1, 5))[1])),
    "gru": layer(lambda: lite.GRU(5, 3), lambda net, a: net(a.reshape(2, 2, 5))[0]),
    "gru states": layer(lambda: lite.GRU(5, 3, batch_first=True, bidirectional=True), lambda net, a: net(a[None])[1]),
    "batch norm": layer(lambda: lite.BatchNorm1d(5), lambda net, a: net(a)),
    "encoder": layer(
        lambda: lite.TransformerEncoderLayer(4, 2, 8, dropout=0.0, activation="gelu"), lambda net, a: net(a.reshape(1, 5, 4))
    ),
    "embedding": layer(
        lambda: lite.Embedding(4, 5), lambda net, a: net(lite.tensor([[0, 2], [2, 2]], device=a.device)) * a[:2]
    ),
    "cross entropy": lambda a, b: F.cross_entropy(a * 3, lite.tensor([0, 4, 2, 2], device=a.device)) * b,
    "smoothed cross entropy": lambda a, b: F.cross_entropy(
        a.reshape(2, 5, 2), lite.tensor([[1, -100], [4, 0]], device=a.device), label_smoothing=0.1
    ) + F.cross_entropy(b, lite.tensor([3, -100, 0, 1], device=a.device), "none").sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_DEVICE)
def test_on_the_device(gpu: Any, name: str) -> None:
    both(gpu, ON_DEVICE[name], numbers(4, 5), numbers(4, 5, salt=1), stays=True)
    assert not fallen(), "something of it has no kernel"


THROUGH_NUMPY = {
    "mask as index": lambda a, b: a[a > 0].sum() * b,
    "two index lists": lambda a, b: a[[0, 1, 1], [2, 0, 0]] * b[0, :3],
    "counting": lambda a, b: (a > 0).sum() * b + 0 * a,
}


@pytest.mark.parametrize("name", THROUGH_NUMPY)
def test_through_numpy(gpu: Any, name: str) -> None:
    both(gpu, THROUGH_NUMPY[name], numbers(4, 5), numbers(4, 5, salt=1))
    assert fallen(), "it has a kernel now: move it up"


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 1, 3, 1, 2), (300, 300), (2, 3, 4, 5, 6, 2)])
def test_shapes(gpu: Any, shape: tuple[int, ...]) -> None:
    x = numbers(*shape) if shape else np.asarray(np.float32(1.5))
    both(gpu, lambda a: a * a + a, x)
    both(gpu, lambda a: a.sum(), x)
    if len(shape) > 1:
        both(gpu, lambda a: (a.transpose(0, -1) + 1).sum(0), x)


@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (1, 100, 70), (65, 33, 130), (200, 64, 3), (5, 0, 3)])
def test_products(gpu: Any, m: int, k: int, n: int) -> None:
    both(gpu, lambda a, b: a @ b, numbers(m, k) / 8, numbers(k, n, salt=1) / 8)


# Sizes beyond one tile, one workgroup and one part of a row.
LARGE: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "rows": (lambda a: a.softmax(1) * a.log_softmax(1) + a.cumsum(1) / 100, [(3, 300)]),
    "columns": (lambda a: a.softmax(0) + a.cumsum(0) / 100 + a.amax(0), [(300, 3)]),
    "layer norm": (lambda a, w, b: F.layer_norm(a, w, b, 260, 1e-5), [(4, 260), (260,), (260,)]),
    "one long sum": (lambda a: (a / 100).sum() + a.amax() + a.mean(), [(20_001,)]),
    "few long rows": (lambda a: (a / 100).sum(1) + a.amin(1) + a.max(1)[0], [(2, 9000)]),
    "many axes": (lambda a: a.sum((0, 2, 4)) + a.amax((1, 3)).sum(), [(2, 3, 2, 3, 2)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, 1, 1), [(3, 20, 13, 11), (70, 20, 3, 3), (70,)]),
    "conv2d groups": (lambda x, w: F.conv2d(x, w, None, 2, 1, 1, 4), [(2, 8, 17, 9), (24, 2, 3, 5)]),
    "long sums": (lambda x, w: F.conv2d(x, w, None, 1, 1), [(5, 2, 30, 31), (3, 2, 3, 3)]),
    "long product": (lambda a, b: a @ b / 30, [(3, 2100), (2100, 7)]),
    "depthwise": (lambda x, w: F.conv2d(x, w, None, 1, 2, 2, 6), [(2, 6, 9, 9), (6, 1, 3, 3)]),
    "max pool": (lambda x: F.max_pool2d(x, 3, 2, 1), [(3, 5, 20, 21)]),
    "mean pool": (lambda x: F.avg_pool2d(x, 3, 2, 1), [(3, 5, 20, 21)]),
    "large product": (lambda a, b: (a @ b)[5:7, 1000:], [(1028, 12), (12, 1030)]),
    "products": (lambda a, b: a @ b + (a.T @ a)[:1, :90] / 9, [(70, 100), (100, 90)]),
    "rows by number": (lambda x: x[np.arange(400) % 7], [(9, 33)]),
    "whole": (lambda x: F.cross_entropy(x, lite.tensor(np.arange(70) % 130, device=x.device)), [(70, 130)]),
}


@pytest.mark.parametrize("name", LARGE)
def test_larger_sizes(gpu: Any, name: str) -> None:
    op, shapes = LARGE[name]
    both(gpu, op, *(numbers(*shape, salt=i) / 2 for i, shape in enumerate(shapes)), stays=True)


@pytest.fixture
def as_hardware(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Kernels in the forms that real GPUs get (workgroups, tiles, fours), whatever the adapter is."""
    from anytorch.gpu.adapters import Adapter
    from anytorch.gpu.plans import plans

    monkeypatch.setattr(Adapter, "software", property(lambda self: False))
    plans.clear()
    yield gpu
    plans.clear()


TILES = ("conv2d", "conv2d groups", "products", "large product")  # long to compile for a CPU


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in TILES)) for name in LARGE])
def test_forms_for_hardware(as_hardware: Any, name: str) -> None:
    op, shapes = LARGE[name]
    both(as_hardware, op, *(numbers(*shape, salt=i) / 2 for i, shape in enumerate(shapes)), stays=True)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_a_long_sequence(gpu: Any, name: str) -> None:
    run = layer(lambda: {"lstm": lite.LSTM, "gru": lite.GRU}[name](12, 40), lambda net, x: net(x)[0] / 8)
    both(gpu, lambda x: run(x, x.reshape(-1, 12)), numbers(9, 5, 12), stays=True)


def test_zero_sizes(gpu: Any) -> None:
    both(gpu, lambda x, w: F.conv2d(x, w, None, 1, 1), numbers(0, 2, 5, 5), numbers(3, 2, 3, 3))
    both(gpu, lambda x: F.max_pool2d(x, 2), numbers(0, 2, 4, 4))
    both(gpu, lambda x: x[np.zeros(0, int)], numbers(3, 4))
    both(gpu, lambda x: x.softmax(-1), numbers(0, 3))
    both(gpu, lambda x: x.sum(0), numbers(0, 3))
    for make in (lambda: lite.LSTM(3, 4), lambda: lite.GRU(3, 4)):
        for shape in ((0, 2, 3), (2, 0, 3)):
            assert make()(lite.zeros(*shape))[0].shape == (*shape[:2], 4)
            assert make().to(gpu)(lite.zeros(*shape, device=gpu))[0].shape == (*shape[:2], 4)


def test_numbers_that_are_none(gpu: Any) -> None:
    x = np.array([[np.nan, 1, 2], [np.inf, -np.inf, 0], [-np.inf] * 3], "float32")
    ops = [lambda a: a.amax(1), lambda a: a.clamp(-1, 1), lambda a: a.softmax(1), F.relu, lambda a: (a == a).float(),
           lambda a: a.argmax(1).float(), lambda a: (a >= 0).float(), lambda a: F.maximum(a, 1.0)]  # fmt: skip
    with np.errstate(invalid="ignore"):
        for op in ops:
            host, there = (op(lite.tensor(x, device=device)).numpy() for device in (None, gpu))
            np.testing.assert_array_equal(there, host)


def test_masks(gpu: Any) -> None:
    a = lite.tensor(numbers(3, 4), device=gpu)
    mask = a > 0
    assert mask.device.is_gpu
    assert mask.dtype == bool
    np.testing.assert_array_equal(mask.numpy(), numbers(3, 4) > 0)
    np.testing.assert_array_equal((~mask & (a < -1)).numpy(), numbers(3, 4) < -1)
    assert mask.sum().item() == (numbers(3, 4) > 0).sum()
    assert (mask * 2.0).dtype == np.float32
    assert mask.any().item() is True
    assert not mask.all().item()
    assert mask[0, 0].item() is bool(numbers(3, 4)[0, 0] > 0)


def test_in_place_and_views(gpu: Any) -> None:
    x = lite.zeros(3, 4, device=gpu)
    view = x[1]
    view += 2
    x[:, 0] = 5
    x[2] = lite.tensor(numbers(4), device=gpu)
    x[0, 1:] = x[1, :3]
    expected = np.zeros((3, 4), "float32")
    expected[1] += 2
    expected[:, 0] = 5
    expected[2] = numbers(4)
    expected[0, 1:] = expected[1, :3]
    np.testing.assert_array_equal(x.numpy(), expected)
    w = lite.tensor(numbers(4), device=gpu, requires_grad=True)
    h = w * 2
    y = h * h
    h += 1
    with pytest.raises(UsageError, match="changed in place"):
        y.sum().backward()


def test_training_agrees_with_the_host(gpu: Any) -> None:
    x, labels = numbers(32, 1, 4, 4), np.arange(32) % 3
    losses = []
    for device in (None, gpu):
        lite.seed(0)
        model = lite.Sequential(
            *(lite.CustomConv2d(1, 8, 3, padding=1), lite.BatchNorm2d(8), lite.ReLU(), lite.MaxPool2d(2)),
            *(lite.Flatten(), lite.LayerNorm(32), lite.GELU(), lite.CustomLinear(32, 3)),
        )
        if device:
            model.to(device)
        optimizer = lite.AdamW(model.parameters(), lr=0.02)
        data, target = lite.tensor(x, device=device), lite.tensor(labels, device=device)
        for _ in range(15):
            loss = F.cross_entropy(model(data), target)
            optimizer.zero_grad()
            loss.backward()
            lite.clip_grad_norm(model.parameters(), 1.0)
            optimizer.step()
        losses.append(loss.item())
    assert not fallen()
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[0] < 0.8
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def test_a_step_of_adam_keeps_a_copy_of_the_gradient_until_its_launch(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient that is no dense array is copied. Nobody else may get that copy's memory before the launch is recorded."""
    from anytorch.gpu import launch

    start, factors = numbers(8, 5), numbers(5, 8, salt=1)
    plan, taken = launch.Plan.__call__, []

    def beside_another(self: Any, addresses: Any, *given: float) -> None:
        if len(given) == 5:  # the five numbers of a step of Adam
            monkeypatch.setattr(launch.Plan, "__call__", plan)
            taken.append(lite.tensor(np.full((5, 8), 1e3, "float32"), device=gpu))
        plan(self, addresses, *given)

    weights = []
    for device in (None, gpu):
        w = lite.tensor(start, device=device, requires_grad=True)
        w.grad = lite.tensor(factors, device=device).T
        if device is gpu:
            assert not w.grad.data.layout.dense
            monkeypatch.setattr(launch.Plan, "__call__", beside_another)
        lite.Adam([w], lr=0.1).step()
        weights.append(w.detach().numpy())
    assert len(taken) == 1
    np.testing.assert_allclose(weights[1], weights[0], rtol=1e-5, atol=1e-6)


def test_quantized_layers(gpu: Any) -> None:
    """They compute on the host, and give and take tensors of the GPU."""
    x = lite.tensor(numbers(6, 2, 5, 5))
    for way in ("dynamic", "static", "training"):
        results = []
        for device in (None, gpu):
            lite.seed(0)
            model = lite.Sequential(lite.CustomConv2d(2, 3, 3), lite.ReLU(), lite.Flatten(), lite.CustomLinear(27, 4))
            given = x if device is None else x.to(device)
            if way != "dynamic":
                model = lite.prepare(model, training=way == "training")
            if device is not None:
                model.to(device)
            out = model(given)
            if way == "training":
                out.sum().backward()
                results.append(model[0].layer.weight.grad.numpy())
            quantized = lite.quantize_dynamic(model) if way == "dynamic" else lite.convert(model)
            if device is not None:
                quantized.to(device)
            results.append(quantized(given).detach().numpy())
        half = len(results) // 2
        for host, there in zip(results[:half], results[half:], strict=True):
            np.testing.assert_allclose(there, host, rtol=1e-4, atol=1e-4)


def test_devices_do_not_mix_by_themselves(gpu: Any) -> None:
    there, here = lite.ones(2, device=gpu), lite.ones(2)
    for op in (lambda: there + here, lambda: here * there, lambda: there @ here):
        with pytest.raises(UsageError, match="move one"):
            op()
    moved = here.requires_grad_().to(gpu)
    (moved * there).sum().backward()
    assert not here.grad.device.is_gpu
    assert here.grad.tolist() == [1, 1]
    assert (there.cpu() + 1).tolist() == [2, 2]
    assert (there + 1.5).tolist() == [2.5, 2.5]
    whole = lite.tensor([1, 2], device=gpu)
    assert whole.device.is_gpu
    assert (there * whole).tolist() == [1, 2]
    assert (whole + whole).dtype == np.int64


def test_prepared_launches_do_not_pile_up(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from anytorch.gpu.plans import plans

    monkeypatch.setattr(plans, "most", 6)
    plans.clear()
    for n in range(1, 20):
        x = lite.ones(n, device=gpu)
        assert (x + x).sum().item() == 2 * n
    assert 0 < len(plans) <= 6


def test_functions_have_their_namesakes(gpu: Any) -> None:
    from anytorch.lite.gpu import functions

    sources = (path.read_text() for path in Path(lite.__file__).parent.rglob("*.py"))
    marked = {name for text in sources for name in re.findall(r"^@on_gpu\ndef (\w+)", text, re.MULTILINE)}
    assert marked and all(getattr(functions, name).__module__ == functions.__name__ for name in marked)


def test_memory_comes_back(gpu: Any) -> None:
    from anytorch.gpu.runtime import open_runtime

    before = open_runtime().pool.statistics.allocated
    tensors = [lite.zeros(1000, 10, device=gpu) for _ in range(3)]
    assert open_runtime().pool.statistics.allocated >= before + 120_000
    del tensors
    assert open_runtime().pool.statistics.allocated == before


def test_a_small_op_stays_cheap(gpu: Any) -> None:
    """Functions called per op, the second time that shapes are seen: what a launch costs on the host is mostly these."""
    a, b = lite.ones(8, 8, device=gpu), lite.ones(8, 8, device=gpu)
    found = {}
    for name, op in {"add": lambda: a + b, "matmul": lambda: a @ b, "softmax": lambda: a.softmax(0)}.items():
        for _ in range(3):
            op()
        calls: list[str] = []
        sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)  # noqa: B023
        try:
            op()
        finally:
            sys.setprofile(None)
        found[name] = len(calls) - 1
    assert found["add"] <= 20, found
    assert found["matmul"] <= 40, found
    assert found["softmax"] <= 45, found
