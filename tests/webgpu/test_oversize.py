"""Tensors beyond the adapter's binding limit: the limit is lowered to 256 KiB, so that small tensors are beyond it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

LIMIT = 1 << 18


@pytest.fixture(autouse=True)
def low_limit(webgpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from anytorch.gpu.runtime import open_runtime

    runtime = open_runtime()
    monkeypatch.setattr(runtime, "binding_limit", LIMIT)
    monkeypatch.setattr(runtime.programs, "_binding_limit", LIMIT)


def agrees(torch: Any, work: Callable[..., Any], *values: Any) -> None:
    there = [value.to("webgpu") if isinstance(value, torch.Tensor) else value for value in values]
    torch.testing.assert_close(work(*there).cpu(), work(*values), rtol=1e-4, atol=1e-3)


@pytest.mark.native
@pytest.mark.parametrize(
    ("a", "b"),
    [((4, 64), (64, 2000)), ((2000, 64), (64, 200)), ((600, 300), (300, 500)), ((40, 64, 64), (40, 64, 64))],
    ids=["wide", "tall", "all", "batch"],
)
def test_products(webgpu: Any, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    torch = webgpu
    agrees(torch, torch.matmul, torch.randn(a), torch.randn(b))


@pytest.mark.long
@pytest.mark.native
def test_a_layer_and_its_gradients(webgpu: Any) -> None:
    torch = webgpu
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 2000), torch.randn(300, 64)
    with torch.no_grad():
        agrees(torch, torch.nn.functional.linear, x, layer.weight.detach(), layer.bias.detach())
    layer(x).square().sum().backward()
    expected = layer.weight.grad.clone()
    layer.zero_grad()
    layer.to("webgpu")(x.to("webgpu")).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad.cpu(), expected, rtol=1e-4, atol=1e-2)


@pytest.mark.native
@pytest.mark.parametrize(
    "name",
    [
        *("softmax", "layer_norm", "rms_norm", "sum", "sum_all", "mean", "amax_all", "all", "any", "cumsum"),
        *("sum_first_kept", "sort", "sort_first", "topk"),
    ],
)
def test_rows(webgpu: Any, name: str) -> None:
    torch = webgpu
    work = {
        "softmax": lambda x: torch.softmax(x, -1),
        "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (200,)),
        "rms_norm": lambda x: torch.nn.functional.rms_norm(x, (200,)),
        "sum": lambda x: x.sum(-1),
        "sum_all": lambda x: x.sum(),
        "mean": lambda x: x.mean(0),
        "amax_all": lambda x: x.amax(),
        "all": lambda x: (x > -3).all(1, keepdim=True),
        "any": lambda x: (x > 3).any(0),
        "cumsum": lambda x: x.cumsum(-1),
        "sort": lambda x: torch.cat([part.float() for part in x.sort(stable=True)], 1),
        "sort_first": lambda x: x.sort(dim=0, descending=True).values,
        "topk": lambda x: x.topk(3, dim=1).values,
        "sum_first_kept": lambda x: x.view(10, 100, 200).sum((0, 2), keepdim=True),
    }[name]
    agrees(torch, work, torch.randn(1000, 200))


@pytest.mark.native
@pytest.mark.parametrize("heads", [1, 8])
def test_attention(webgpu: Any, heads: int) -> None:
    torch = webgpu
    q, k, v = (torch.randn(16 if heads == 1 else 1, heads, 160, 64) for _ in range(3))
    attention = torch.nn.functional.scaled_dot_product_attention
    agrees(torch, attention, q, k, v)
    agrees(torch, attention, q, k, v, torch.randn(q.shape[0], 1, 160, 160))


@pytest.mark.native
def test_images(webgpu: Any) -> None:
    torch = webgpu
    x, weight = torch.randn(8, 16, 40, 40), torch.randn(32, 16, 3, 3) / 12
    agrees(torch, torch.nn.functional.conv2d, x, weight)
    agrees(torch, torch.nn.functional.max_pool2d, x, 2)
    agrees(torch, torch.nn.functional.avg_pool2d, x, 2)
    last = x.to("webgpu").contiguous(memory_format=torch.channels_last)
    for pool in (torch.nn.functional.max_pool2d, torch.nn.functional.avg_pool2d):
        assert pool(last, 2).is_contiguous(memory_format=torch.channels_last)


def gradients(torch: Any, work: Callable[..., Any], *values: Any) -> list[Any]:
    leaves = [value.detach().clone().requires_grad_() for value in values]
    work(*leaves).square().sum().backward()
    return [leaf.grad.cpu() for leaf in leaves]


@pytest.mark.native
@pytest.mark.parametrize(
    "name", ["conv", "conv_transposed", "max_pool", "avg_pool", "attention", "heads", "mask", "gqa"]
)
def test_gradients(webgpu: Any, name: str) -> None:
    torch = webgpu
    functional = torch.nn.functional
    attention = functional.scaled_dot_product_attention
    x = torch.randn(8, 16, 40, 40)

    def heads(batch: int, count: int, length: int = 160) -> Any:
        return torch.randn(batch, count, length, 64)

    work, values = {
        "conv": (
            lambda x, w, b: functional.conv2d(x, w, b, stride=2, padding=1),
            (x, torch.randn(32, 16, 3, 3) / 12, torch.randn(32)),
        ),
        "conv_transposed": (functional.conv_transpose2d, (x, torch.randn(16, 8, 3, 3) / 12)),
        "max_pool": (lambda x: functional.max_pool2d(x, 2), (x,)),
        "avg_pool": (lambda x: functional.avg_pool2d(x, 2), (x,)),
        "attention": (attention, (heads(16, 1), heads(16, 1), heads(16, 1))),
        "heads": (lambda q, k, v: attention(q, k, v, is_causal=True), (heads(1, 8), heads(1, 8), heads(1, 8))),
        "mask": (attention, (heads(16, 1), heads(16, 1), heads(16, 1), torch.randn(160, 160))),
        "layer_norm": (
            lambda x, w, b: functional.layer_norm(x, (200,), w, b),
            (torch.randn(1000, 200), torch.randn(200), torch.randn(200)),
        ),
        "rms_norm": (
            lambda x, w: functional.rms_norm(x, (200,), w),
            (torch.randn(1000, 200), torch.randn(200)),
        ),
        "gqa": (
            lambda q, k, v: attention(q, k, v, enable_gqa=True),
            (heads(4, 4, 100), heads(4, 2, 100), heads(4, 2, 100)),
        ),
    }[name]
    there = gradients(torch, work, *[value.to("webgpu") for value in values])
    for found, expected in zip(there, gradients(torch, work, *values), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-3)


@pytest.mark.native
def test_rows_of_a_large_table(webgpu: Any) -> None:
    torch = webgpu
    table, index = torch.randn(3000, 64), torch.randint(0, 3000, (5, 7))
    agrees(torch, torch.nn.functional.embedding, index, table)
    agrees(torch, lambda t, i: t.index_select(1, i), table.t().contiguous(), index.view(-1))


def test_an_op_without_a_rule_is_computed_on_the_cpu(webgpu: Any) -> None:
    torch = webgpu
    agrees(torch, lambda x: x.kthvalue(7).values, torch.randn(1000, 200))
    agrees(torch, lambda x: x.softmax(1), torch.randn(1, 1 << 17))  # one row is too large, and cannot be halved


@pytest.mark.native
def test_a_small_view_of_a_large_buffer(webgpu: Any) -> None:
    torch = webgpu
    whole = torch.randn(4000, 64)
    agrees(torch, lambda x, y: x[3990:] @ y, whole, torch.randn(64, 8))
    agrees(torch, lambda x: x[3990:].softmax(-1), whole)


def test_an_op_in_place_changes_the_tensor_itself(webgpu: Any) -> None:
    """A small view of a buffer that is too large: a copy that could be bound must not be changed in its stead."""
    torch = webgpu
    index, values = torch.tensor([3, 1]), torch.randn(2, 64)
    changes: list[Callable[..., Any]] = [
        lambda x, i, v: x.index_put_((i,), v, accumulate=True),
        lambda x, i, v: x.index_fill_(0, i, 2.5),
        lambda x, i, v: x.index_add_(0, i, v),
        lambda x, i, v: x.put_(i, v[0, :2]),
    ]
    for change in changes:
        whole = torch.randn(4000, 64)
        there = whole.to("webgpu")
        change(whole[3990:], index, values)
        change(there[3990:], index.to("webgpu"), values.to("webgpu"))
        torch.testing.assert_close(there.cpu(), whole)


@pytest.mark.native
def test_a_matrix_times_a_vector(webgpu: Any) -> None:
    torch = webgpu
    agrees(torch, lambda d, a, x: torch.addmv(d, a, x), torch.randn(2000), torch.randn(2000, 64), torch.randn(64))


def test_one_row_beyond_the_limit_says_so(webgpu: Any) -> None:
    from anytorch.gpu.native import BindingTooLarge

    torch = webgpu
    x = torch.randn(1, 1 << 17).to("webgpu")
    with pytest.raises(BindingTooLarge, match="limit is 262,144 bytes"):
        x @ x.t()


@pytest.mark.native
@pytest.mark.parametrize("wrong", [5000, -1, 2**40])
@pytest.mark.parametrize("name", ["embedding", "index_select"])
def test_an_index_that_no_piece_has_is_reported(webgpu: Any, name: str, wrong: int) -> None:
    torch = webgpu
    table, index = torch.randn(5000, 64, device="webgpu"), torch.tensor([0, 4999, wrong], device="webgpu")
    rows = torch.nn.functional.embedding(index, table) if name == "embedding" else table.index_select(0, index)
    with pytest.raises(IndexError, match=rf"{name}.*index {wrong} is out of bounds for dimension 0 with size 5000"):
        torch.webgpu.synchronize()
    assert torch.equal(rows[1].cpu(), table[4999].cpu()) and not rows[2].cpu().any()
