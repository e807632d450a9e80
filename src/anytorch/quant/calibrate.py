"""Better codes from examples of a layer's inputs: GPTQ-style rounding and AWQ-style scaling, for every format.

Both look only at H = Σ x·xᵀ over the examples, because the error of a layer's outputs is tr(ΔW·H·ΔWᵀ).

GPTQ (arXiv 2210.17323) rounds column by column and lets the columns that are still to come make up for the error.
AWQ (arXiv 2306.00978) makes the columns whose inputs are large larger before rounding, and divides those inputs.
"""

from __future__ import annotations

import torch

from anytorch.errors import InputError
from anytorch.quant.formats import Format
from anytorch.quant.rounding import Groups, decode, encode, find_scales, round_to
from anytorch.quant.tensor import QuantTensor, from_groups, into_groups, pack, unpack

DAMPING = 0.01  # of H's mean diagonal: directions the examples never show must not get infinite weight
BLOCK = 128  # columns whose updates are applied to the rest of the matrix at once
POWERS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


class InputStatistics:
    """H and the mean size of each input column, added up over examples."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.hessian = torch.zeros(columns, columns, device=device)
        self.sizes = torch.zeros(columns, device=device)
        self.count = 0

    def add(self, x: torch.Tensor) -> None:
        flat = x.detach().reshape(-1, len(self.sizes)).float()
        self.hessian.addmm_(flat.t(), flat)
        self.sizes += flat.abs().sum(0)
        self.count += flat.shape[0]

    def check(self, name: str) -> None:
        if self.count == 0:
            raise InputError(
                f"the calibration examples never reached the layer {name}", hint="skip it, or give examples that use it"
            )
        if not bool(torch.isfinite(self.hessian).all()):
            raise InputError(f"the calibration examples gave the layer {name} inputs that are not finite")


def output_error(weight: torch.Tensor, rounded: torch.Tensor, hessian: torch.Tensor) -> float:
    """The root of tr(ΔW·H·ΔWᵀ) / tr(W·H·Wᵀ): the relative error of the layer's outputs on the examples."""
    difference = weight.float() - rounded.float()
    wrong = float(((difference @ hessian) * difference).sum())
    whole = float(((weight.float() @ hessian) * weight.float()).sum())
    return (max(wrong, 0.0) / whole) ** 0.5 if whole > 0 else 0.0


def gptq(weight: torch.Tensor, format: Format, hessian: torch.Tensor, *, refine: bool = True) -> QuantTensor:
    """Round a matrix (rows × columns) so that its outputs on the examples behind `hessian` change least."""
    shape, dtype = tuple(weight.shape), weight.dtype
    columns = shape[1]
    original = into_groups(weight, format)
    first = encode(original, format, refine=refine)
    work = original.reshape(shape[0], -1).clone()
    padded = work.shape[1]
    factor = _inverse_factor(hessian.to(work.device), padded)

    size = format.group_size or padded
    codes = torch.empty_like(first.codes).reshape(shape[0], -1)
    scale = first.scale.clone()
    offset = None if first.offset is None else first.offset.clone()
    whole_row = format.group_size == 0
    group = first
    for start in range(0, padded, BLOCK):
        end = min(start + BLOCK, padded)
        errors = torch.zeros(shape[0], end - start, device=work.device)
        for column in range(start, end):
            place = 0 if whole_row else column // size
            if not whole_row and column % size == 0:
                # This group's scales are found from the weights as the columns before have left them. Updates within the
                # block have been applied to it so far; a group is never longer than what a block's end has brought up.
                values = work[:, column : column + size].unsqueeze(1)
                group = find_scales(values, format, unit=first.tensor_scale, refine=refine)
                scale[:, place : place + 1] = group.scale
                if offset is not None:
                    assert group.offset is not None
                    offset[:, place : place + 1] = group.offset
            one = work[:, column : column + 1].unsqueeze(1)
            code = round_to(one, format, group)
            value = decode(Groups(code, group.scale, group.offset, first.tensor_scale), format).reshape(-1)
            codes[:, column] = code.reshape(-1)
            error = (work[:, column] - value) / factor[column, column]
            errors[:, column - start] = error
            # To the end of the group, not only of the block: its scales are read when it begins.
            reach = max(end, min(padded, (column // size + 1) * size)) if not whole_row else end
            work[:, column + 1 : reach] -= error.unsqueeze(1) * factor[column, column + 1 : reach]
        beyond = max(end, min(padded, -(-end // size) * size)) if not whole_row else end
        if beyond < padded:
            work[:, beyond:] -= errors @ factor[start:end, beyond:]
    groups = Groups(codes.reshape(first.codes.shape), scale, offset, first.tensor_scale)
    assert codes.shape[1] >= columns
    return from_groups(groups, format, shape, dtype)


def _inverse_factor(hessian: torch.Tensor, padded: int) -> torch.Tensor:
    """The upper Cholesky factor of H⁻¹, with enough added to H's diagonal for it to exist."""
    columns = hessian.shape[0]
    full = torch.eye(padded, device=hessian.device, dtype=torch.float64)  # padding columns touch nothing
    full[:columns, :columns] = hessian.double()
    diagonal = full.diagonal()[:columns]
    unused = diagonal == 0
    diagonal[unused] = 1.0
    mean = float(diagonal.mean())
    damping = DAMPING * mean
    for _ in range(8):
        damped = full.clone()
        damped.diagonal()[:columns] += damping
        factor, trouble = torch.linalg.cholesky_ex(damped)
        if int(trouble) == 0:
            inverse = torch.cholesky_inverse(factor)
            upper: torch.Tensor = torch.linalg.cholesky(inverse, upper=True).float()
            return upper
        damping *= 10
    raise InputError("the calibration examples are too few or too alike: their covariance cannot be inverted")


def input_scaling(
    weight: torch.Tensor, format: Format, statistics: InputStatistics, *, refine: bool = True
) -> torch.Tensor | None:
    """The factors for a layer's inputs (1/s; the weight's columns get s) that leave the least output error on the
    examples; None where no scaling beats none by at least 5 %."""
    sizes = (statistics.sizes / max(1, statistics.count)).clamp(min=1e-8)
    matrix = weight.detach().float()
    best, least = None, float("inf")
    for power in POWERS:
        s = sizes.pow(power)
        s = (s / (s.max() * s.min()).sqrt()).clamp(1e-4, 1e4)
        rounded = unpack(pack(matrix * s, format, refine=refine)) / s
        error = output_error(matrix, rounded, statistics.hessian)
        if error < (least * 0.95 if best is None else least):
            best, least = (None if power == 0.0 else s), error
    return None if best is None else 1.0 / best
