"""Softmax and log-softmax, forward and backward, as row kernels: one read to fold, one to compute (or one for both)."""

from __future__ import annotations

from dataclasses import dataclass

from anytorch.gpu.wgsl.reduce import EXPONENTIALS, Reducer, sums
from anytorch.gpu.wgsl.rows import Twice


@dataclass(frozen=True, eq=False)
class RowRule:
    """The part of a row kernel that does not depend on dtypes and geometry. Compared by identity: it is a fast key."""

    reducer: Reducer
    enter: tuple[str, ...]
    prepare: str
    output: str
    twice: Twice | None = None


TOTAL = sums(v="x0")

# A row with a NaN, with +inf, or of nothing but -inf is NaN throughout, as in torch.
_BROKEN = "let broken = is_inf(s.m) || is_nan(s.m); "

# The largest first: one exponential per element, and what is not finite is looked at once.
_MAXIMUM_FIRST = Twice(
    "var top = -infinity(); var odd = false;",
    "top = max(top, x0); odd = odd || is_nan(x0);",
    "var z = 0.0; let flat = odd || is_inf(top);",
    "if (!flat) { z += exp(x0 - top); }",
    "s.m = top; s.z = z; if (odd) { s.m = quiet_nan(); s.z = 1.0; }",
)

SOFTMAX = RowRule(
    EXPONENTIALS,
    ("x0",),
    _BROKEN + "let scale = 1.0 / s.z;",
    "select(exp(x0 - s.m) * scale, quiet_nan(), broken)",
    _MAXIMUM_FIRST,
)
LOG_SOFTMAX = RowRule(
    EXPONENTIALS,
    ("x0",),
    _BROKEN + "let shift = s.m; let log_sum = log(s.z);",
    "select((x0 - shift) - log_sum, quiet_nan(), broken)",
    _MAXIMUM_FIRST,
)
# x0 is the gradient, x1 the forward result
SOFTMAX_BACKWARD = RowRule(TOTAL, ("x0 * x1",), "let total = s.v;", "x1 * (x0 - total)")
LOG_SOFTMAX_BACKWARD = RowRule(TOTAL, ("x0",), "let total = s.v;", "x0 - exp(x1) * total")
