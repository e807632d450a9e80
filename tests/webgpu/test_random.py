"""Random numbers of the webgpu device: the generator against its published test vectors, distributions, state, dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.native

N = 40_000


def fresh(dtype: torch.dtype = torch.float32, n: int = N) -> torch.Tensor:
    return torch.empty(n, dtype=dtype, device="webgpu")


def words(n: int) -> list[int]:
    """The raw stream: a range of all 2^32 values is the generator's own numbers."""
    made = fresh(torch.int32, n).random_(-(2**31), 2**31)
    return [(int(v) + 2**31) & 0xFFFFFFFF for v in made.tolist()]


# Known answers of philox4x32-10 from Random123 (Salmon et al., SC'11), file tests/kat_vectors: key 0, counter 0.
KNOWN = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_the_stream_is_philox(webgpu: Any) -> None:
    torch.webgpu.manual_seed(0)  # type: ignore[attr-defined]
    assert words(4) == KNOWN


def test_a_seed_repeats_the_stream_and_the_stream_moves_on(webgpu: Any) -> None:
    torch.manual_seed(7)
    first, second = torch.randn(5, device="webgpu").cpu(), torch.randn(5, device="webgpu").cpu()
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(torch.randn(5, device="webgpu").cpu(), first)
    torch.manual_seed(8)
    assert not torch.equal(torch.randn(5, device="webgpu").cpu(), first)


def test_an_element_does_not_depend_on_the_tensors_size(webgpu: Any) -> None:
    torch.webgpu.manual_seed(5)  # type: ignore[attr-defined]
    short = words(6)
    torch.webgpu.manual_seed(5)  # type: ignore[attr-defined]
    assert words(1001)[:6] == short


def test_the_state_can_be_taken_and_put_back(webgpu: Any) -> None:
    state = torch.webgpu.get_rng_state()  # type: ignore[attr-defined]
    first = torch.rand(9, device="webgpu").cpu()
    torch.webgpu.set_rng_state(state)  # type: ignore[attr-defined]
    assert torch.equal(torch.rand(9, device="webgpu").cpu(), first)
    with torch.random.fork_rng(devices=[0], device_type="webgpu"):
        inner = torch.rand(9, device="webgpu").cpu()
    assert torch.equal(torch.rand(9, device="webgpu").cpu(), inner)


def test_a_cpu_generator_may_be_given(webgpu: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    first = fresh(n=7).uniform_(generator=generator).cpu()
    second = fresh(n=7).uniform_(generator=generator).cpu()
    assert not torch.equal(first, second)
    generator.manual_seed(3)
    assert torch.equal(fresh(n=7).uniform_(generator=generator).cpu(), first)


# Name, how to draw, mean, standard deviation.
DISTRIBUTIONS: list[tuple[str, Callable[[], torch.Tensor], float, float]] = [
    ("uniform", lambda: fresh().uniform_(-1, 3), 1.0, 4 / math.sqrt(12)),
    ("half uniform", lambda: fresh(torch.float16).uniform_(), 0.5, 1 / math.sqrt(12)),
    ("bfloat16 uniform", lambda: fresh(torch.bfloat16).uniform_(), 0.5, 1 / math.sqrt(12)),
    ("normal", lambda: fresh().normal_(2, 3), 2.0, 3.0),
    ("normal of tensors", lambda: torch.normal(torch.full((N,), 2.0, device="webgpu"), 3.0), 2.0, 3.0),
    ("log normal", lambda: fresh().log_normal_(0, 0.5), math.exp(0.125), math.sqrt(math.exp(0.5) - math.exp(0.25))),
    ("exponential", lambda: fresh().exponential_(2), 0.5, 0.5),
    ("geometric", lambda: fresh().geometric_(0.25), 4.0, math.sqrt(12)),
    ("bernoulli", lambda: fresh().bernoulli_(0.3), 0.3, math.sqrt(0.21)),
    ("bernoulli of a tensor", lambda: torch.bernoulli(fresh().fill_(0.7)), 0.7, math.sqrt(0.21)),
    ("bernoulli of bools", lambda: fresh(torch.bool).bernoulli_(0.3), 0.3, math.sqrt(0.21)),
    ("integers", lambda: torch.randint(-3, 7, (N,), device="webgpu"), 1.5, math.sqrt(99 / 12)),
    ("bytes", lambda: fresh(torch.uint8).random_(), 127.5, math.sqrt((2**16 - 1) / 12)),
    ("wide integers", lambda: fresh(torch.int64).random_(0, 2**40), 2**39, 2**40 / math.sqrt(12)),
]


@pytest.mark.parametrize(("name", "draw", "mean", "deviation"), DISTRIBUTIONS, ids=[d[0] for d in DISTRIBUTIONS])
def test_a_distribution_has_its_moments(
    webgpu: Any, name: str, draw: Callable[[], torch.Tensor], mean: float, deviation: float
) -> None:
    torch.webgpu.manual_seed(11)  # type: ignore[attr-defined]
    x = draw().cpu().double()
    assert abs(x.mean() - mean) < 5 * deviation / math.sqrt(N)
    assert abs(x.std() - deviation) < 0.05 * deviation


def test_ranges_are_kept(webgpu: Any) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = fresh(dtype).uniform_().cpu()
        assert x.min() >= 0 and x.max() < 1
    assert set(torch.randint(2, 5, (500,), device="webgpu").tolist()) == {2, 3, 4}
    assert fresh().exponential_().cpu().min() > 0
    wide = fresh(torch.int64).random_(-(2**62), 2**62).cpu()
    assert wide.min() < -(2**60) and wide.max() > 2**60
    with pytest.raises(RuntimeError, match="from"):
        fresh().uniform_(2, 1)
    with pytest.raises(RuntimeError, match="std"):
        fresh().normal_(0, -1)


def test_a_view_is_filled_and_nothing_beside_it(webgpu: Any) -> None:
    x = torch.zeros(6, 8, device="webgpu")
    x[1:3, ::2].normal_()
    host = x.cpu()
    assert host[1:3, ::2].abs().min() > 0
    host[1:3, ::2] = 0
    assert not host.any()
    assert fresh(n=0).normal_().shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [(1000,), (7, 13), (4, 6)])
