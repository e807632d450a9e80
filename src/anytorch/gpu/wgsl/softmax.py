"""Softmax and log-softmax, forward and backward, as row kernels: one read to fold, one to compute."""

from __future__ import annotations

from dataclasses import dataclass

from anytorch.gpu.wgsl.reduce import EXPONENTIALS, Reducer


@dataclass(frozen=True, eq=False)
class RowRule:
    """The part of a row kernel that does not depend on dtypes and geometry. Compared by identity: it is a fast key."""

    reducer: Reducer
    enter: tuple[str, ...]
    prepare: str
    output: str


TOTAL = Reducer((("v", "f32", "0.0"),), "s.v += x0;", "s.v += o.v;", ("s.v",))

# A row with a NaN, with +inf, or of nothing but -inf is NaN throughout, as in torch.
_BROKEN = "let broken = is_inf(s.m) || is_nan(s.m); "

SOFTMAX = RowRule(
    EXPONENTIALS,
    ("x0",),
    _BROKEN + "let scale = 1.0 / s.z;",
    "select(exp(x0 - s.m) * scale, quiet_nan(), broken)",
)
LOG_SOFTMAX = RowRule(
    EXPONENTIALS,
    ("x0",),
    _BROKEN + "let shift = s.m; let log_sum = log(s.z);",
    "select((x0 - shift) - log_sum, quiet_nan(), broken)",
)
# x0 is the gradient, x1 the forward result
SOFTMAX_BACKWARD = RowRule(TOTAL, ("x0 * x1",), "let total = s.v;", "x1 * (x0 - total)")
LOG_SOFTMAX_BACKWARD = RowRule(TOTAL, ("x0",), "let total = s.v;", "x0 - exp(x1) * total")
