"""A packed weight: plain tensors beside what they mean. `pack` makes one, `unpack` gives the weight back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from anytorch.errors import InputError
from anytorch.quant.formats import Format, matrix_shape, parse
from anytorch.quant.rounding import Groups, decode, encode, tensor_scale

CHUNK = 1 << 18  # weights that are rounded at a time
PACKED = {8: torch.int8, 4: torch.uint8, 2: torch.uint8}  # bits of a code → what codes are joined into
PARTS = ("codes", "scale", "offset", "tensor_scale")  # in the order they are stored in


@dataclass(frozen=True)
class QuantTensor:
    """A weight in a packed format. `parts` are ordinary tensors: codes, scale, and where the format has them offset and
    tensor_scale; move, save and share them as such. `shape` and `dtype` are those of the weight it stands for."""

    format: Format
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Mapping[str, torch.Tensor]

    @property
    def rows(self) -> int:
        return matrix_shape(self.shape)[0]

    @property
    def columns(self) -> int:
        return matrix_shape(self.shape)[1]

    @property
    def device(self) -> torch.device:
        return self.parts["codes"].device

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts.values())

    @property
    def bits_per_weight(self) -> float:
        return self.nbytes * 8 / (self.rows * self.columns)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> QuantTensor:
        moved = {name: part.to(device, non_blocking=non_blocking) for name, part in self.parts.items()}
        return QuantTensor(self.format, self.shape, self.dtype, moved)

    def check(self) -> None:
        """Raise InputError unless every part has the type and size that format and shape demand."""
        wanted = expected_parts(self.format, self.shape)
        if self.parts.keys() != wanted.keys():
            raise InputError(
                f"a {self.format} weight needs the parts {', '.join(wanted)}; found {', '.join(self.parts) or 'none'}"
            )
        for name, (shape, dtype) in wanted.items():
            part = self.parts[name]
            if tuple(part.shape) != shape or part.dtype != dtype:
                raise InputError(
                    f"{name} of a {self.format} weight of shape {self.shape} must be {dtype} {shape}; "
                    f"found {part.dtype} {tuple(part.shape)}"
                )


def expected_parts(format: Format, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every part of a weight of that shape, in the order of PARTS."""
    rows, columns = matrix_shape(shape)
    scales = (rows, format.groups(columns))
    scale = {"float32": torch.float32, "float16": torch.float16}.get(format.scale_type, torch.uint8)
    parts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "codes": ((rows, format.padded(columns) // format.codes_per_byte), PACKED[format.bits]),
        "scale": (scales, scale),
    }
    if format.has_offset:
        parts["offset"] = (scales, scale)
    if format.has_tensor_scale:
        parts["tensor_scale"] = ((), torch.float32)
    return parts


def pack(
    weight: torch.Tensor,
    format: str | Format,
    *,
    group_size: int | None = None,
    refine: bool = False,
    importance: torch.Tensor | None = None,
) -> QuantTensor:
    """Round a weight into a format. `refine` searches each group's scale for the least squared error, which is slower
    and better (int2 and int4 gain most); without it the scale is the textbook one. `importance`, one number per column,
    says how much its errors count in that search: the mean square of what it is multiplied by.

    >>> pack(torch.randn(256, 512), "int4").bits_per_weight
    4.500244140625
    """
    chosen = parse(format, group_size)
    if not weight.is_floating_point():
        raise InputError(f"only floating-point weights can be quantized; this one is {weight.dtype}")
    rows, columns = matrix_shape(tuple(weight.shape))
    matrix = weight.detach().reshape(rows, columns)
    largest = torch.maximum(matrix.amax(), -matrix.amin()).float()
    if not bool(torch.isfinite(largest)):
        count = int((~torch.isfinite(matrix)).sum())
        raise InputError(
            f"{count} of {weight.numel()} weights are not finite; they cannot be rounded",
            hint="the checkpoint is damaged, or training diverged",
        )
    # Some rows at a time: rounding needs about ten times the memory of what it rounds.
    unit = tensor_scale(largest, chosen)
    count = max(1, CHUNK // chosen.padded(columns))
    weighed = None
    if importance is not None:
        if tuple(importance.shape) != (columns,):
            raise InputError(f"importance is one number for each of {columns} columns, not {tuple(importance.shape)}")
        weighed = into_groups(importance.reshape(1, columns), chosen)
    parts = [
        from_groups(
            encode(into_groups(part, chosen), chosen, unit=unit, refine=refine, importance=weighed),
            chosen,
            tuple(part.shape),
            part.dtype,
        )
        for part in matrix.split(count)
    ]
    joined = {
        name: parts[0].parts[name] if name == "tensor_scale" else torch.cat([part.parts[name] for part in parts])
        for name in parts[0].parts
    }
    return QuantTensor(chosen, tuple(weight.shape), weight.dtype, joined)


def from_groups(groups: Groups, format: Format, shape: tuple[int, ...], dtype: torch.dtype) -> QuantTensor:
    """Codes and scales as they come from rounding (rows × groups × group size), packed."""
    rows = groups.codes.shape[0]
    codes = join_codes(groups.codes.reshape(rows, -1), format.bits)
    parts = {"codes": codes, "scale": groups.scale}
    if groups.offset is not None:
        parts["offset"] = groups.offset
    if groups.tensor_scale is not None:
        parts["tensor_scale"] = groups.tensor_scale
    return QuantTensor(format, shape, dtype, parts)


def to_groups(packed: QuantTensor) -> Groups:
    """The inverse of `from_groups`: codes as they were before they were joined into bytes."""
    format, parts = packed.format, packed.parts
    codes = split_codes(parts["codes"], format.bits)
    codes = codes.reshape(packed.rows, format.groups(packed.columns), -1)
    return Groups(codes, parts["scale"], parts.get("offset"), parts.get("tensor_scale"))


def unpack(packed: QuantTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The weight that the codes stand for, in its own dtype or another, on the device the parts are on."""
    values = decode(to_groups(packed), packed.format)
    values = values.reshape(packed.rows, -1)[:, : packed.columns]
    return values.reshape(packed.shape).to(packed.dtype if dtype is None else dtype)


def into_groups(weight: torch.Tensor, format: Format) -> torch.Tensor:
    """A weight as float32 rows × groups × group size, the last group filled up by repeating the last column."""
    rows, columns = matrix_shape(tuple(weight.shape))
    matrix = weight.reshape(rows, columns).float()
    padding = format.padded(columns) - columns
    if padding:
        # A row's last value repeated leaves the range of its group as it is; a zero would widen an asymmetric one.
        matrix = torch.cat([matrix, matrix[:, -1:].expand(rows, padding)], dim=1)
    return matrix.reshape(rows, format.groups(columns), -1)


# --- joining small codes into bytes and taking them apart again: the first column sits in the lowest bits -------------


def join_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """rows × columns of uint8 codes below 2^bits (8 bits: int8) → rows × bytes."""
    if bits == 8:
        return codes.to(torch.int8).contiguous()
    parts = codes.to(torch.uint8).reshape(codes.shape[0], -1, 8 // bits).unbind(-1)
    joined: torch.Tensor = parts[0]
    for place, part in enumerate(parts[1:], 1):
        joined = joined | (part << (bits * place))
    return joined.contiguous()


def split_codes(joined: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 8:
        return joined
    mask = (1 << bits) - 1
    return torch.stack([(joined >> (bits * place)) & mask for place in range(8 // bits)], dim=-1).flatten(1)


# --- ordinary layers ---------------------------------------------------------------------------------------------------


def linear_of(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    trained: bool = True,
    training: bool = True,
    kind: type[nn.Linear] = nn.Linear,
) -> nn.Linear:
    """An ordinary layer that holds these tensors. A Parameter stays the same object; others become `trained` ones."""
    layer = kind(weight.shape[1], weight.shape[0], bias is not None, device="meta", dtype=weight.dtype)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            setattr(layer, name, value if isinstance(value, nn.Parameter) else nn.Parameter(value, trained))
    return layer.train(training)