def test_dropout_and_its_gradient_use_one_mask(webgpu: Any, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = (
        torch.full(size, 2.0, dtype=dtype, device="webgpu").t()
        if len(size) == 2
        else torch.full(size, 2.0, device="webgpu")
    )
    x = x.to(dtype).detach().requires_grad_()
    y = F.dropout(x, 0.25)
    y.backward(torch.ones_like(y))  # type: ignore[no-untyped-call]
    assert x.grad is not None
    kept, slope = y.detach().float().cpu(), x.grad.float().cpu()
    expected = torch.tensor(2 / 0.75).to(dtype).float()
    assert torch.equal(kept != 0, slope != 0)
    assert torch.allclose(kept[kept != 0], expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-3)
    if x.numel() >= 1000:
        assert abs((kept != 0).float().mean() - 0.75) < 0.06


def test_dropout_of_nothing_and_of_everything(webgpu: Any) -> None:
    x = torch.ones(5, device="webgpu")
    assert F.dropout(x, 0.0).tolist() == [1.0] * 5
    assert F.dropout(x, 1.0).tolist() == [0.0] * 5
    assert F.dropout(x, 0.5, training=False).tolist() == [1.0] * 5


def test_a_permutation_holds_every_number_once(webgpu: Any) -> None:
    for n in (0, 1, 2, 257):
        assert sorted(torch.randperm(n, device="webgpu").tolist()) == list(range(n))
    assert torch.randperm(100, device="webgpu").tolist() != list(range(100))


def test_multinomial_follows_its_weights(webgpu: Any) -> None:
    torch.manual_seed(1)
    weights = torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.0, 2.0]], device="webgpu")
    drawn = torch.multinomial(weights, 2000, replacement=True).cpu()
    shares = torch.stack([row.bincount(minlength=3) for row in drawn]) / 2000
    assert torch.allclose(shares, torch.tensor([[0, 0.25, 0.75], [0.5, 0, 0.5]]), atol=0.05)
    without = torch.multinomial(weights, 2).cpu().sort().values
    assert without.tolist() == [[1, 2], [0, 2]]
    assert torch.multinomial(weights[0], 1).shape == (1,)


def test_dropout_keeps_the_order_of_dimensions(webgpu: Any) -> None:
    """Of a tensor with gaps too, as torch's other elementwise ops do."""
    gaps = torch.ones(2, 3, 3, 6).contiguous(memory_format=torch.channels_last)[..., ::2]
    for x in (gaps, torch.ones(2, 3, 4, 5).permute(1, 0, 3, 2), torch.ones(3, 1).expand(3, 4)):
        on_device = torch.empty_strided(x.size(), x.stride(), device="webgpu") if x.stride(-1) else x.to("webgpu")
        want, found = (torch.nn.functional.dropout(each, 1e-10) for each in (x, on_device))
        assert found.stride() == want.stride()


def test_the_gradient_of_a_margin_loss_without_rows(webgpu: Any) -> None:
    x = torch.zeros(0, 10, device="webgpu", requires_grad=True)
    torch.nn.functional.multi_margin_loss(x, torch.zeros(0, dtype=torch.int64, device="webgpu")).backward()
    assert x.grad is not None and x.grad.shape == (0, 10)
