"""Linear solves: LU and Cholesky factors, triangular systems, inverses and determinants of float32 matrices.

Shapes, strides and errors are torch's own, by its meta kernels. For determinants torch factorises the transpose of a
contiguous matrix; so does this, since its gradients rely on it. Matrices beyond LARGEST, and other dtypes, are the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from anytorch.webgpu.factors import factorise_cholesky, factorise_lu, solve_triangular, swap_rows
from anytorch.webgpu.kernels import register_kernels
from anytorch.webgpu.launch import NoKernel, elsewhere, infer, without_elements
from anytorch.webgpu.tensors import aten, is_ours, new_tensor

LARGEST = 1024  # rows or columns


def _made(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What the op returns, uninitialised, after its meta kernel has checked the arguments."""
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    for argument, value in zip(op._schema.arguments, args, strict=False):
        if isinstance(value, torch.Tensor) and not is_ours(value):
            raise elsewhere(op, argument.name, value)
    try:
        known = infer(op, *args, **kwargs)
    except AssertionError as exc:  # some meta kernels are Python and assert; the CPU raises what it means
        raise NoKernel from exc
    if any(t.dtype is not torch.float32 for t in tensors if t.is_floating_point() or t.is_complex()):
        raise NoKernel
    if max((length for t in tensors for length in t.shape[-2:]), default=0) > LARGEST:
        raise NoKernel
    several = known if isinstance(known, tuple) else (known,)
    made = tuple(new_tensor(each.size(), each.stride(), each.dtype) for each in several)
    return made if isinstance(known, tuple) else made[0]


def _flat(matrices: torch.Tensor, batch: Sequence[int] | None = None) -> torch.Tensor:
    """(batch, rows, columns): a view, to be written; with `batch`, broadcast to that, to be read. A matrix that all of the
    batch share stays one."""
    if batch is None:
        return matrices.view(matrices.shape[:-2].numel(), *matrices.shape[-2:])
    if matrices.shape[:-2].numel() == 1:
        return matrices.reshape(matrices.shape[-2:]).expand(torch.Size(batch).numel(), -1, -1)
    return matrices.expand(*batch, -1, -1).reshape(torch.Size(batch).numel(), *matrices.shape[-2:])


def _flat_pivots(pivots: torch.Tensor, batch: Sequence[int]) -> torch.Tensor:
    return pivots.contiguous().expand(*batch, -1).reshape(torch.Size(batch).numel(), pivots.shape[-1])


def _factorised(a: torch.Tensor, lu: torch.Tensor, pivots: torch.Tensor, infos: torch.Tensor | None = None) -> None:
    """The factors of `a` into `lu`."""
    lu.copy_(a)
    infos = torch.zeros(lu.shape[:-2], dtype=torch.int32, device=lu.device) if infos is None else infos.zero_()
    if lu.numel():
        factorise_lu(_flat(lu), pivots.view(-1, pivots.shape[-1]), infos.view(-1))


def _solved(lu: torch.Tensor, pivots: torch.Tensor, x: torch.Tensor, adjoint: bool) -> None:
    """The solution in the place of `x`; all broadcast to x's batch."""
    if not x.numel():
        return
    batch = x.shape[:-2]
    matrices, columns, swaps = _flat(lu, batch), _flat(x), _flat_pivots(pivots, batch)
    count = swaps.shape[1]
    if adjoint:
        solve_triangular(matrices.mT, columns, upper=False, unit=False)
        solve_triangular(matrices.mT, columns, upper=True, unit=True)
        swap_rows(columns, swaps, 0, count, reverse=True)
    else:
        swap_rows(columns, swaps, 0, count)
        solve_triangular(matrices, columns, upper=False, unit=True)
        solve_triangular(matrices, columns, upper=True, unit=False)


def _check(infos: torch.Tensor, name: str, a: torch.Tensor, wanted: bool) -> None:
    if wanted:
        aten._linalg_check_errors(infos, name, is_matrix=a.dim() == 2)


def lu_factor_ex(a: torch.Tensor, *, pivot: bool = True, check_errors: bool = False) -> Any:
    made = _made(aten.linalg_lu_factor_ex.default, a, pivot=pivot)
    if not pivot:
        raise NoKernel
    _factorised(a, *made)
    _check(made[2], "torch.linalg.lu_factor_ex", a, check_errors)
    return made


