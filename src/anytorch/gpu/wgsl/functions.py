"""Functions that WGSL lacks, or promises too little of: the float ones have a relative error near 1e-6 on every adapter.

WGSL allows `sin` an absolute error of 2^-11, `atan2` 4096 units in the last place, and `log` near 1 no correct digit; so
they are written out here. A name ends in the type it computes in, and an expression asks for `exp_{T}(…)`: a type for which
the function does not exist has no kernel (`computable`). No step relies on `(a + b) - a`, which a compiler may fold.
"""

from __future__ import annotations

import re
from functools import lru_cache

from anytorch.gpu.wgsl import arithmetic, elementary, special
from anytorch.gpu.wgsl.types import HELPERS

TEXTS = elementary.TEXT + special.TEXT + arithmetic.TEXT


def _split(text: str) -> dict[str, str]:
    found = {}
    for part in re.split(r"\n(?=fn )", text):
        matched = re.match(r"fn (\w+)\(", part)
        if matched:
            found[matched.group(1)] = part.strip() + "\n"
    return found


def _typed(text: str, name: str, bits: int) -> str:
    return re.sub(r"\bT\b", name, text.replace("_T(", f"_{name}(").replace("BITS", str(bits)))


FUNCTIONS: dict[str, str] = {**HELPERS, **_split(TEXTS)}
for _name, _bits in (("i32", 32), ("i64", 64)):
    FUNCTIONS.update(_split(_typed(arithmetic.INTEGER + arithmetic.PLAIN + arithmetic.INTEGER_PLAIN, _name, _bits)))
FUNCTIONS.update(_split(_typed(arithmetic.FLOAT_PLAIN, "f32", 32)))
FUNCTIONS.update(_split(_typed(arithmetic.PLAIN + arithmetic.FLOAT_PLAIN, "f64", 64)))
FUNCTIONS["divide_f64"] = "fn divide_f64(x: f64, y: f64) -> f64 { return x / y; }\n"

# Functions without a type in their name take floats.
_FLOAT_ONLY = {name for name in (*HELPERS, *_split(TEXTS)) if not name.endswith("_f32")}

_CALL = re.compile(r"\b(\w+)\(")
_FRACTION = re.compile(r"\d\.\d|\de-")
_TYPED = re.compile(r"_(f32|f64|i32|i64)$")
# Builtins that have no 64-bit form.
_SINGLE = {
    *("exp", "exp2", "log", "log2", "pow", "inverseSqrt"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("is_nan", "is_inf", "quiet_nan", "infinity", "bf16_bits"),
}


def computable(expression: str, kind: str) -> bool:
    """Can `expression` be computed in WGSL type `kind`? False where it names a function that type has no form of."""
    if kind.startswith("i") and _FRACTION.search(expression):
        return False
    called = set(_CALL.findall(expression))
    if any(_TYPED.search(name) and name not in FUNCTIONS for name in called):
        return False
    if kind in ("f64", "i64", "i32") and any(name in _FLOAT_ONLY for name in called):
        return False
    return kind != "f64" or not (called & _SINGLE)


@lru_cache(maxsize=1024)
def needed(text: str, defined: str = "") -> str:
    """The definitions of every function of ours that `text` calls, directly or not, except those that `defined` has."""
    wanted: list[str] = []
    queue = [text]
    while queue:
        for name in _CALL.findall(queue.pop()):
            if name in FUNCTIONS and name not in wanted:
                wanted.append(name)
                queue.append(FUNCTIONS[name].partition("{")[2])
    return "".join(FUNCTIONS[name] for name in wanted if f"fn {name}(" not in defined)
