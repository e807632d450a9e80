"""Elementwise ops, as a table: the op's functional overload, and the expression that computes one element of it."""

from __future__ import annotations

import torch

from anytorch.webgpu.kernels import register_pointwise
from anytorch.webgpu.pointwise import Rule
from anytorch.webgpu.tensors import aten

ARITHMETIC = {
    "add.Tensor": Rule("{0} + {1} * {2}", short="{0} + {1}"),
    "sub.Tensor": Rule("{0} - {1} * {2}", short="{0} - {1}"),
    "mul.Tensor": Rule("{0} * {1}"),
    "div.Tensor": Rule("{0} / {1}", compute="float"),
    "neg": Rule("-{0}"),
    "exp": Rule("exp({0})", compute="float"),
    "relu": Rule("select({0}, {T}(0), {0} < {T}(0))"),  # a NaN is not below zero: it stays
    "lt.Tensor": Rule("{bool}{0} < {1}"),
    "lt.Scalar": Rule("{bool}{0} < {1}"),
    "fill.Scalar": Rule("{1}", compute="output"),
}


def register(library: torch.library.Library) -> None:
    for name, rule in ARITHMETIC.items():
        base, _, overload = name.partition(".")
        register_pointwise(library, getattr(getattr(aten, base), overload or "default"), rule)