def lu_solve(
    lu: torch.Tensor, pivots: torch.Tensor, b: torch.Tensor, *, left: bool = True, adjoint: bool = False
) -> torch.Tensor:
    x: torch.Tensor = _made(aten.linalg_lu_solve.default, lu, pivots, b, left=left, adjoint=adjoint)
    x.copy_(b)
    if left:
        _solved(lu, pivots, x, adjoint)
    else:  # x a = b is aᵀ xᵀ = bᵀ
        _solved(lu, pivots, x.mT, not adjoint)
    return x


def solve_ex(a: torch.Tensor, b: torch.Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    made = _made(aten._linalg_solve_ex.default, a, b, left=left)
    result, lu, pivots, infos = made
    _factorised(a, lu, pivots, infos)
    _check(infos, "torch.linalg.solve_ex", a, check_errors)
    vector = b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1])
    if vector:  # torch strides a batch of vectors as if it were a matrix
        x = b.unsqueeze(-1).expand(*result.shape, 1).clone(memory_format=torch.contiguous_format)
        _solved(lu, pivots, x, False)
        result.copy_(x.squeeze(-1))
    elif left:
        _solved(lu, pivots, result.copy_(b), False)
    else:
        _solved(lu, pivots, result.copy_(b).mT, True)
    return made


def inv_ex(a: torch.Tensor, *, check_errors: bool = False) -> Any:
    made = _made(aten.linalg_inv_ex.default, a)
    result, infos = made
    lu = torch.empty_like(result)
    pivots = torch.empty(a.shape[:-1], dtype=torch.int32, device=a.device)
    _factorised(a, lu, pivots, infos)
    _check(infos, "linalg.inv_ex", a, check_errors)
    _identity(result)
    _solved(lu, pivots, result, False)
    return made


def _identity(matrices: torch.Tensor) -> torch.Tensor:
    matrices.zero_().diagonal(0, -2, -1).fill_(1)
    return matrices


def _sign(pivots: torch.Tensor) -> torch.Tensor:
    """Of the permutation: each pivot that is not its own row is a swap."""
    rows = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    return (1 - 2 * ((pivots != rows).sum(-1) % 2)).to(torch.float32)


def det(a: torch.Tensor) -> Any:
    made = _made(aten._linalg_det.default, a)
    result, lu, pivots = made
    _factorised(a.mT if a.is_contiguous() else a, lu, pivots)
    result.copy_(lu.diagonal(0, -2, -1).prod(-1) * _sign(pivots))
    return made


def slogdet(a: torch.Tensor) -> Any:
    made = _made(aten._linalg_slogdet.default, a)
    sign, logarithm, lu, pivots = made
    _factorised(a.mT if a.is_contiguous() else a, lu, pivots)
    diagonal = lu.diagonal(0, -2, -1)
    sign.copy_(diagonal.sign().prod(-1) * _sign(pivots))
    logarithm.copy_(diagonal.abs().log().sum(-1))
    return made


