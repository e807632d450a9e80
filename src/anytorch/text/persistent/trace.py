"""What every multiprocessor did while a launch computed its last token, as a trace that Perfetto and Chrome show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from anytorch.files import replace_file

# Between the marks of a layer, in their order (`mark` in code/decode.cu); a wait ends with the norm of what has come.
PHASES = ("qkv", "attention", "wait for attention", "out", "wait for out", "gate and up", "wait for inner", "down")
BETWEEN, HEAD = "wait for the layer", "head"
MARKS = len(PHASES) + 1


def spans(marks: Tensor) -> Iterator[tuple[int, int, str, int, int]]:
    """Block, layer, what, begin and end in ns, from marks int64 [blocks, layers + 1, MARKS]; the last layer is the head."""
    for block, layers in enumerate(marks.tolist()):
        for number, layer in enumerate(layers[:-1]):
            for what, begin, end in zip(PHASES, layer, layer[1:], strict=False):
                yield block, number, what, begin, end
            yield block, number, BETWEEN, layer[-1], layers[number + 1][0]
        yield block, len(layers) - 1, HEAD, *layers[-1][:2]


def chrome_trace(marks: Tensor) -> dict[str, Any]:
    """The trace-event format: one thread for each block, times in microseconds from the first mark on."""
    first = min(begin for *_, begin, _ in spans(marks))
    return {
        "displayTimeUnit": "ns",
        "traceEvents": [
            {
                "name": what,
                "cat": "wait" if what.startswith("wait") else "work",
                "ph": "X",
                "ts": (begin - first) / 1e3,
                "dur": (end - begin) / 1e3,
                "pid": 0,
                "tid": block,
                "args": {"layer": layer},
            }
            for block, layer, what, begin, end in spans(marks)
        ],
    }


def write_trace(marks: Tensor, path: str | Path) -> int:
    """Write the trace to a file, for ui.perfetto.dev or chrome://tracing; gives the number of its events."""
    made = chrome_trace(marks)
    replace_file(Path(path), json.dumps(made).encode())
    return len(made["traceEvents"])


def table(marks: Tensor) -> dict[str, tuple[float, float]]:
    """Mean and largest µs of each kind of span: the mean over blocks and layers, and over layers of the slowest block's."""
    every: dict[str, dict[int, list[int]]] = {}
    for _, layer, what, begin, end in spans(marks):
        every.setdefault(what, {}).setdefault(layer, []).append(end - begin)
    return {
        what: (
            sum(sum(one) / len(one) for one in layers.values()) / len(layers) / 1e3,
            sum(max(one) for one in layers.values()) / len(layers) / 1e3,
        )
        for what, layers in every.items()
    }
