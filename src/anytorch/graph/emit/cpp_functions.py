"""The functions and numbers of kernel graphs in C++ (`native/code/lanes.h` has those named g_…)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """What a schedule asks for cannot be written: a value along two vector axes, vectors of whole numbers from memory."""


WHOLE = ("int32", "int64")
DIGITS = 1 << 24  # up to which a float holds every whole number
# Ops of bools that have other names for numbers.
OF_BOOLS = {"add": "or", "maximum": "or", "mul": "and", "minimum": "and"}


def operation(expr: Expr, args: list[str], lanes: bool) -> str:
    """A pointwise op on values, or on vectors of them (`lanes`); bools in vectors are ones and zeros."""
    op = OF_BOOLS.get(expr.op, expr.op) if expr.dtype == "bool" else expr.op
    if op == "floor" and expr.dtype not in ops.FLOATS:
        return args[0]
    text = _operation(op, expr, args, lanes)
    wraps = expr.dtype == "int32" and not lanes and op in ("add", "sub", "mul", "square", "neg", "abs", "cast")
    return f"(whole)(int32_t)({text})" if wraps else text  # single values are computed in 64 bits


def most(expr: Expr) -> float:
    """A whole number or bool is not larger than this; infinity where nothing is known.

    What is made of positions alone is the same at every call, and has been compared: they count as small.
    """
    if expr.dtype in ("bool", "int8"):
        return 1 if expr.dtype == "bool" else 128
    if expr.op == "constant":
        return abs(expr.value) if isinstance(expr.value, (int, float)) else inf
    if expr.op == "position":
        return 1
    below = [most(arg) for arg in expr.args]
    if expr.op in ("add", "sub"):
        return sum(below)
    if expr.op in ("mul", "square"):
        return below[0] * below[-1]
    if expr.op in ("maximum", "minimum", "neg", "abs", "relu", "floor"):
        return max(below)
    if expr.op in ("where", "choose"):
        return max(below[1:])
    return below[0] if expr.op == "cast" and expr.args[0].dtype not in ops.FLOATS else inf


def check_digits(expr: Expr, is_vector: Callable[[Expr], bool]) -> None:
    """Raise CannotVectorize for a pointwise op of whole numbers whose digits a vector of floats might not hold."""
    if not all(arg.dtype in (*WHOLE, "bool", "int8") for arg in expr.args) or expr.dtype in ops.FLOATS:
        return
    if expr.op in ops.LOGICAL or expr.op == "not":
        return
    if expr.op in COMPARED and min(most(arg) for arg in expr.args) <= DIGITS:
        return  # a position and a length: however a larger number is rounded, it stays the larger one
    sums = expr.op in ("add", "sub", "mul", "square", "cast") and expr.dtype in WHOLE
    read = max((most(arg) for arg in expr.args if arg.dtype in WHOLE and not is_vector(arg)), default=0)
    if max(read, most(expr) if sums else 0) > DIGITS:
        raise CannotVectorize("whole numbers in vectors are floats, which hold 24 bits of them")


def _operation(op: str, expr: Expr, args: list[str], lanes: bool) -> str:
    if op == "cast":
        if expr.dtype in ops.FLOATS:
            return args[0]
        if expr.dtype == "bool":
            return f"choose({args[0]} != 0.0f, fill(1.0f), fill(0.0f))" if lanes else f"({args[0]} != 0)"
        if expr.args[0].dtype not in ops.FLOATS:
            return args[0]
        if lanes:
            return f"g_whole({args[0]}, 0x1p{31 if expr.dtype == 'int32' else 63}f)"
        return f"({'int32_t' if expr.dtype == 'int32' else 'whole'})({args[0]})"
    if op == "pow" and expr.dtype not in ops.FLOATS:
        raise CannotVectorize("powers of whole numbers are left to torch: a float holds 24 bits of them")
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
