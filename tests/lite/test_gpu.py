"""The same on a GPU (llvmpipe where there is none): equal answers and gradients, and what has a kernel stays there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from anytorch import lite
from anytorch.errors import DeviceUnavailable, UsageError
from anytorch.lite import functional as F

Missing = Callable[[str, str], Any]


@pytest.fixture(scope="module")
def adapter(missing: Missing) -> None:
    pytest.importorskip("wgpu")
    from anytorch.gpu.adapters import list_adapters

    try:
        found = list_adapters()
    except DeviceUnavailable as exc:
        missing("webgpu-adapter", str(exc))
    if not found:
        missing("webgpu-adapter", "wgpu finds none")


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


def both(gpu: Any, op: Callable[..., Any], *arrays: Any, grad: bool = True) -> None:
    """`op` on the host and on the GPU: results and gradients."""
    sides: list[list[Any]] = []
    for device in (None, gpu):
        tensors = [lite.tensor(x, device=device, requires_grad=grad) for x in arrays]
        result = op(*tensors)
        assert result.device.is_gpu == (device is gpu)
        side = [result.detach().numpy()]
        if grad:
            weight = np.cos(np.arange(result.numel(), dtype="float32")).reshape(result.shape)
            result.backward(lite.tensor(weight, device=device))
            side += [t.grad.numpy() for t in tensors]
        sides.append(side)
    for host, there in zip(*sides, strict=True):
        assert host.dtype == there.dtype
        np.testing.assert_allclose(there, host, rtol=3e-5, atol=3e-5)


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


@pytest.mark.parametrize("name", ON_DEVICE)
def test_on_the_device(gpu: Any, name: str) -> None:
    both(gpu, ON_DEVICE[name], numbers(4, 5), numbers(4, 5, salt=1))
    assert not fallen(), "something of it has no kernel"


def lite_lstm(a: Any, b: Any) -> Any:
    lite.seed(0)
    layer = lite.LSTM(5, 3)
    if a.device.is_gpu:
        layer.to(a.device)
    return layer(a.reshape(2, 2, 5))[0] + b[0, 0]


THROUGH_NUMPY = {
    "max": lambda a, b: a.amax(1) + b.max(0)[0].sum(),
    "gelu": lambda a, b: F.gelu(a) * b,
    "clamp": lambda a, b: a.clamp(-0.5, 0.5) * b,
    "cumsum": lambda a, b: a.cumsum(0) * b,
    "where": lambda a, b: F.where(a > b, a, b),
    "index": lambda a, b: a[[0, 2, 2]] * b[:3],
    "backwards": lambda a, b: a[::-1] * b,
    "conv2d": lambda a, b: F.conv2d(a.reshape(1, 1, 4, 5), b[:2, :2].reshape(1, 1, 2, 2), padding=1),
    "maximum": lambda a, b: F.maximum(a, b) + F.minimum(a, b * 2),
    "lstm": lambda a, b: lite_lstm(a, b),
    "pool": lambda a, b: F.max_pool2d(a.reshape(1, 1, 4, 5), 2) + b[0, 0],
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
    x, labels = numbers(32, 8), np.arange(32) % 3
    losses = []
    for device in (None, gpu):
        lite.seed(0)
        model = lite.Sequential(lite.CustomLinear(8, 16), lite.LayerNorm(16), lite.ReLU(), lite.CustomLinear(16, 3))
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
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[0] < 0.8
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    model.load_state_dict(state)


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


def test_memory_comes_back(gpu: Any) -> None:
    from anytorch.gpu.runtime import open_runtime

    before = open_runtime().pool.statistics.allocated
    tensors = [lite.zeros(1000, 10, device=gpu) for _ in range(3)]
    assert open_runtime().pool.statistics.allocated >= before + 120_000
    del tensors
    assert open_runtime().pool.statistics.allocated == before
