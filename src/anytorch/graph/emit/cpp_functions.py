"""The functions and numbers of kernel graphs in C++ (`native/code/lanes.h` has those named g_…)."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from anytorch.graph import ops
from anytorch.graph.loops import Expr, Reduction
from anytorch.graph.sizes import Size, SizeLike

TYPES = {
    "bool": "bool",
    "int8": "int8_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "float",
    "float64": "double",
}
SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
COMPARED = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


class CannotVectorize(Exception):
    """The schedule asks for a value along two vector axes at once, or for vectors of whole numbers from memory."""


def operation(expr: Expr, args: list[str], lanes: bool) -> str:
    """A pointwise op on values, or on vectors of them (`lanes`); bools in vectors are ones and zeros."""
    op = expr.op
    if op == "cast":
        if expr.dtype in ops.FLOATS:
            return args[0]
        kept = (
            args[0]
            if expr.dtype != "bool"
            else (f"choose({args[0]} != 0.0f, fill(1.0f), fill(0.0f))" if lanes else f"({args[0]} != 0)")
        )
        return kept if expr.args[0].dtype not in ops.FLOATS or expr.dtype == "bool" or lanes else f"(whole)({kept})"
    if op in SIGNS:
        return f"({args[0]} {SIGNS[op]} {args[1]})"
    if op in COMPARED:
        compared = f"{args[0]} {COMPARED[op]} {args[1]}"
        return f"choose({compared}, fill(1.0f), fill(0.0f))" if lanes else f"(whole)({compared})"
    if op in ("and", "or"):
        sign = "&" if op == "and" else "|"
        both = f"({args[0]} != 0) {sign} ({args[1]} != 0)"
        return f"choose({both}, fill(1.0f), fill(0.0f))" if lanes else f"(whole)({both})"
    if op == "not":
        return f"choose({args[0]} == 0, fill(1.0f), fill(0.0f))" if lanes else f"(whole)({args[0]} == 0)"
    if op == "where":
        return f"choose({args[0]} != 0, {args[1]}, {args[2]})" if lanes else f"({args[0]} != 0 ? {args[1]} : {args[2]})"
    return f"g_{op}({', '.join(args)})"


def number(size: SizeLike) -> str:
    return f"({size})" if isinstance(size, Size) or size < 0 else str(size)


def neutral(how: str) -> str:
    return {"max": "-INF", "min": "INF"}.get(how, "0.0f")


def literal(expr: Expr) -> str:
    value = expr.value
    if expr.dtype not in ops.FLOATS:
        return f"(whole){int(value)}"
    if value != value:
        return "NOT_A_NUMBER"
    if value in (inf, -inf):
        return "INF" if value > 0 else "(-INF)"
    return f"{float(value)!r}f" if "e" in repr(float(value)) or "." in repr(float(value)) else f"{float(value)!r}.0f"


def in_stages(one: Reduction, kind: str) -> bool:
    """Whether a sum is taken in stages: one by one, thousands of terms would lose digits that a vector's lanes keep."""
    return one.how == "sum" and kind != "end"


def by_twos(parts: Sequence[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return f"({by_twos(parts[:half])} + {by_twos(parts[half:])})"


Body = tuple[str, ...]  # what a sum adds: a value, or two factors


def text_of(body: Body) -> str:
    return f"({body[0]} * {body[1]})" if len(body) == 2 else body[0]


def plus(total: str, body: Body) -> str:
    """A sum with one more term; a product is added in one instruction where there is one."""
    return f"plus_product({total}, {body[0]}, {body[1]})" if len(body) == 2 else f"{total} + {body[0]}"
