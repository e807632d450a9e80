"""LU, Cholesky, triangular systems, inverses and determinants against the CPU, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.webgpu.agree import agree, on_device

linalg = torch.linalg
Function = Callable[..., Any]
SIZES = [1, 5, 33, 70]  # below, at and over a block's edge
BATCHES: list[tuple[int, ...]] = [(), (3,), (2, 2)]


def matrices(*shape: int, grad: bool = False) -> torch.Tensor:
    """Far enough from singular that two right answers are near each other, and in need of pivots."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(3)) / math.sqrt(shape[-1])
    made = made + 2 * torch.eye(*shape[-2:]).roll(1, -1)
    return made.requires_grad_(grad)


def positive(*shape: int, grad: bool = False) -> torch.Tensor:
    a = matrices(*shape)
    return (a @ a.mT + torch.eye(shape[-1])).requires_grad_(grad)


def numbers(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4)).requires_grad_(grad)


@pytest.mark.native
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_lu(webgpu: Any, size: int, batch: tuple[int, ...]) -> None:
    a, b = matrices(*batch, size, size, grad=True), numbers(*batch, size, 4, grad=True)
    for given in (a, a.detach().mT):  # both ways to lie in memory
        agree(lambda x: tuple(linalg.lu_factor_ex(x)), given.detach())  # pivots and infos to the last bit
        agree(lambda x: tuple(linalg.lu(x)), given.detach())
        agree(lambda x: torch.lu_unpack(*linalg.lu_factor(x)), given.detach())
    agree(linalg.solve, a, b, rtol=1e-3, atol=1e-4)
    agree(lambda x, y: linalg.solve(x, y, left=False), a, numbers(*batch, 4, size, grad=True), rtol=1e-3, atol=1e-4)
    agree(linalg.solve, a, numbers(*batch, size, grad=True), rtol=1e-3, atol=1e-4)
    agree(linalg.inv, a, rtol=1e-3, atol=1e-4)
    agree(lambda x: linalg.slogdet(x)[1], a, rtol=1e-3, atol=1e-4)
    agree(lambda x: tuple(linalg.slogdet(x)), a.detach())
    agree(lambda x: tuple(linalg.lu(x))[1:], a, rtol=1e-3, atol=1e-4)
    for adjoint, left in ((False, True), (True, True), (True, False)):
        rows = b.detach() if left else b.detach().mT.contiguous()
        agree(
            lambda x, y, kept=(left, adjoint): linalg.lu_solve(*linalg.lu_factor(x), y, left=kept[0], adjoint=kept[1]),
            a,
            rows,
            rtol=1e-3,
            atol=1e-4,
        )


@pytest.mark.native
def test_determinants(webgpu: Any) -> None:
    for shape in ((1, 1), (4, 4), (2, 3, 3), (2, 2, 5, 5)):
        agree(linalg.det, matrices(*shape, grad=True))
        agree(linalg.det, matrices(*shape).mT.contiguous().mT.requires_grad_())
        agree(torch.logdet, positive(*shape, grad=True))
    agree(linalg.det, torch.zeros(3, 3))
    agree(lambda x: tuple(linalg.slogdet(x)), torch.zeros(2, 3, 3))


@pytest.mark.native
@pytest.mark.parametrize("shape", [(40, 70), (70, 40), (2, 3, 90), (90, 3)], ids=str)
def test_lu_of_other_than_squares(webgpu: Any, shape: tuple[int, ...]) -> None:
    agree(lambda x: tuple(linalg.lu_factor_ex(x)), numbers(*shape))
    agree(lambda x: tuple(linalg.lu(x)), numbers(*shape))


@pytest.mark.native
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated")
def test_cholesky(webgpu: Any, size: int, batch: tuple[int, ...]) -> None:
    a, b = positive(*batch, size, size, grad=True), numbers(*batch, size, 3, grad=True)
    for upper in (False, True):
        agree(lambda x, u=upper: linalg.cholesky(x, upper=u), a)
        agree(lambda x, u=upper: torch.cholesky(x, upper=u), a)
        agree(lambda x, u=upper: linalg.cholesky(x, upper=u), a.detach().triu() if upper else a.detach().tril())
        agree(lambda x, y, u=upper: torch.cholesky_solve(y, linalg.cholesky(x, upper=u), upper=u), a, b)
        agree(lambda x, u=upper: torch.cholesky_inverse(linalg.cholesky(x, upper=u), upper=u), a)


@pytest.mark.native
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
def test_triangles(webgpu: Any, size: int, upper: bool, unit: bool) -> None:
    a = (numbers(2, size, size) / (4 * size) + torch.eye(size)).requires_grad_()
    b = numbers(2, size, 3, grad=True)
    for given in (a, a.detach().mT):
        agree(lambda x, y: linalg.solve_triangular(x, y, upper=upper, unitriangular=unit), given, b)
        agree(lambda x, y: linalg.solve_triangular(x, y.mT, upper=upper, left=False, unitriangular=unit), given, b)
    agree(lambda x, y: linalg.solve_triangular(x[:1], y, upper=upper, unitriangular=unit), a, b)  # one for all
    agree(lambda x, y: linalg.solve_triangular(x, y[0], upper=upper, unitriangular=unit), a, b)
    for transpose in (False, True):
        agree(
            lambda x, y, t=transpose: tuple(torch.triangular_solve(y, x, upper, t, unit)),
            a,
            b,
        )


