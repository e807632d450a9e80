"""Records of kernel graphs as a search would keep them, made without torch: for tests of what shows them."""

from __future__ import annotations

import json
from typing import Any

from anytorch.files import replace_file
from anytorch.graph import records
from anytorch.graph.ir import Builder, Graph
from anytorch.graph.picture import draw
from anytorch.graph.records import EAGER, KERNEL_KIND, KIND, Record, Step
from anytorch.measured.store import remember
from anytorch.measured.verdict import NO_TIME, Question, Trial, Verdict

CPP = '#include "lanes.h"\nvoid kernel() { /* a < b && c > d */ }\n'
FUSED, REFUSED = "all fused, scales after products", "sums in 4 parts"
BY_HAND = Step(("rms_norm",), "handwritten: norm (C++)", 2048, 1e-5, "cpp", source="norm.h")
DAY = "2026-11-16T07:00:00Z"

UNIT = "times eager torch's largest error from float64, and 16 roundings"


def graph(width: int = 48) -> Graph:
    b = Builder()
    x, w = b.input(("b", 64), "float32", name="<x>"), b.input((64, width), "float32")
    return b.graph([b.add("silu", b.add("matmul", b.add("rms_norm", x, rank=1, eps=1e-6), w))])


def record(width: int = 48, *, eager: bool = False, when: str = DAY, kernels: tuple[str, ...] = ("kernel",)) -> Record:
    """One of `graph(width)`. `eager`: torch was faster. `kernels` tell the verdicts about single kernels apart."""
    made = graph(width)
    asked = Question(KIND, f"{made.key[:8]}: 3 ops, b=4", "cpu", {"graph": made.key, "sizes": {"b": 4}})
    trials = (
        Trial(EAGER, 1e-3, error=0.4),
        Trial(FUSED, 2e-3 if eager else 4e-4, error=0.5, facts={"digest": "0"}),
        Trial(REFUSED, refused="wrong: an output is off by 3; 1e-05 is allowed"),
        Trial("products by torch", refused=NO_TIME),
    )
    verdict = Verdict(
        asked, trials, EAGER if eager else FUSED, "a test says so", 60.0, when, most_error=8.0, error_unit=UNIT
    )
    ops = ("square", "reduce", "add", "rsqrt", "mul", "matmul", "silu")
    steps = () if eager else (Step(ops, "i0=4 lanes=i1", 14080, 3e-4, "cpp", CPP), BY_HAND, Step(("matmul",)))
    keys = tuple(question(name).key for name in kernels)
    return Record("rms_norm, matmul, silu", made.key, made.to_json(), verdict, steps, 13824, keys, draw(made, None))


def question(name: str) -> Question:
    return Question(KERNEL_KIND, "7 ops", "cpu", {"kernel": name, "back": "cpp"})


def stored(one: Record | None = None, **how: Any) -> Record:
    """The record, in the cache folder with its verdicts, as a search leaves them."""
    made = record(**how) if one is None else one
    replace_file(records.folder() / f"{made.key}.json", json.dumps(made.as_json()).encode())
    remember(made.verdict)
    for name in how.get("kernels", ("kernel",)):
        remember(Verdict(question(name), (Trial("i0=4", 3e-4),), "i0=4", "the only one"))
    return made
