"""INT8: the arithmetic is exact, the answers are near those of float32, and training with rounding helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anytorch import lite
from anytorch.errors import UsageError
from anytorch.lite import functional as F
from anytorch.lite.quantize import Observed, QuantizedLayer, exact_product, quantize_activation, range_scale


def numbers(*shape: int) -> Any:
    return np.random.default_rng(5).standard_normal(shape).astype("float32")


def test_products_are_those_of_whole_numbers() -> None:
    random = np.random.default_rng(0)
    weight = random.integers(-127, 128, (3, 5000))
    columns = random.integers(-255, 256, (2, 5000, 4))
    columns[0], weight[0] = 255, 127  # the largest sums there can be
    ours = exact_product(weight.astype("float32"), columns.astype("float32"))
    np.testing.assert_array_equal(ours, weight @ columns)


@pytest.mark.parametrize(("low", "high"), [(0, 4), (-3, 1), (2, 5), (-5, -2), (0, 0)])
def test_zero_is_exact_and_the_range_is_covered(low: float, high: float) -> None:
    scale, zero = range_scale(low, high)
    x = np.linspace(min(low, 0), max(high, 0), 50).astype("float32")
    back = (quantize_activation(x, scale, zero).astype("float32") - zero) * scale
    assert np.abs(back - x).max() <= scale * 0.501
    assert (quantize_activation(np.zeros(1), scale, zero) - zero).item() == 0


def model() -> Any:
    return lite.Sequential(
        lite.CustomConv2d(2, 4, 3, stride=2, padding=1, groups=2), lite.ReLU(), lite.Flatten(), lite.CustomLinear(64, 5)
    )


def relative_error(a: Any, b: Any) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


def test_dynamic_and_static(tmp_path: Path) -> None:
    x = lite.tensor(numbers(6, 2, 8, 8))
    lite.seed(1)
    exact = model()
    expected = exact(x).detach().numpy()
    lite.seed(1)
    dynamic = lite.quantize_dynamic(model())
    assert isinstance(dynamic[0], QuantizedLayer)
    assert dynamic[3].weight.dtype == np.int8
    assert relative_error(dynamic(x).numpy(), expected) < 0.03
    lite.seed(1)
    watched = lite.prepare(model())
    np.testing.assert_array_equal(watched(x).detach().numpy(), expected)
    static = lite.convert(watched)
    answer = static(x).numpy()
    assert relative_error(answer, expected) < 0.03
    lite.save(static, tmp_path / "int8.safetensors")
    assert (tmp_path / "int8.safetensors").stat().st_size < 2500  # 1,500 bytes of weights and biases as float32: 1,744
    lite.seed(2)
    again = lite.prepare(model())
    again(x)
    again = lite.convert(again)
    again.load_state_dict(lite.load(tmp_path / "int8.safetensors"))
    np.testing.assert_array_equal(again(x).numpy(), answer)


def test_what_has_seen_nothing_cannot_be_converted() -> None:
    with pytest.raises(UsageError, match="seen no data"):
        lite.convert(lite.prepare(lite.CustomLinear(2, 2)))
    with pytest.raises(UsageError, match="takes float32"):
        lite.quantize_dynamic(lite.CustomLinear(2, 2))(lite.zeros(1, 2, dtype="float64"))


def test_training_with_rounding_gives_what_int8_will_give() -> None:
    lite.seed(3)
    x = lite.tensor(numbers(64, 8))
    target = lite.tensor(np.tanh(numbers(64, 8) @ numbers(8, 3)))
    net = lite.prepare(lite.Sequential(lite.CustomLinear(8, 16), lite.Tanh(), lite.CustomLinear(16, 3)), training=True)
    assert isinstance(net[0], Observed)
    optimizer = lite.Adam(net.parameters(), lr=0.02)
    losses = []
    for _ in range(120):
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    net.eval()
    before = net(x).detach().numpy()
    after = lite.convert(net)(x).numpy()
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-5)


def test_gradients_go_straight_through_but_not_past_the_ends() -> None:
    layer = Observed(lite.CustomLinear(1, 1, bias=False), rounding=True)
    layer(lite.CustomTensor([[-1], [1]]))
    layer.eval()
    x = lite.CustomTensor([[0.3], [5.0]], requires_grad=True)
    layer(x).sum().backward()
    weight = layer.layer.weight.item()
    np.testing.assert_allclose(x.grad.numpy(), [[weight], [0]], rtol=1e-5)
