"""The device as PyTorch's users meet it: making, moving and printing tensors, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.webgpu.agree import close


def test_there_and_back(torch: Any) -> None:
    for dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    ):
        for shape in ((), (0,), (1,), (3, 0, 2), (5,), (3, 7), (2, 3, 5)):
            x = (torch.randn(shape) * 3).to(dtype)
            assert torch.equal(x.to("webgpu").cpu(), x), (dtype, shape)
    x = torch.randn(2, 3)
    assert torch.equal(x.webgpu().cpu(), x) and x.to("webgpu:0").device == torch.device("webgpu", 0)
    assert x.to("webgpu", torch.float16).dtype is torch.float16
    assert x.to("webgpu").is_webgpu and not x.is_webgpu
    same = x.to("webgpu")
    assert same.to("webgpu") is same


def test_complex_and_double_travel(torch: Any) -> None:
    for dtype in (torch.complex64, torch.float64):
        x = torch.randn(3, 4, dtype=dtype)
        assert torch.equal(x.to("webgpu").cpu(), x)
        assert torch.equal(x.to("webgpu").t().cpu(), x.t())


def test_a_strided_tensor_keeps_its_layout(torch: Any) -> None:
    x = torch.randn(4, 6)
    for view in (x.t(), x[:, ::2], x[1:3, 1:], x.expand(2, 4, 6), x[::2].t()):
        assert torch.equal(view.to("webgpu").cpu(), view)
    y = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert y.to("webgpu").is_contiguous(memory_format=torch.channels_last)
    assert (y.to("webgpu") + 1).is_contiguous(memory_format=torch.channels_last)
    assert torch.empty_like(y.to("webgpu")).stride() == y.stride()


@pytest.mark.parametrize(
    "make",
    [
        lambda t, d: t.zeros(2, 3, device=d),
        lambda t, d: t.ones(2, 3, device=d, dtype=t.int64),
        lambda t, d: t.full((2, 3), 2.5, device=d),
        lambda t, d: t.arange(7, device=d),
        lambda t, d: t.arange(0.5, 4, 0.5, device=d),
        lambda t, d: t.linspace(0, 1, 5, device=d),
        lambda t, d: t.eye(3, device=d),
        lambda t, d: t.tensor([[1.0, 2.0], [3.0, 4.0]], device=d),
        lambda t, d: t.zeros(2, device=d).new_full((3,), 4),
        lambda t, d: t.zeros(2, device=d).new_tensor([1, 2]),
        lambda t, d: t.ones_like(t.zeros(2, 2, device=d)),
        lambda t, d: t.scalar_tensor(3.0, device=d),
        lambda t, d: t.as_tensor([1, 2, 3], device=d),
    ],
)
def test_factories(torch: Any, make: Callable[[Any, str], Any]) -> None:
    expected, ours = make(torch, "cpu"), make(torch, "webgpu")
    close(ours, expected)


def test_random_factories_follow_the_seed(torch: Any) -> None:
    for make in (torch.rand, torch.randn):
        torch.manual_seed(3)
        first = make(50, device="webgpu")
        torch.manual_seed(3)
        assert torch.equal(first.cpu(), make(50, device="webgpu").cpu())
        assert not torch.equal(first.cpu(), make(50, device="webgpu").cpu())


def test_default_device(torch: Any) -> None:
    with torch.device("webgpu"):
        assert torch.zeros(2).device.type == "webgpu"
        assert torch.nn.Linear(2, 3).weight.device.type == "webgpu"
    assert torch.zeros(2).device.type == "cpu"
    torch.set_default_device("webgpu")
    try:
        assert torch.ones(2).device.type == "webgpu" and torch.tensor([1]).device.type == "webgpu"
    finally:
        torch.set_default_device(None)
    assert torch.zeros(2).device.type == "cpu"


def test_zero_size_and_zero_dim(torch: Any) -> None:
    empty = torch.empty(0, 3, device="webgpu")
    assert (empty + 1).shape == (0, 3) and empty.sum().item() == 0.0
    assert torch.cat([empty, torch.ones(2, 3, device="webgpu")]).shape == (2, 3)
    scalar = torch.tensor(2.5, device="webgpu")
    assert (scalar * 2).item() == 5.0 and float(scalar) == 2.5 and scalar.dim() == 0


def test_a_cpu_scalar_takes_part_and_a_cpu_tensor_does_not(torch: Any) -> None:
    x = torch.ones(3, device="webgpu")
    close(x * torch.tensor(2.0), torch.full((3,), 2.0))
    close(x + torch.tensor(2, dtype=torch.int64), torch.full((3,), 3.0))
    for wrong in (lambda: x + torch.ones(3), lambda: torch.ones(3) + x, lambda: x.add_(torch.ones(3))):
        with pytest.raises(RuntimeError, match="all tensors to be on"):
            wrong()


def test_more_groups_than_one_dimension_takes(torch: Any) -> None:
    n = 65_535 * 256 + 300  # one byte each; the last ones lie beyond the first 65,535 groups
    x = torch.zeros(n, dtype=torch.bool, device="webgpu")
    y = torch.logical_not(x)
    assert bool(y[-1].cpu()) and bool(y[0].cpu()) and bool(y[n - 299].cpu())
    z = torch.zeros(65_535 * 256 + 3, dtype=torch.int32, device="webgpu")
    z += 1
    assert z[-3:].cpu().tolist() == [1, 1, 1]


def test_repr(torch: Any) -> None:
    text = repr(torch.tensor([1.0, 2.5], device="webgpu"))
    assert text == "tensor([1.0000, 2.5000], device='webgpu:0')"
    assert "grad_fn" in repr(torch.ones(2, device="webgpu", requires_grad=True) * 2)


def test_a_second_device_does_not_exist(torch: Any) -> None:
    assert torch.webgpu.device_count() == 1 and torch.webgpu.current_device() == 0
    with pytest.raises(RuntimeError, match="one webgpu device"):
        torch.webgpu.set_device(1)


def test_what_torch_refuses_is_refused_here_too(torch: Any) -> None:
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        torch.zeros(1, 4, device="webgpu").expand(3, 4).add_(1)
    with pytest.raises(RuntimeError, match="webgpu:7 does not exist"):
        torch.zeros(1, device="webgpu:7")
    with pytest.raises(RuntimeError, match="on another device"):
        torch.add(torch.ones(3, device="webgpu"), 1, out=torch.empty(3))


def test_a_tensor_of_the_cpu_is_refused_in_the_words_that_programs_look_for(torch: Any) -> None:
    vector, matrix = torch.ones(3), torch.eye(3)
    functions: tuple[Callable[[Any], Any], ...] = (
        lambda f: f(vector) + vector,
        lambda f: torch.where(f(vector) > 0, f(vector), vector),
        lambda f: torch.addcmul(f(vector), f(vector), vector),
        lambda f: f(matrix) @ matrix,
        lambda f: torch.nn.functional.linear(f(matrix), matrix, f(vector)),
        lambda f: torch.dot(f(vector), vector),
        lambda f: torch.vdot(f(vector), vector),
        lambda f: torch.linalg.solve(f(matrix), matrix),
        lambda f: torch.linalg.lstsq(f(matrix), matrix),
        lambda f: torch.cat([f(vector), vector]),
        lambda f: torch.nn.functional.layer_norm(f(matrix), (3,), vector),
        lambda f: torch.nn.functional.conv1d(f(matrix)[None], matrix[None]),
        lambda f: torch.nn.functional.embedding(torch.tensor([1]), f(matrix)),
        lambda f: torch.nn.functional.nll_loss(f(matrix), torch.tensor([1, 2, 0])),
        lambda f: torch.nn.functional.mse_loss(f(matrix), matrix),
        lambda f: f(matrix).index_select(0, torch.tensor([1])),
        lambda f: f(matrix).gather(0, torch.tensor([[1]])),
        lambda f: torch.logaddexp2(f(vector), vector),
        lambda f: torch.searchsorted(f(vector), vector),
    )
    for i, function in enumerate(functions):
        function(lambda x: x)
        with pytest.raises(RuntimeError, match=r"^Expected all tensors to be on the same device.*\.to\('webgpu'\)"):
            print(i, function(lambda x: x.to("webgpu")))


def test_torch_accelerator(torch: Any) -> None:
    """torch answers these in C++, for devices that are written in C++."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    assert kind is not None and kind.type == "webgpu"
    x = torch.ones(1000, device=kind)
    torch.accelerator.synchronize()
    torch.accelerator.synchronize("webgpu:0")
    assert torch.accelerator.memory_allocated() == torch.webgpu.memory_allocated() >= x.nbytes
    torch.accelerator.reset_peak_memory_stats()
    y = torch.ones(5000, device=kind)
    assert torch.accelerator.max_memory_allocated() == torch.webgpu.max_memory_allocated() >= x.nbytes + y.nbytes
    assert torch.accelerator.memory_reserved() >= torch.accelerator.memory_allocated()
    torch.accelerator.empty_cache()
    free, total = torch.accelerator.get_memory_info()
    assert 0 <= free <= total
    with pytest.raises(ValueError, match="is not a device of the accelerator"):
        torch.accelerator.synchronize("cpu")
    with pytest.raises(RuntimeError, match="there is one webgpu device"):
        torch.accelerator.memory_stats(1)
    assert torch.distributed.get_default_backend_for_device("webgpu") == "staged"