def lu_unpack(lu: torch.Tensor, pivots: torch.Tensor, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    if not lu.numel():
        return without_elements(aten.lu_unpack.default, (lu, pivots, unpack_data, unpack_pivots), {})
    made = _made(aten.lu_unpack.default, lu, pivots, unpack_data, unpack_pivots)
    if unpack_pivots and bool(((pivots < 1) | (pivots > lu.shape[-2])).any()):
        raise RuntimeError(  # torch's own words
            "pivots passed to lu_unpack must be between 1 and LU.size(-2) inclusive."
            "Did you properly pass the result of lu_factor?"
        )
    _unpacked(made, lu, pivots, unpack_data, unpack_pivots)
    return made


def _unpacked(made: Any, lu: torch.Tensor, pivots: torch.Tensor, data: bool, permutation: bool) -> None:
    p, lower, upper = made
    if data:
        count = min(lu.shape[-2:])
        lower.copy_(lu[..., :count].tril(-1)).diagonal(0, -2, -1).fill_(1)
        upper.copy_(lu[..., :count, :].triu())
    if permutation and p.numel():
        swaps = _flat_pivots(pivots, p.shape[:-2])
        swap_rows(_flat(_identity(p)), swaps, 0, swaps.shape[1], reverse=True)


def lu(a: torch.Tensor, *, pivot: bool = True) -> Any:
    if not a.numel():
        return without_elements(aten.linalg_lu.default, (a,), {"pivot": pivot})
    made = _made(aten.linalg_lu.default, a, pivot=pivot)
    if not pivot:
        raise NoKernel
    factors, pivots, _ = lu_factor_ex(a)
    _unpacked(made, factors, pivots, True, True)
    return made


# --- triangles ---------------------------------------------------------------------------------------------------------


def _triangle(a: torch.Tensor, x: torch.Tensor, upper: bool, unit: bool) -> None:
    if x.numel():
        solve_triangular(_flat(a, x.shape[:-2]), _flat(x), upper=upper, unit=unit)


def solve_triangular_op(
    a: torch.Tensor, b: torch.Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> torch.Tensor:
    op = aten.linalg_solve_triangular.default
    x: torch.Tensor = _made(op, a, b, upper=upper, left=left, unitriangular=unitriangular)
    x.copy_(b)
    if left:
        _triangle(a, x, upper, unitriangular)
    else:
        _triangle(a.mT, x.mT, not upper, unitriangular)
    return x


def triangular_solve(
    b: torch.Tensor, a: torch.Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    made = _made(aten.triangular_solve.default, b, a, upper, transpose, unitriangular)
    x, clone = made
    clone.copy_(a)
    x.copy_(b)
    _triangle(a.mT if transpose else a, x, upper != transpose, unitriangular)
    return made


# --- positive definite matrices ----------------------------------------------------------------------------------------


def cholesky_ex(a: torch.Tensor, *, upper: bool = False, check_errors: bool = False) -> Any:
    made = _made(aten.linalg_cholesky_ex.default, a, upper=upper)
    _factor_positive(a, upper, *made)
    _check(made[1], "torch.linalg.cholesky_ex", a, check_errors)
    return made


def _factor_positive(a: torch.Tensor, upper: bool, result: torch.Tensor, infos: torch.Tensor) -> None:
    infos.zero_()
    result.copy_(a.triu() if upper else a.tril())
    if result.numel():
        factorise_cholesky(_flat(result.mT if upper else result), infos.view(-1))


def cholesky(a: torch.Tensor, upper: bool = False) -> torch.Tensor:
    result: torch.Tensor = _made(aten.cholesky.default, a, upper)
    infos = torch.empty(a.shape[:-2], dtype=torch.int32, device=a.device)
    _factor_positive(a, upper, result, infos)
    _check(infos, "cholesky", a, True)
    return result


def cholesky_solve(b: torch.Tensor, a: torch.Tensor, upper: bool) -> torch.Tensor:
    x: torch.Tensor = _made(aten._cholesky_solve_helper.default, b, a, upper)
    return _solve_positive(a, x.copy_(b), upper)


def _solve_positive(a: torch.Tensor, x: torch.Tensor, upper: bool) -> torch.Tensor:
    lower = a.mT if upper else a
    _triangle(lower, x, False, False)
    _triangle(lower.mT, x, True, False)
    return x


def cholesky_inverse(a: torch.Tensor, upper: bool = False) -> torch.Tensor:
    x: torch.Tensor = _made(aten.cholesky_inverse.default, a, upper)
    return _solve_positive(a, _identity(x), upper)


KERNELS: dict[str, Callable[..., Any]] = {
    "linalg_lu_factor_ex": lu_factor_ex,
    "linalg_lu_solve": lu_solve,
    "linalg_lu": lu,
    "lu_unpack": lu_unpack,
    "_linalg_solve_ex": solve_ex,
    "linalg_inv_ex": inv_ex,
    "_linalg_det": det,
    "_linalg_slogdet": slogdet,
    "linalg_solve_triangular": solve_triangular_op,
    "triangular_solve": triangular_solve,
    "linalg_cholesky_ex": cholesky_ex,
    "cholesky": cholesky,
    "_cholesky_solve_helper": cholesky_solve,
    "cholesky_inverse": cholesky_inverse,
}


def register(library: torch.library.Library) -> None:
    register_kernels(library, KERNELS)
