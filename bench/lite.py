"""anytorch.lite beside torch on the CPU: call overhead, matrix products, convolution, and an epoch of training.

    python bench/lite.py [--out bench/results/lite.json] [--seconds 20] [--large]

Both run with one thread, in turns, on the same numbers, after their answers have been compared. Times are CPU time of the
process, the median of the turns; a ratio is torch's time over ours, so more than 1 means that ours is faster.
tinygrad is timed where it is installed and runs; a scalar library in the manner of micrograd is part of this file.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

from provenance import provenance, write_results

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # before NumPy and torch are loaded

import numpy as np  # noqa: E402
import torch  # noqa: E402

from anytorch import lite  # noqa: E402
from anytorch.lite import functional as F  # noqa: E402

Run = Callable[[], Any]


class Statement:
    """`a + b` as timeit runs it: in a loop of its own, with no function call around it that would count as the op's cost."""

    def __init__(self, text: str, **names: Any) -> None:
        # timeit would leave out the garbage collector, which is part of the price of making objects.
        self.timer = timeit.Timer(text, "gc.enable()", time.process_time, {"gc": gc, **names})

    def seconds(self, calls: int) -> float:
        return self.timer.timeit(calls)


class Called(Statement):
    """The same for a function."""

    def __init__(self, run: Run) -> None:
        super().__init__("run()", run=run)


def calls_for(run: Statement, share_s: float) -> int:
    """How many calls take about `share_s` seconds."""
    run.seconds(1)
    calls = 1
    while True:
        took = run.seconds(calls)
        if took > share_s / 4:
            return max(1, int(calls * share_s / took))
        calls *= 4


