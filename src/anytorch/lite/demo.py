"""What document 4's two programs show: that it works, and how fast it is beside torch where torch is installed."""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from operator import matmul
from pathlib import Path
from typing import Any

import numpy as np

from anytorch.lite.create import from_numpy, randn, seed
from anytorch.lite.device import CustomDevice
from anytorch.lite.nn.layers import CustomConv2d, CustomLinear, CustomMSELoss
from anytorch.lite.optim import Adam
from anytorch.lite.tensors import CustomTensor

SIZES = (100, 500, 1000)


def tour() -> Iterator[str]:
    """The installation, tried out: a line for each thing that works."""
    device = CustomDevice("custom_gpu")
    yield f"Using device: {device}"
    x, y = CustomTensor([1, 2, 3, 4], device=device), CustomTensor([5, 6, 7, 8], device=device)
    yield f"Addition result: {x + y}"
    yield f"Multiplication result: {x * y}"
    seed(0)
    a, b = randn(3, 4, device=device), randn(4, 2, device=device)
    yield f"Matrix multiplication: {a.shape} @ {b.shape} = {(a @ b).shape}"
    image = randn(2, 3, 8, 8, device=device)
    yield f"Convolution: {image.shape} -> {CustomConv2d(3, 4, 3, padding=1)(image).shape}"
    losses = train()
    yield f"Training: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} epochs"


def demo(picture: str | Path = "pytorch_custom_demo.png") -> Iterator[str]:
    """The tour, then times beside torch and a picture of both."""
    yield from tour()
    times = compare()
    for i, size in enumerate(SIZES):
        yield f"{size}x{size}: " + ", ".join(f"{name} {seconds[i]:.5f}s" for name, seconds in times.items())
    draw(picture, train(), times)
    yield f"drawn: {picture}"


def train(epochs: int = 50) -> list[float]:
    """A linear model finds the line that made its data; the loss of each epoch."""
    seed(0)
    inputs, truth = randn(100, 10), randn(10, 1)
    targets = inputs @ truth
    model, criterion = CustomLinear(10, 1), CustomMSELoss()
    optimizer = Adam(model.parameters(), lr=0.1)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(sizes: Sequence[int] = SIZES, repeats: int = 5) -> dict[str, list[float]]:
    """Median seconds of a matrix product per size: "custom", and "torch" where it is installed. Both use all threads."""
    found: dict[str, list[float]] = {"custom": []}
    torch: Any = None
    if find_spec("torch"):
        import torch

        found["torch"] = []
    for n in sizes:
        host = np.random.default_rng(n).standard_normal((n, n)).astype("float32")
        ours = from_numpy(host)
        found["custom"].append(median_s(partial(matmul, ours, ours), repeats))
        if torch is not None:
            theirs = torch.from_numpy(host)
            found["torch"].append(median_s(partial(matmul, theirs, theirs), repeats))
    return found


def median_s(run: Callable[[], Any], repeats: int) -> float:
    run()
    return statistics.median(timeit.repeat(run, number=1, repeat=repeats))


def draw(
    path: str | Path, losses: Sequence[float], times: dict[str, list[float]], sizes: Sequence[int] = SIZES
) -> None:
    """The loss and the times as a picture. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(1, len(losses) + 1), losses)
    left.set(title="Training", xlabel="epoch", ylabel="loss", yscale="log")
    for name, seconds in times.items():
        right.plot(sizes, seconds, marker="o", label=name)
    right.set(title="Matrix product", xlabel="size", ylabel="seconds", xscale="log", yscale="log")
    right.legend()
    figure.savefig(path)
