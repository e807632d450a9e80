"""Joining, turning, padding and the gradients of views, against the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def torch(webgpu: Any) -> Any:
    webgpu.manual_seed(0)
    return webgpu


def both(torch: Any, function: Callable[..., Any], *tensors: Any) -> None:
    """Values, and gradients of everything that has one."""

    def run(device: str) -> list[Any]:
        held = [t.detach().clone().to(device).requires_grad_(t.is_floating_point()) for t in tensors]
        result = function(*held)
        found = [result.detach().cpu()]
        if result.requires_grad:
            weights = torch.arange(result.numel(), dtype=torch.float32).reshape(result.shape).to(device)
            (result.float() * weights).sum().backward()
            found += [t.grad.cpu() for t in held if t.grad is not None]
        return found

    for ours, expected in zip(run("webgpu"), run("cpu"), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "int32", "int8", "bool"])
def test_cat_and_stack(torch: Any, dtype: str) -> None:
    kind = getattr(torch, dtype)

    def make(*shape: int) -> Any:
        return (torch.randn(shape) * 3).to(kind)

    a, b, c = make(3, 5), make(2, 5), make(3, 1)
    both(torch, lambda x, y: torch.cat([x, y]), a, b)
    both(torch, lambda x, y: torch.cat([x, y], -1), a, c)
    both(torch, lambda x, y: torch.stack([x, y], 1), a, make(3, 5))
    both(torch, lambda x, y: torch.cat([x.t(), y.t()], 1), a, b)
    both(torch, lambda x: torch.cat([x, torch.empty(0, device=x.device, dtype=kind), x[1:, :]]), a)
    both(torch, lambda x: torch.cat([x] * 7, 1), c)


def test_cat_promotes_and_keeps_channels_last(torch: Any) -> None:
    both(torch, lambda x, y: torch.cat([x, y]), torch.randn(2, 3), torch.arange(3).view(1, 3))
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last).to("webgpu")
    assert torch.cat([x, x], 1).is_contiguous(memory_format=torch.channels_last)


def test_cat_into_its_own_storage(torch: Any) -> None:
    def run(device: str) -> Any:
        x = torch.arange(8.0, device=device)
        torch.cat([x[4:], x[:4]], out=x)
        return x.cpu()

    with pytest.raises(RuntimeError, match="memory"):
        run("cpu")  # torch refuses the overlap, here too
    with pytest.raises(RuntimeError, match="memory"):
        run("webgpu")


def test_turning(torch: Any) -> None:
    x = torch.randn(2, 3, 4)
    for function in (
        lambda t: t.flip(0),
        lambda t: t.flip(0, 2),
        lambda t: t.flip(-1).flip(1),
        lambda t: t.permute(2, 0, 1).flip(0),
        lambda t: t[:, 1:].flip(1),
        lambda t: t.rot90(1, (0, 2)),
        lambda t: t.roll(1),
        lambda t: t.roll((1, -2), (0, 2)),
        lambda t: t.roll(5, 1),
        lambda t: t.roll(0, 0),
        lambda t: t.fliplr(),
    ):
        both(torch, function, x)
    both(torch, lambda t: t.flip(0), torch.tensor(3.0))
    both(torch, lambda t: t.roll(1), torch.empty(0))
    with pytest.raises((RuntimeError, IndexError)):
        x.to("webgpu").flip(0, 0)


def test_repeating_and_padding(torch: Any) -> None:
    x = torch.randn(2, 3)
    pad = torch.nn.functional.pad
    for function in (
        lambda t: t.repeat(2, 3),
        lambda t: t.repeat(2, 1, 2),
        lambda t: t.tile((2, 2)),
        lambda t: t.repeat_interleave(3, 1),
        lambda t: pad(t, (1, 2)),
        lambda t: pad(t, (1, 0, 2, 1), value=4.0),
        lambda t: pad(t, (-1, 1)),
        lambda t: pad(t[None], (1, 2), mode="replicate"),
        lambda t: pad(t[None], (2, 1), mode="reflect"),
        lambda t: pad(t[None], (1, 2), mode="circular"),
        lambda t: pad(t[None, None], (1, 1, 1, 1), mode="reflect"),
        lambda t: pad(t[None, None], (3, 1, 2, 4), mode="replicate"),
        lambda t: pad(t[None, None, None], (1, 2, 1, 0, 0, 3), mode="replicate"),
    ):
        both(torch, function, x)


def test_scattering_into_views(torch: Any) -> None:
    x, row, square = torch.randn(4, 5), torch.randn(5), torch.randn(4, 2)
    both(torch, lambda t, v: t.select_scatter(v, 0, 1), x, row)
    both(torch, lambda t, v: t.slice_scatter(v, 1, 0, 4, 2), x, square)
    both(torch, lambda t, v: t.diagonal_scatter(v), x, torch.randn(4))
    both(torch, lambda t, v: t.as_strided_scatter(v, (2, 2), (5, 1), 3), x, torch.randn(2, 2))


def test_gradients_of_views(torch: Any) -> None:
    x = torch.randn(4, 6)
    for function in (
        lambda t: t[1:3],
        lambda t: t[:, ::2],
        lambda t: t[2],
        lambda t: t.diagonal(),
        lambda t: t.unfold(1, 3, 2),
        lambda t: t.unfold(0, 2, 1),
        lambda t: t.as_strided((3, 3), (6, 2), 1),
        lambda t: t.expand(2, 4, 6),
        lambda t: torch.cat(t.split([1, 3])),
        lambda t: torch.stack(t.unbind(1)),
        lambda t: t.movedim(0, 1).reshape(-1),
        lambda t: torch.nn.functional.pixel_shuffle(t.reshape(1, 4, 2, 3), 2),
        lambda t: torch.nn.functional.unfold(t[None, None], (2, 3)),
        lambda t: torch.nn.functional.fold(t.reshape(1, 6, 4), (3, 4), (2, 3)),
    ):
        both(torch, function, x)


def test_triangles_and_diagonals(torch: Any) -> None:
    x = torch.randn(2, 4, 5)
    for k in (-2, 0, 1, 7):
        both(torch, lambda t, k=k: t.tril(k), x)
        both(torch, lambda t, k=k: t.triu(k), x)
    both(torch, lambda t: torch.diag_embed(t, 1), torch.randn(3, 4))
    both(torch, lambda t: torch.diag(t), torch.randn(4))
    both(torch, lambda t: t.trace(), torch.randn(4, 4))
    assert torch.equal(torch.tril_indices(4, 5, 1, device="webgpu").cpu(), torch.tril_indices(4, 5, 1))


def test_membership(torch: Any) -> None:
    few, many = torch.tensor([1, 5]), torch.arange(40) % 11
    x = torch.arange(12).view(3, 4)
    both(torch, lambda t, e: torch.isin(t, e), x, few)
    both(torch, lambda t, e: torch.isin(t, e), x, many)
    both(torch, lambda t, e: torch.isin(t, e, invert=True), x, few)
    assert not torch.equal(x.to("webgpu"), (x + 1).to("webgpu")) and torch.equal(x.to("webgpu"), x.to("webgpu"))
    assert not torch.equal(x.to("webgpu"), x.to("webgpu").view(-1))
