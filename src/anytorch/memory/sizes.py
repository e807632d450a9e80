"""Sizes as people write them."""

from __future__ import annotations

from contextlib import suppress

from anytorch.errors import UsageError

PAGE = 4096  # what direct reads are aligned to: file offset, address and length
ALIGNMENT = 256  # of a tensor inside a block on a device: the widest any vendor's kernels ask for
SCALES = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_nbytes(value: int | float | str, what: str = "size") -> int:
    """ "8GiB", "512 MB", 1073741824 → bytes. GB and GiB both mean 2**30, as everywhere in anytorch."""
    number = -1.0
    if isinstance(value, str):
        text = value.strip().lower().removesuffix("b").removesuffix("i").strip()
        scale = SCALES.get(text[-1:], 1)
        with suppress(ValueError):
            number = float(text[:-1] if scale > 1 else text) * scale
    elif not isinstance(value, bool):
        with suppress(TypeError, ValueError, OverflowError):
            number = float(value)
    if not 0 <= number < 2**60:
        told = repr(value) if not isinstance(value, int) or abs(value) < 2**128 else "a number of hundreds of digits"
        raise UsageError(f"{what}: {told} is not a size", hint='write it as "8GiB" or as a number of bytes')
    return int(number)


def words(nbytes: float) -> str:
    """1610612736 → "1.5 GiB"."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.3g} {unit}" if abs(nbytes) < 1000 * scale else f"{nbytes / scale:.0f} {unit}"
    return f"{nbytes:.0f} bytes"


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
