"""Check the arguments of a forecast before anything is computed: their types and ranges."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from typing import Any

from anytorch.errors import InputError
from anytorch.forecast.decoding.sampling import Sampler


def whole_number(name: str, value: Any, least: int, why: str) -> int:
    """Any kind of integer (NumPy's, too) from `least` on; `why` ends the message for one below it."""
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool):
        raise InputError(f"{name} is {value!r}, not a whole number")
    if found < least:
        raise InputError(f"{name} is {found}; {why}")
    return found


def real_number(name: str, value: Any) -> float:
    a_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not a_number:
        raise InputError(f"{name} is {value!r}, not a number")
    return value if isinstance(value, (int, float)) else float(value)


def make_sampler(T: Any, top_k: Any, top_p: Any) -> Sampler:
    """How ids are drawn. None for `top_k` or `top_p` means that it does not cut."""
    return Sampler(
        real_number("T", T),
        0 if top_k is None else whole_number("top_k", top_k, 0, "it must not be negative; 0 keeps all ids"),
        1.0 if top_p is None else real_number("top_p", top_p),
    )


def make_seed(seed: Any) -> int | None:
    return None if seed is None else whole_number("seed", seed, 0, "use a whole number from 0 on")


def quantile_levels(levels: Any) -> tuple[float, ...]:
    if levels is None:
        return ()
    listed = levels.tolist() if hasattr(levels, "tolist") else levels  # NumPy's
    if isinstance(listed, str) or not isinstance(listed, Sequence):
        raise InputError(f"quantiles is {levels!r}, not a list of levels", hint="quantiles=(0.1, 0.5, 0.9)")
    wanted = tuple(real_number("a quantile", level) for level in listed)
    for level in wanted:
        if not 0 <= level <= 1:
            raise InputError(f"quantile {level:g} is not between 0 and 1")
    return wanted