def in_turns(runs: dict[str, Any], seconds: float, turns: int = 9) -> dict[str, Any]:
    """Median CPU seconds per call of each, and the median of the turns' ratios. NumPy, where given, is the floor of lite."""
    timed = {name: run if isinstance(run, Statement) else Called(run) for name, run in runs.items()}
    calls = {name: calls_for(run, seconds / turns / len(runs)) for name, run in timed.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in timed.items():
            times[name].append(run.seconds(calls[name]) / calls[name])
    result: dict[str, Any] = {f"{name}_us": round(statistics.median(t) * 1e6, 3) for name, t in times.items()}
    ratios = [theirs / ours for ours, theirs in zip(times["lite"], times["torch"], strict=True)]
    result["torch_over_lite"] = round(statistics.median(ratios), 3)
    result["spread"] = [round(min(ratios), 3), round(max(ratios), 3)]
    return result


def same(ours: Any, theirs: Any, tolerance: float = 1e-3) -> None:
    ours = ours.detach().numpy()
    np.testing.assert_allclose(
        ours, theirs.detach().numpy(), rtol=tolerance, atol=tolerance * max(1, np.abs(ours).max())
    )


def operators(seconds: float, large: bool) -> dict[str, Any]:
    """Beside torch, and beside NumPy on the bare arrays: what NumPy takes, lite cannot go below."""
    found = {}
    signs = {"add": "+", "mul": "*", "matmul": "@"}
    cases = [(name, n) for n in (1, 10, 100) for name in signs]
    cases += [("matmul", n) for n in ((500, 1000, 2000) if large else (500,))]
    for name, n in cases:
        x, y = (np.random.default_rng(i).standard_normal((n, n)).astype("float32") for i in range(2))
        a, b, p, q = lite.from_numpy(x), lite.from_numpy(y), torch.from_numpy(x), torch.from_numpy(y)
        same(eval(f"a {signs[name]} b"), eval(f"p {signs[name]} q"))
        bare = "x.dot(y)" if name == "matmul" else f"x {signs[name]} y"
        runs = {
            "lite": Statement(f"a {signs[name]} b", a=a, b=b),
            "torch": Statement(f"p {signs[name]} q", p=p, q=q),
            "numpy": Statement(bare, x=x, y=y),
        }
        with torch.no_grad():
            found[f"{name} {n}x{n}"] = in_turns(runs, seconds)
    return found


def other_ops(seconds: float) -> dict[str, Any]:
    """Ops that take the general way through `record`, and a plain number beside a tensor, at 10x10."""
    x, y = (np.random.default_rng(i).standard_normal((10, 10)).astype("float32") for i in range(2))
    ours = {"a": lite.from_numpy(x), "b": lite.from_numpy(y)}
    theirs = {"a": torch.from_numpy(x), "b": torch.from_numpy(y)}
    ops = {
        "times 2.0": "a * 2.0",
        "div": "a / b",
        "sum": "a.sum()",
        "relu": "a.relu()",
        "softmax": "a.softmax(-1)",
        "reshape": "a.reshape(100)",
    }
    found = {}
    for name, text in ops.items():
        same(eval(text, dict(ours)), eval(text, dict(theirs)))
        runs = {"lite": Statement(text, **ours), "torch": Statement(text, **theirs)}
        found[f"{name} 10x10"] = in_turns(runs, seconds)
    return found


def convolutions(seconds: float) -> dict[str, Any]:
    found = {}
    for n, c, o, size, kernel, stride in ((1, 3, 16, 32, 3, 1), (8, 16, 32, 28, 3, 1), (4, 64, 64, 28, 3, 1),
                                          (8, 32, 64, 28, 3, 2), (8, 64, 128, 14, 1, 1)):  # fmt: skip
        random = np.random.default_rng(0)
        x = random.standard_normal((n, c, size, size)).astype("float32")
        w = random.standard_normal((o, c, kernel, kernel)).astype("float32")
        a, b, p, q = lite.from_numpy(x), lite.from_numpy(w), torch.from_numpy(x), torch.from_numpy(w)
        pad = kernel // 2
        runs: dict[str, Run] = {
            "lite": lambda: F.conv2d(a, b, None, stride, pad),  # noqa: B023
            "torch": lambda: torch.nn.functional.conv2d(p, q, None, stride, pad),  # noqa: B023
        }
        same(runs["lite"](), runs["torch"]())
        with torch.no_grad():
            found[f"conv2d {n}x{c}x{size}x{size} -> {o}, k{kernel} s{stride}"] = in_turns(runs, seconds)
    return found


def digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return (data.images[:, None] / 16).astype("float32"), data.target.astype("int64")


def networks(kind: str, nn: Any) -> Any:
    """The same network in either library; `nn` is lite or torch.nn."""
    linear, conv = (nn.CustomLinear, nn.CustomConv2d) if nn is lite else (nn.Linear, nn.Conv2d)
    if kind == "mlp":
        return nn.Sequential(nn.Flatten(), linear(64, 64), nn.ReLU(), linear(64, 10))
    return nn.Sequential(conv(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), linear(256, 10))


def epochs(seconds: float) -> dict[str, Any]:
    images, labels = digits()
    found = {}
    for kind in ("mlp", "cnn"):
        theirs = networks(kind, torch.nn)
        ours = networks(kind, lite)
        ours.load_state_dict(theirs.state_dict())
        a, b = lite.Adam(ours.parameters(), lr=1e-3), torch.optim.Adam(theirs.parameters(), lr=1e-3)
        loss = {}

        def ours_epoch() -> None:
            for i in range(0, len(images), 64):
                x, y = lite.from_numpy(images[i : i + 64]), lite.from_numpy(labels[i : i + 64])
                a.zero_grad()  # noqa: B023
                loss["lite"] = F.cross_entropy(ours(x), y)  # noqa: B023
                loss["lite"].backward()  # noqa: B023
                a.step()  # noqa: B023

        def their_epoch() -> None:
            for i in range(0, len(images), 64):
                x, y = torch.from_numpy(images[i : i + 64]), torch.from_numpy(labels[i : i + 64])
                b.zero_grad()  # noqa: B023
                loss["torch"] = torch.nn.functional.cross_entropy(theirs(x), y)  # noqa: B023
                loss["torch"].backward()  # noqa: B023
                b.step()  # noqa: B023

        ours_epoch()
        their_epoch()
        same(loss["lite"], loss["torch"], 1e-2)
        found[f"digits epoch, {kind}"] = in_turns({"lite": ours_epoch, "torch": their_epoch}, seconds * 2, turns=5)
    return found


def peers(seconds: float) -> dict[str, Any]:
    """tinygrad, where it is installed and runs, as it comes and with its TinyJit; CPU microseconds per call.

    Its CPU back end wants clang (CC names another). `digits epoch, mlp` is that of lite and torch, but full batches only.
    """
    if not importlib.util.find_spec("tinygrad"):
        return {"tinygrad": "not installed"}
    from tinygrad import Context, Tensor, TinyJit, nn

    version = importlib.metadata.version("tinygrad")
    try:
        (Tensor([1.0]) + 1).realize()
    except (RuntimeError, OSError) as exc:
        return {"tinygrad": f"{version} does not run here: {type(exc).__name__}: {exc}"}
    found: dict[str, Any] = {"tinygrad": version}

    def timed(name: str, run: Run) -> None:
        for _ in range(3):  # TinyJit records the second call
            run()
        calls = calls_for(Called(run), seconds)
        found[f"tinygrad {name}"] = {"us": round(Called(run).seconds(calls) / calls * 1e6, 2)}

    for n in (10, 100):
        x = np.ones((n, n), "float32")
        a, b = Tensor(x).realize(), Tensor(x).realize()
        for name, op in (("add", lambda a, b: (a + b).realize()), ("matmul", lambda a, b: (a @ b).realize())):
            np.testing.assert_allclose(op(a, b).numpy(), x + x if name == "add" else x @ x)
            timed(f"{name} {n}x{n}", lambda: op(a, b))  # noqa: B023
            jitted = TinyJit(op)
            timed(f"{name} {n}x{n}, TinyJit", lambda: jitted(a, b))  # noqa: B023
    if importlib.util.find_spec("sklearn"):
        images, labels = digits()
        full = len(images) // 64 * 64
        batches = [
            (Tensor(images[i : i + 64].reshape(64, 64)).realize(), Tensor(labels[i : i + 64].astype("int32")).realize())
            for i in range(0, full, 64)
        ]
        first, last = nn.Linear(64, 64), nn.Linear(64, 10)
        optimizer = nn.optim.Adam([*nn.state.get_parameters(first), *nn.state.get_parameters(last)], lr=1e-3)

        @TinyJit
        def step(x: Any, y: Any) -> Any:
            with Context(TRAINING=1):
                optimizer.zero_grad()
                loss = last(first(x).relu()).sparse_categorical_crossentropy(y).backward()
                return loss.realize(*optimizer.schedule_step())

        timed("digits epoch, mlp, TinyJit", lambda: [step(x, y) for x, y in batches])
    return found


class Value:
    """One number with a gradient: what teaching libraries of the micrograd kind compute with."""

    __slots__ = ("backward", "data", "grad", "parents")

    def __init__(self, data: float, parents: tuple[Value, ...] = (), backward: Any = None) -> None:
        self.data, self.grad, self.parents, self.backward = data, 0.0, parents, backward

    def __add__(self, other: Value) -> Value:
        def backward(g: float) -> None:
            self.grad += g
            other.grad += g

        return Value(self.data + other.data, (self, other), backward)

    def __mul__(self, other: Value) -> Value:
        def backward(g: float) -> None:
            self.grad += g * other.data
            other.grad += g * self.data

        return Value(self.data * other.data, (self, other), backward)

    def relu(self) -> Value:
        def backward(g: float) -> None:
            self.grad += g * (self.data > 0)

        return Value(max(self.data, 0.0), (self,), backward)

    def run_backward(self) -> None:
        order, seen, stack = [], set(), [(self, False)]
        while stack:
            value, done = stack.pop()
            if done:
                order.append(value)
            elif id(value) not in seen:
                seen.add(id(value))
                stack.append((value, True))
                stack += [(parent, False) for parent in value.parents]
        self.grad = 1.0
        for value in reversed(order):
            if value.backward:
                value.backward(value.grad)


def scalars() -> dict[str, Any]:
    """One digit through a 64-16-10 network and back: number by number, and with lite."""
    images, _ = digits()
    random = np.random.default_rng(0)
    w1, w2 = random.standard_normal((16, 64)) / 8, random.standard_normal((10, 16)) / 4
    pixels = images[0].ravel()

    def number_by_number() -> list[list[Value]]:
        a, b = [[Value(float(v)) for v in row] for row in w1], [[Value(float(v)) for v in row] for row in w2]
        x = [Value(float(v)) for v in pixels]
        for layer in (a, b):
            x = [sum((w * v for w, v in zip(row[1:], x[1:], strict=True)), row[0] * x[0]).relu() for row in layer]
        sum(x[1:], x[0]).run_backward()
        return a

    def with_lite() -> Any:
        a, b = lite.tensor(w1, "float32", requires_grad=True), lite.tensor(w2, "float32", requires_grad=True)
        F.relu(b @ F.relu(a @ lite.from_numpy(pixels))).sum().backward()
        return a.grad

    np.testing.assert_allclose([[v.grad for v in row] for row in number_by_number()], with_lite().numpy(), atol=1e-5)
    times = {}
    for name, run in (("micrograd-style", number_by_number), ("lite", with_lite)):
        calls = calls_for(Called(run), 0.5)
        times[f"{name}_us"] = round(Called(run).seconds(calls) / calls * 1e6, 1)
    return {"one digit, 64-16-10 network and back": times}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU time per comparison")
    parser.add_argument("--large", action="store_true", help="also 1000x1000 and 2000x2000")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        **provenance(),
        "numpy": np.__version__,
        "torch": torch.__version__,
    }
    sections: list[Callable[[], dict[str, Any]]] = [
        lambda: operators(options.seconds, options.large),
        lambda: other_ops(options.seconds),
        lambda: convolutions(options.seconds),
        lambda: peers(options.seconds),
    ]
    if importlib.util.find_spec("sklearn"):
        sections[3:3] = [lambda: epochs(options.seconds), scalars]
    else:
        results["digits"] = "scikit-learn is not installed"
    for section in sections:
        for name, values in section().items():
            results[name] = values
            print(f"{name:48s} {values}", file=sys.stderr)
        if options.out:  # after each part: a run that is cut short leaves something
            write_results(options.out, results)
    if not options.out:
        print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
