"""NumPy's ufuncs in WGSL. A name ending in _f32 is a function of `anytorch.gpu.wgsl.functions`, exact where WGSL is not."""

from __future__ import annotations

from typing import Any

import numpy as np

EXPRESSIONS: dict[Any, str] = {
    np.add: "x0 + x1",
    np.subtract: "x0 - x1",
    np.multiply: "x0 * x1",
    np.true_divide: "divide_f32(x0, x1)",
    np.power: "pow_f32(x0, x1)",
    np.maximum: "maximum_f32(x0, x1)",
    np.minimum: "minimum_f32(x0, x1)",
    np.negative: "-x0",
    np.absolute: "abs(x0)",
    np.sign: "sign(x0)",
    np.exp: "exp_f32(x0)",
    np.log: "log_f32(x0)",
    np.log1p: "log1p_f32(x0)",
    np.sqrt: "sqrt(x0)",
    np.rint: "round(x0)",  # to the even one of two, as NumPy does
    np.sin: "sin_f32(x0)",
    np.cos: "cos_f32(x0)",
    np.tanh: "tanh_f32(x0)",
    np.logaddexp: "logaddexp_f32(x0, x1)",
}
# What gives a mask: 0.0 or 1.0. Whether `x == x` holds for a NaN is not left to the compiler.
COMPARISONS: dict[Any, str] = {
    np.equal: "select(0.0, 1.0, equal_f32(x0, x1))",
    np.not_equal: "select(1.0, 0.0, equal_f32(x0, x1))",
    np.less: "select(0.0, 1.0, x0 < x1)",
    np.less_equal: "select(0.0, 1.0, x0 < x1 || equal_f32(x0, x1))",
    np.greater: "select(0.0, 1.0, x0 > x1)",
    np.greater_equal: "select(0.0, 1.0, x0 > x1 || equal_f32(x0, x1))",
}
OF_MASKS: dict[Any, str] = {np.bitwise_and: "x0 * x1", np.bitwise_or: "max(x0, x1)", np.invert: "1.0 - x0"}