@pytest.mark.native
def test_views_broadcasts_and_outs(webgpu: Any) -> None:
    whole = matrices(4, 20, 20)
    agree(lambda x: linalg.inv(x[::2, 3:17, 2:16] + 4 * torch.eye(14, device=x.device)), whole)
    a, b = matrices(3, 1, 6, 6), numbers(2, 6, 4)
    agree(linalg.solve, a, b)  # (3, 1) and (2,) make (3, 2)
    agree(linalg.solve, matrices(6, 6), numbers(5, 6, 4))
    ours, out = on_device(matrices(6, 6)), torch.empty(0, device="webgpu")
    assert linalg.inv(ours, out=out) is out
    torch.testing.assert_close(out.cpu(), linalg.inv(matrices(6, 6)))
    for function in (linalg.inv, linalg.det, linalg.cholesky, lambda x: linalg.solve(x, x), lambda x: linalg.lu(x)):
        agree(lambda x, f=function: f(x), torch.empty(0, 3, 3))
        agree(lambda x, f=function: f(x), torch.empty(2, 0, 0))
    agree(lambda x: linalg.solve(x, x[..., :0]), matrices(2, 3, 3))


@pytest.mark.native
def test_solutions_are_as_exact_as_the_cpus(webgpu: Any) -> None:
    """Against float64: a solution's error is the sum of many roundings, whichever way they are taken."""
    size = 300
    a, b, s = matrices(size, size), numbers(size, 5), positive(size, size)
    functions: list[tuple[Function, torch.Tensor]] = [
        (lambda x, y: linalg.solve(x, y), a),
        (lambda x, y: linalg.inv(x), a),
    ]
    functions += [(lambda x, y: torch.cholesky_solve(y, linalg.cholesky(x)), s)]
    for function, matrix in functions:
        exact = function(matrix.double(), b.double())
        theirs = (function(matrix, b) - exact).abs().max()
        ours = (function(matrix.to("webgpu"), b.to("webgpu")).cpu() - exact).abs().max()
        assert ours <= 4 * theirs


REFUSED: dict[str, Function] = {
    "singular": lambda d: linalg.solve(torch.zeros(3, 3, device=d), torch.ones(3, device=d)),
    "one of a batch is singular": lambda d: linalg.inv(torch.stack((torch.eye(3), torch.zeros(3, 3))).to(d)),
    "not positive": lambda d: linalg.cholesky(-torch.eye(3, device=d)),
    "not positive later": lambda d: linalg.cholesky(torch.diag(torch.tensor([1.0] * 40 + [-1.0] * 3)).to(d)),
    "no square": lambda d: linalg.solve(torch.zeros(3, 4, device=d), torch.ones(3, device=d)),
    "integers": lambda d: linalg.inv(torch.ones(3, 3, dtype=torch.int64, device=d)),
    "halves": lambda d: linalg.solve(torch.eye(3, device=d).half(), torch.ones(3, device=d).half()),
    "shapes": lambda d: linalg.solve(torch.ones(3, 3, device=d), torch.ones(4, device=d)),
    "a vector": lambda d: linalg.cholesky(torch.ones(3, device=d)),
    "no pivots": lambda d: linalg.lu_factor(torch.eye(3, device=d), pivot=False),
    "not a number": lambda d: linalg.cholesky(torch.full((3, 3), float("nan"), device=d)),
    "pivots from 0 on": lambda d: torch.lu_unpack(torch.eye(3, device=d), torch.arange(3, dtype=torch.int32, device=d)),
    "check_errors": lambda d: linalg.inv_ex(torch.zeros(3, 3, device=d), check_errors=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_the_cpus(webgpu: Any, name: str) -> None:
    with pytest.raises(Exception) as expected:
        REFUSED[name]("cpu")
    with pytest.raises(type(expected.value)) as found:
        REFUSED[name]("webgpu")
    assert str(found.value)[:10] == str(expected.value)[:10]


@pytest.mark.native
def test_pivots_with_steps_between_them(webgpu: Any) -> None:
    a, b = matrices(2, 5, 5), numbers(2, 5, 1)

    def solved(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        factors, pivots = linalg.lu_factor(a)
        return linalg.lu_solve(factors, torch.stack((pivots, pivots + 0), -1)[..., 0], b)

    agree(solved, a, b)


@pytest.mark.native
def test_infos_name_the_first_zero_pivot(webgpu: Any) -> None:
    a = torch.diag(torch.tensor([1.0] * 35 + [0.0, 2.0, 0.0]))
    agree(lambda x: linalg.lu_factor_ex(x).info, a)
    agree(lambda x: linalg.cholesky_ex(x).info, a)
    agree(lambda x: linalg.inv_ex(x).info, torch.stack((a, torch.eye(38))))


def test_what_is_the_cpus(webgpu: Any) -> None:
    """Other dtypes are right too, by way of the CPU."""
    for dtype in (torch.float64, torch.complex64):
        agree(linalg.inv, matrices(2, 3, 3).to(dtype))
        agree(linalg.solve, matrices(2, 3, 3).to(dtype), numbers(2, 3, 2).to(dtype))
