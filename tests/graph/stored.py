"""The text of a few kernels for every emitter and width of vectors, as it is stored beside this file.

python -m tests.graph.stored    writes the files anew, so that a change of an emitter shows as a difference to read
"""

from __future__ import annotations

from pathlib import Path

from anytorch.graph.emit import cpp, triton, wgsl
from anytorch.graph.emit.cpp_schedules import Machine
from anytorch.graph.emit.cpp_schedules import schedules as cpp_schedules
from anytorch.graph.emit.flat import flattened
from anytorch.graph.emit.triton_schedules import schedules as triton_schedules
from anytorch.graph.emit.wgsl_schedules import schedules as wgsl_schedules
from anytorch.graph.lower import lowered
from anytorch.graph.partition import partition
from anytorch.graph.rewrite import rewritten
from tests.graph.cases import CASES

FOLDER = Path(__file__).parent / "stored"
NAMES = ("softmax", "one row times a matrix", "rope", "attention")
# Lanes of float32 in a vector of each: the text counts in vectors, and how many a tile has follows from their width.
LANES = {"neon": 4, "avx2": 8, "avx512": 16}


def texts() -> dict[str, str]:
    """By file name, the text of the likeliest schedule of every kernel."""
    made = {}
    for name in NAMES:
        graph, known = CASES[name]()
        cut = partition(rewritten(lowered(graph)), known)
        for number, group in enumerate(cut.groups):
            kernel = cut.kernel(group)
            flat = flattened(kernel)
            stem = f"{name.replace(' ', '-')}-{number}"
            for level, lanes in LANES.items():
                made[f"{stem}.{level}.cpp"] = cpp.render(flat, cpp_schedules(flat, known, Machine(2, lanes))[0])
            made[f"{stem}.triton.py.txt"] = triton.render(kernel, triton_schedules(kernel, known)[0])
            for manner, software in (("hardware", False), ("software", True)):
                schedule = wgsl_schedules(kernel, known, software=software)[0]
                made[f"{stem}.{manner}.wgsl"] = wgsl.render(kernel, schedule)
    return made


if __name__ == "__main__":
    for path in FOLDER.glob("*"):
        path.unlink()
    FOLDER.mkdir(exist_ok=True)
    for file, text in texts().items():
        (FOLDER / file).write_text(text)
