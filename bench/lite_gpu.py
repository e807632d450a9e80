"""anytorch.lite on a GPU through WebGPU, beside torch on the vendor's own path (or on the CPU) and beside lite on the host.

    python bench/lite_gpu.py [--out bench/results/lite-gpu.json] [--seconds 1]

Wall-clock time per call, the device waited for at the end of each turn; in turns, after the answers have been compared.
More than 1 in `torch_over_gpu` means that lite on the GPU is faster than torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import provenance, write_results

from anytorch import lite
from anytorch.gpu.runtime import open_runtime
from anytorch.lite import functional as F
from anytorch.lite.gpu.array import fallbacks

Run = Callable[[], Any]
THEIRS = "cuda" if torch.cuda.is_available() else "cpu"
TF = torch.nn.functional
LEFT_OUT: set[str] = set()


def wait() -> None:
    open_runtime().synchronize()
    if THEIRS == "cuda":
        torch.cuda.synchronize()


def in_turns(title: str, runs: dict[str, Run], seconds: float, turns: int = 7) -> dict[str, Any]:
    """Median seconds per call of each."""
    runs = {name: run for name, run in runs.items() if name not in LEFT_OUT}
    calls = {}
    for name, run in runs.items():
        for _ in range(3):
            run()
        wait()
        start = time.perf_counter()
        run()
        wait()
        calls[name] = max(1, min(500, int(seconds / turns / len(runs) / max(time.perf_counter() - start, 1e-6))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                run()
            wait()
            times[name].append((time.perf_counter() - start) / calls[name])
    found: dict[str, Any] = {f"{name}_us": round(statistics.median(t) * 1e6, 2) for name, t in times.items()}
    pairs = zip(times["gpu"], times["torch"], strict=True)
    ratios = [theirs / ours for ours, theirs in pairs]
    found["torch_over_gpu"] = round(statistics.median(ratios), 3)
    found["spread"] = [round(min(ratios), 3), round(max(ratios), 3)]
    print(f"{title:40s} {found}", file=sys.stderr, flush=True)
    return found


def numbers(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype("float32")


def ops() -> dict[str, tuple[Callable[..., Any], Callable[..., Any], list[Any]]]:
    return {
        "add 10x10": (lambda a, b: a + b, lambda a, b: a + b, [numbers(10, 10), numbers(10, 10)]),
        "add 4096x4096": (lambda a, b: a + b, lambda a, b: a + b, [numbers(4096, 4096), numbers(4096, 4096)]),
        "matmul 512": (lambda a, b: a @ b, lambda a, b: a @ b, [numbers(512, 512), numbers(512, 512)]),
        "matmul 2048": (lambda a, b: a @ b, lambda a, b: a @ b, [numbers(2048, 2048), numbers(2048, 2048)]),
        "sum 4096x4096": (lambda a: a.sum(), lambda a: a.sum(), [numbers(4096, 4096)]),
        "gelu 4096x1024": (F.gelu, TF.gelu, [numbers(4096, 1024)]),
        "softmax 4096x1024": (lambda a: a.softmax(-1), lambda a: a.softmax(-1), [numbers(4096, 1024)]),
        "layer norm 4096x1024": (
            lambda a, w, b: F.layer_norm(a, w, b, 1024, 1e-5),
            lambda a, w, b: TF.layer_norm(a, (1024,), w, b),
            [numbers(4096, 1024), numbers(1024), numbers(1024)],
        ),
        "conv2d 32x64x56x56 -> 64, k3": (
            lambda x, w: F.conv2d(x, w, None, 1, 1),
            lambda x, w: TF.conv2d(x, w, None, 1, 1),
            [numbers(32, 64, 56, 56), numbers(64, 64, 3, 3) / 24],
        ),
        "max pool 32x64x56x56": (
            lambda x: F.max_pool2d(x, 2),
            lambda x: TF.max_pool2d(x, 2),
            [numbers(32, 64, 56, 56)],
        ),
    }


def forward(seconds: float) -> dict[str, Any]:
    found = {}
    for name, (ours, theirs, arrays) in ops().items():
        there = [lite.tensor(x, device="webgpu") for x in arrays]
        host = [lite.from_numpy(x) for x in arrays]
        torch_side = [torch.from_numpy(x).to(THEIRS) for x in arrays]
        expected = theirs(*torch_side).cpu().numpy()
        np.testing.assert_allclose(
            ours(*there).numpy(), expected, rtol=1e-3, atol=1e-3 * max(1, np.abs(expected).max())
        )
        runs: dict[str, Run] = {
            "gpu": lambda: ours(*there),  # noqa: B023
            "host": lambda: ours(*host),  # noqa: B023
            "torch": lambda: theirs(*torch_side),  # noqa: B023
        }
        with torch.no_grad():
            found[name] = in_turns(name, runs, seconds)
    return found


def networks(nn: Any) -> Any:
    """A small network for 28 x 28 images; `nn` is lite or torch.nn."""
    linear, conv = (nn.CustomLinear, nn.CustomConv2d) if nn is lite else (nn.Linear, nn.Conv2d)
    return nn.Sequential(
        *(conv(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(conv(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), linear(64 * 49, 128), nn.GELU(), linear(128, 10)),
    )


def training(seconds: float, batch: int = 256) -> dict[str, Any]:
    """One step of training: forward, backward, Adam."""
    images, labels = numbers(batch, 1, 28, 28), np.arange(batch) % 10
    theirs = networks(torch.nn).to(THEIRS)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=1e-3)
    x, y = torch.from_numpy(images).to(THEIRS), torch.from_numpy(labels).to(THEIRS)
    losses: dict[str, Any] = {}

    def torch_step() -> None:
        optimizer.zero_grad()
        losses["torch"] = TF.cross_entropy(theirs(x), y)
        losses["torch"].backward()
        optimizer.step()

    def lite_step(name: str, device: str | None) -> Run:
        model = networks(lite)
        model.load_state_dict(theirs.state_dict())
        if device:
            model.to(device)
        adam = lite.Adam(model.parameters(), lr=1e-3)
        a, b = lite.tensor(images, device=device), lite.tensor(labels, device=device)

        def step() -> None:
            adam.zero_grad()
            losses[name] = F.cross_entropy(model(a), b)
            losses[name].backward()
            adam.step()

        return step

    runs = {"gpu": lite_step("gpu", "webgpu"), "host": lite_step("host", None), "torch": torch_step}
    for name, run in runs.items():
        for _ in range(3 * (name not in LEFT_OUT)):
            run()
    after = {name: loss.item() for name, loss in losses.items()}
    assert max(after.values()) - min(after.values()) < 0.02, after
    title = f"training step, CNN, batch {batch}"
    return {title: in_turns(title, runs, seconds * 2, turns=5)}


def recurrent(seconds: float) -> dict[str, Any]:
    """An LSTM over 64 steps of 32 sequences, forward and backward."""
    theirs = torch.nn.LSTM(128, 256).to(THEIRS)
    x = numbers(64, 32, 128)
    runs: dict[str, Run] = {}
    results: dict[str, Any] = {}

    def make(name: str, device: str | None) -> Run:
        net = lite.LSTM(128, 256)
        net.load_state_dict(theirs.state_dict())
        if device:
            net.to(device)
        given = lite.tensor(x, device=device)

        def run() -> None:
            net.zero_grad()
            results[name] = net(given)[0]
            results[name].sum().backward()

        return run

    def torch_run() -> None:
        theirs.zero_grad()
        results["torch"] = theirs(torch_x)[0]
        results["torch"].sum().backward()

    torch_x = torch.from_numpy(x).to(THEIRS)
    runs = {"gpu": make("gpu", "webgpu"), "host": make("host", None), "torch": torch_run}
    for name, run in runs.items():
        if name not in LEFT_OUT:
            run()
    expected = results.pop("torch").detach().cpu().numpy()
    for name in results:
        np.testing.assert_allclose(results[name].detach().numpy(), expected, atol=5e-3)
    title = "LSTM 64x32x128 -> 256, and back"
    return {title: in_turns(title, runs, seconds * 2, turns=5)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=1.0, help="per comparison")
    parser.add_argument("--without-host", action="store_true", help="leave lite on the host out")
    options = parser.parse_args()
    if options.without_host:
        LEFT_OUT.add("host")
    adapter = open_runtime().adapter
    results: dict[str, Any] = {
        **provenance(),
        "adapter": f"{adapter.name} ({adapter.api}, driver {adapter.driver})",
        "torch": torch.__version__,
        "torch_device": torch.cuda.get_device_name() if THEIRS == "cuda" else "cpu",
        "numpy": np.__version__,
    }
    for part in (forward, training, recurrent):
        results |= part(options.seconds)
        results["fallbacks"] = dict(fallbacks)
        if options.out:  # after each part: a run that is cut short leaves something
            write_results(options.out, results)
    if not options.out:
        print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
