"""complex64 on the device, by real kernels, and Fourier transforms: beside the CPU, and without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Function = Callable[..., Any]
ARITHMETIC: dict[str, Function] = {
    "add": lambda a, c, r: a + c * 2j - r + 3,
    "mul": lambda a, c, r: a * c * r * (1 - 2j),
    "div": lambda a, c, r: a / c + r / a + 1 / a,
    "exp and log": lambda a, c, r: a.exp() + a.log(),
    "abs and angle": lambda a, c, r: a.abs() + a.angle(),
    "sgn": lambda a, c, r: a.sgn(),
    "conj": lambda a, c, r: a.conj() * c + a.conj().resolve_conj(),
    "sum": lambda a, c, r: a.sum(1) + a.mean(),
    "cumsum": lambda a, c, r: a.cumsum(1),
    "where": lambda a, c, r: torch.where(r > 0, a, c),
    "in place": lambda a, c, r: a.clone().mul_(c).add_(1j),
    "out": lambda a, c, r: torch.mul(a, c, out=torch.empty_like(a)),
    "of parts": lambda a, c, r: torch.complex(r, r) + torch.polar(r.abs(), r),
    "transposed": lambda a, c, r: a.t().contiguous() + c.mT,
    "from real": lambda a, c, r: r.to(torch.complex64) * 1j + a,
    "cat": lambda a, c, r: torch.cat([a, c.conj()]),
    "fills": lambda a, c, r: torch.full_like(a, 2 + 1j) + torch.zeros_like(a) + torch.ones_like(a),
    "products": lambda a, c, r: a @ c.mH + (a.conj() @ c.mT) @ (a @ c.mT),
    "vectors": lambda a, c, r: torch.dot(a[0], c[0]) + torch.vdot(a[0], c[0]) + (a @ c[1])[0],
}


@pytest.mark.native
@pytest.mark.parametrize("name", ARITHMETIC)
def test_complex_arithmetic_stays_on_the_device(webgpu: Any, name: str) -> None:
    torch.manual_seed(0)
    a, c = (torch.randn(4, 6, dtype=torch.complex64) for _ in range(2))
    r, function = torch.randn(4, 6), ARITHMETIC[name]
    expected = function(a, c, r)
    found = function(*[t.to("webgpu") for t in (a, c, r)])
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.native
@pytest.mark.parametrize("n", [1, 2, 3, 8, 60, 97, 121, 1024, 1000])
def test_fourier_transforms_of_every_kind_of_length(webgpu: Any, n: int) -> None:
    torch.manual_seed(n)
    x, y = torch.randn(3, n, dtype=torch.complex64), torch.randn(3, n)
    functions: tuple[tuple[Function, torch.Tensor], ...] = (
        (lambda t: torch.fft.fft(t), x),
        (lambda t: torch.fft.ifft(t, norm="ortho"), x),
        (lambda t: torch.fft.rfft(t, norm="forward"), y),
        (lambda t: torch.fft.irfft(torch.fft.rfft(t), n=n), y),
    )
    for function, values in functions:
        exact = function(values.to(torch.complex128 if values.is_complex() else torch.float64))
        error = (function(values.to("webgpu")).cpu() - exact).abs().max() / exact.abs().max()
        assert error < 1e-6, f"{error:.1e}"


@pytest.mark.native
def test_fourier_transforms_over_several_dimensions_and_their_gradients(webgpu: Any) -> None:
    torch.manual_seed(0)
    functions: tuple[Function, ...] = (
        lambda t: torch.fft.fft2(t).abs(),
        lambda t: torch.fft.irfftn(torch.fft.rfftn(t), s=t.shape),
        lambda t: torch.fft.fftn(t, dim=(0, 2)).real,
        lambda t: torch.stft(t[0], 8, 2, window=torch.hann_window(8, device=t.device), return_complex=True).abs(),
    )
    for function in functions:
        values = torch.randn(2, 6, 10, requires_grad=True)
        ours = values.detach().to("webgpu").requires_grad_()
        expected, found = function(values), function(ours)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
        wanted = torch.autograd.grad(expected.square().sum(), values)[0]
        given = torch.autograd.grad(found.square().sum(), ours)[0]
        torch.testing.assert_close(given.cpu(), wanted, rtol=1e-4, atol=1e-3)


def test_a_length_with_a_large_prime_factor_runs_on_the_cpu(webgpu: Any) -> None:
    x = torch.randn(2, 131 * 2, dtype=torch.complex64)
    webgpu.webgpu.reset_fallback_stats()
    torch.testing.assert_close(torch.fft.fft(x.to("webgpu")).cpu(), torch.fft.fft(x), rtol=1e-4, atol=1e-4)
    assert webgpu.webgpu.fallback_stats() == {"aten._fft_c2c.default": 1}


@pytest.mark.native
def test_exponentials_at_the_ends_of_the_range(webgpu: Any) -> None:
    """What is real stays real, what overflows in length alone is finite, and zeros keep their signs."""
    ends = (0.0, -0.0, 1.5, float("inf"), float("-inf"), float("nan"), 1e30, -1e-30, 90.0, -110.0, 1000.0)
    x = torch.tensor([complex(real, imaginary) for real in ends for imaginary in (*ends, 1.57)])
    expected, found = (torch.view_as_real(y) for y in (x.exp(), x.to("webgpu").exp().cpu()))
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-38, equal_nan=True)
    real = x.imag == 0
    assert torch.equal(found[real, 1].signbit(), expected[real, 1].signbit())


INFINITE: dict[str, Function] = {
    "times real": lambda c, r: c * r,
    "real times": lambda c, r: r * c,
    "times a number": lambda c, r: c * 2.0,
    "times nothing": lambda c, r: c * 0,
    "times infinity": lambda c, r: c * float("inf"),
    "by real": lambda c, r: c / r,
    "by a number": lambda c, r: c / 2.0,
    "real by": lambda c, r: r / c,
    "in place": lambda c, r: c.clone().mul_(r).div_(2),
    "as much more": lambda c, r: torch.add(r, c, alpha=2),
    "times complex": lambda c, r: c * c.flip(0),
}


@pytest.mark.native
@pytest.mark.parametrize("name", INFINITE)
def test_products_and_quotients_of_what_is_infinite_are_the_cpus(webgpu: Any, name: str) -> None:
    """A real factor is a complex one there: what is infinite times its imaginary part, 0, is NaN."""
    inf, nan = float("inf"), float("nan")
    given = [(inf, 0), (0, inf), (1, 2), (nan, 1), (inf, inf), (-inf, 3), (-0.0, 1), (3, -0.0)]
    c = torch.tensor([complex(*one) for one in given])
    r = torch.tensor([0.0, 2.0, inf, 1.0, -1.0, 2.0, 3.0, -1.5])
    expected, found = INFINITE[name](c, r), INFINITE[name](c.to("webgpu"), r.to("webgpu")).cpu()
    torch.testing.assert_close(torch.view_as_real(found), torch.view_as_real(expected), equal_nan=True)


REAL: dict[str, Function] = {
    "times a tensor": lambda x, r: x[:, None] * r,
    "a tensor times": lambda x, r: r[:, None] * x,
    "by a tensor": lambda x, r: x[:, None] / r,
    "times a number": lambda x, r: torch.stack([x * k for k in (2.0, -0.5, 0.0, float("inf"), float("nan"), 3)]),
    "by a number": lambda x, r: torch.stack([x / k for k in (2.0, -0.5, 0.0, float("inf"), float("nan"), 3)]),
    "a real alpha": lambda x, r: torch.stack([torch.add(x[:, None], x, alpha=2.5), torch.sub(x[:, None], x, alpha=3)]),
    "in place": lambda x, r: x.clone().mul_(2.0).div_(4),
    "mean": lambda x, r: torch.stack([x[i : i + 2].mean() for i in range(len(x) - 1)]),
    "mean over a dimension": lambda x, r: torch.stack(torch.broadcast_tensors(x[:, None], x)).mean(0),
    "reciprocals": lambda x, r: 1 / x[x.isfinite()],
}


@pytest.mark.native
@pytest.mark.parametrize("name", REAL)
def test_a_real_number_meets_an_infinite_part_as_on_the_cpu(webgpu: Any, name: str) -> None:
    """There, and in NumPy, it is complex, and zero times infinity is no number; but by nothing is by nothing."""
    ends = torch.tensor([0.0, 1.0, -2.5, float("inf"), float("-inf"), float("nan")])
    x = torch.complex(*torch.meshgrid(ends, ends, indexing="ij")).flatten()
    expected, found = REAL[name](x, ends), REAL[name](x.to("webgpu"), ends.to("webgpu"))
    pairs = torch.view_as_real(found.cpu()), torch.view_as_real(expected)
    torch.testing.assert_close(*pairs, rtol=1e-6, atol=0, equal_nan=True)


HALF: dict[str, Function] = {
    "a sum": lambda a, b, h: a.sum(0),
    "a product": lambda a, b, h: a.prod(1),
    "a quotient": lambda a, b, h: a / b,
    "a power of halves": lambda a, b, h: h.abs() ** (1 + 2j),
    "to the power of halves": lambda a, b, h: torch.pow(0.5j, h),
    "exp and log": lambda a, b, h: a.exp() + b.log(),
    "an angle": lambda a, b, h: a.angle(),
    "in place": lambda a, b, h: a.clone().div_(b).pow_(2),
    "into nothing": lambda a, b, h: torch.div(a, b, out=torch.empty(0, dtype=a.dtype, device=a.device)),
    "into a view": lambda a, b, h: torch.div(a, b, out=torch.empty(4, 3, dtype=a.dtype, device=a.device).t()),
    "matrices": lambda a, b, h: torch.addmm(a[:, :3], a, b.mT),
    "a dtype by name": lambda a, b, h: torch.sum(h, dtype=a.dtype),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", HALF)
def test_complex_numbers_of_half_precision_are_computed_in_float32_where_the_cpu_has_no_kernel(
    webgpu: Any, name: str
) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(3, 4, dtype=torch.complex64).to(torch.complex32) for _ in range(2))
    h = torch.randn(3, 4, dtype=torch.float16)
    expected = HALF[name](a.to(torch.complex64), b.to(torch.complex64), h.float())
    found = HALF[name](a.to("webgpu"), b.to("webgpu"), h.to("webgpu"))
    assert found.dtype is {torch.complex64: torch.complex32, torch.float32: torch.float16}[expected.dtype]
    torch.testing.assert_close(found.cpu().to(expected.dtype), expected, rtol=4e-3, atol=4e-3)
