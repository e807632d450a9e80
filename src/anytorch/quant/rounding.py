"""From numbers to codes and back, one function per family of formats. Everything works on rows × groups × group size.

The default rounding of each format is the published one, so that other libraries' bytes come out the same: E2M1 rounds
halves to the even code, MXFP4 takes the largest power of two not above the group's maximum (OCP MX, section 6.3), NVFP4
scales as NVIDIA's recipe does, NF4 takes the nearest quantile.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from anytorch.quant.formats import Format

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_TINY = 2.0**-6  # the smallest normal one; a smaller scale would lose its mantissa
# A magnitude's E2M1 code is the number of these it exceeds; `True`: reaching it is enough (halves go to the even code).
E2M1_STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
SHRINKS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.76, 0.73, 0.7, 0.65, 0.6)  # ranges that `refine` tries


class Groups(NamedTuple):
    """Codes and scales that are not joined into bytes yet."""

    codes: torch.Tensor  # rows × groups × group size; uint8, or int8 for 8 bits
    scale: torch.Tensor  # rows × groups, in the type it is stored in
    offset: torch.Tensor | None = None  # the same, for asymmetric formats
    tensor_scale: torch.Tensor | None = None  # float32, no dimensions


def encode(
    values: torch.Tensor,
    format: Format,
    *,
    unit: torch.Tensor | None = None,
    refine: bool = False,
    importance: torch.Tensor | None = None,
) -> Groups:
    """The codes and scales of float32 groups. `unit`: the tensor scale, where these are only some of its rows.

    `importance`, 1 × groups × group size, says how much the squared error of each column counts when `refine` searches.
    """
    scales = find_scales(values, format, unit=unit, refine=refine, importance=importance)
    return scales._replace(codes=round_to(values, format, scales))


def find_scales(
    values: torch.Tensor,
    format: Format,
    *,
    unit: torch.Tensor | None = None,
    refine: bool = False,
    importance: torch.Tensor | None = None,
) -> Groups:
    """The scales (and offsets) of float32 groups, with codes left empty. `unit`: the tensor scale, where it is fixed."""
    found = _plain_scales(values, format, 1.0, unit)
    return _refined(values, format, found, importance) if refine else found


def round_to(values: torch.Tensor, format: Format, scales: Groups) -> torch.Tensor:
    """The codes nearest to float32 groups under given scales."""
    step = _step(format, scales).unsqueeze(-1)
    if format.family in ("nvfp4", "mxfp4"):
        return _nearest_e2m1(values * _reciprocal(format, scales).unsqueeze(-1))
    if format.table is not None:
        # bitsandbytes multiplies by the reciprocal, and its bytes are the reference for these tables.
        return _nearest_in_table(values * (1.0 / scales.scale.clamp(min=1e-38)).unsqueeze(-1), format)
    if scales.offset is not None:
        assert scales.tensor_scale is not None
        values = values - (scales.offset.float() * scales.tensor_scale).unsqueeze(-1)
        codes = torch.where(step > 0, values / step, 0.0).round_().clamp_(0, 2**format.bits - 1)
        return codes.to(torch.uint8)
    top = 2 ** (format.bits - 1) - 1
    codes = torch.where(step > 0, values / step, 0.0).round_().clamp_(-top, top)
    return codes.to(torch.int8) if format.bits == 8 else (codes + 2 ** (format.bits - 1)).to(torch.uint8)


def decode(groups: Groups, format: Format) -> torch.Tensor:
    """float32 values of codes; the definition of every format."""
    step = _step(format, groups).unsqueeze(-1)
    if format.table is not None:
        return _table(format.table, groups.codes.device)[groups.codes.int()] * step
    codes = groups.codes.float()
    if groups.offset is not None:
        assert groups.tensor_scale is not None
        return codes * step + (groups.offset.float() * groups.tensor_scale).unsqueeze(-1)
    return codes * step if format.bits == 8 else (codes - 2 ** (format.bits - 1)) * step


def scale_values(scale: torch.Tensor, format: Format) -> torch.Tensor:
    """The numbers behind stored scales, as float32."""
    table = format.scale_table
    return scale.float() if table is None else _table(table, scale.device)[scale.int()]


def _step(format: Format, groups: Groups) -> torch.Tensor:
    step = scale_values(groups.scale, format)
    return step if groups.tensor_scale is None else step * groups.tensor_scale


@lru_cache(maxsize=64)
def _table(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


# --- integers ---------------------------------------------------------------------------------------------------------


def tensor_scale(largest: torch.Tensor, format: Format) -> torch.Tensor | None:
    """The scale of a whole tensor whose largest absolute value is given; None for formats that have none."""
    if not format.has_tensor_scale:
        return None
    if format.scale_type == "e4m3":
        return torch.where(largest > 0, largest / (E4M3_MAX * E2M1_MAX), 1.0).float()
    return _power_of_two(largest / (2 ** (format.bits - 1) - 1) if format.symmetric else largest)


def _plain_scales(values: torch.Tensor, format: Format, shrink: float, unit: torch.Tensor | None) -> Groups:
    """The textbook scales of groups whose range is made smaller by the factor `shrink`."""
    return (_integer_scales if format.table is None else _table_scales)(values, format, shrink, unit)


def _integer_scales(values: torch.Tensor, format: Format, shrink: float, unit: torch.Tensor | None) -> Groups:
    empty = values.new_empty(0)
    if format.symmetric:
        largest = values.abs().amax(-1)
        wide = largest * (shrink / (2 ** (format.bits - 1) - 1))
        if not format.has_tensor_scale:
            return Groups(empty, wide)
        unit = tensor_scale(largest.amax(), format) if unit is None else unit
        assert unit is not None
        return Groups(empty, (wide / unit).half(), None, unit)
    low, high = values.amin(-1), values.amax(-1)
    if unit is None:
        unit = tensor_scale(torch.maximum(low.abs(), high.abs()).amax(), format)
    assert unit is not None
    if shrink != 1.0:
        middle, half = (low + high) / 2, (high - low) * (shrink / 2)
        low, high = middle - half, middle + half
    offset = (low / unit).half()
    # The step is measured from the offset as it is stored, so that rounding it does not push the top out of range.
    scale = ((high / unit - offset.float()) / (2**format.bits - 1)).clamp(min=0).half()
    return Groups(empty, scale, offset, unit)


def _power_of_two(largest: torch.Tensor) -> torch.Tensor:
    """The power of two that brings the largest size into [1, 2): half precision then serves weights of any size, and
    multiplying by it is exact."""
    exponent = torch.floor(torch.log2(largest.clamp(min=2.0**-126)))
    return torch.where(largest > 0, torch.exp2(exponent), 1.0).float()


# --- tables -----------------------------------------------------------------------------------------------------------


def _table_scales(values: torch.Tensor, format: Format, shrink: float, unit: torch.Tensor | None) -> Groups:
    empty = values.new_empty(0)
    largest = values.abs().amax(-1)
    if format.scale_type == "float32":
        return Groups(empty, largest * shrink)
    if format.scale_type == "e8m0":
        # largest = m·2^e with m in [½, 1): its power of two is e − 1. On the host: not every device has the operation.
        exponent = torch.frexp((largest * shrink).cpu())[1].to(values.device)
        biased = (exponent - 1 - 2 + 127).clamp(0, 254)  # 6.0 lies in E2M1's binade of 4 = 2²
        return Groups(empty, torch.where(largest > 0, biased, 0).to(torch.uint8))
    if unit is None:
        unit = tensor_scale(largest.amax(), format)
    assert unit is not None
    wanted = (largest * shrink / E2M1_MAX / unit).clamp(E4M3_TINY, E4M3_MAX)
    # Few devices but CUDA and the CPU can cast to FP8; the scales are a sixteenth of the weights.
    stored = wanted.cpu().to(torch.float8_e4m3fn).view(torch.uint8).to(values.device)
    return Groups(empty, stored, None, unit)


def _reciprocal(format: Format, scales: Groups) -> torch.Tensor:
    """What values are multiplied by to become E2M1 numbers, in the order of operations of the published recipes."""
    scale = scale_values(scales.scale, format)
    if scales.tensor_scale is not None:
        return (1.0 / scales.tensor_scale) / scale
    return 1.0 / scale.clamp(min=2.0**-126)  # exact: a power of two


def _nearest_e2m1(values: torch.Tensor) -> torch.Tensor:
    sizes = values.abs()
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for step, inclusive in E2M1_STEPS:
        codes += (sizes >= step) if inclusive else (sizes > step)
    return codes | (torch.signbit(values).to(torch.uint8) << 3)


@lru_cache(maxsize=64)
def _bounds(values: tuple[float, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    table = _table(values, device)
    order = torch.argsort(table, stable=True)
    return (table[order[:-1]] + table[order[1:]]) / 2, order.to(torch.uint8)


def _nearest_in_table(values: torch.Tensor, format: Format) -> torch.Tensor:
    assert format.table is not None
    bounds, order = _bounds(format.table, values.device)
    places = torch.bucketize(values.clamp(-1, 1), bounds, out_int32=True)
    return order[places]


# --- better scales ----------------------------------------------------------------------------------------------------


def _refined(values: torch.Tensor, format: Format, plain: Groups, importance: torch.Tensor | None) -> Groups:
    """For each group the scale, among smaller ranges, that leaves the least squared error."""
    best = plain
    error = _squared_error(values, format, plain, importance)
    if format.scale_type == "e8m0":
        tries = [plain._replace(scale=(plain.scale.int() + step).clamp(0, 254).to(torch.uint8)) for step in (1, -1)]
    else:
        tries = [_plain_scales(values, format, shrink, plain.tensor_scale) for shrink in SHRINKS[1:]]
    for candidate in tries:
        found = _squared_error(values, format, candidate, importance)
        better = found < error
        error = torch.where(better, found, error)
        scale = torch.where(better, candidate.scale, best.scale)
        offset = None
        if best.offset is not None:
            assert candidate.offset is not None
            offset = torch.where(better, candidate.offset, best.offset)
        best = best._replace(scale=scale, offset=offset)
    return best


def _squared_error(
    values: torch.Tensor, format: Format, scales: Groups, importance: torch.Tensor | None
) -> torch.Tensor:
    rounded = decode(scales._replace(codes=round_to(values, format, scales)), format)
    squares = (rounded - values).square()
    return (squares if importance is None else squares * importance).sum(-1)
