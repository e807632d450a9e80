"""A training step of a model that does not fit the device: forward and backward on the device, the optimizer on the host.

    python bench/tiers_training.py [--layers 8] [--tokens 8192] [--device-budget 2GB] [--seconds 80] [--output FILE]

Checks first: the losses of three steps equal those of a plain loop that keeps the whole model on the device, moves every
gradient of a streamed block to the host, runs the same optimizer there and copies the weights back. Then times steps with
each way of overlapping, as the wall clock time of several whole steps in a row, everything finished at the end, over their
number. Two bounds stand beside them:

* `bound_s`, if everything overlaps: the longest of what the device needs with everything resident, what the link needs for
  the weights going up (for forward and again for backward, less what the ring still has) or the gradients coming down, and
  what the host's memory needs for the optimizer's reads and writes (seven times the weights: w, g, m, v read; w, m, v
  written) at the rate that torch's threads reach there;
* `bound_in_turn_s`, if the optimizer begins after backward: the longer of the first two, plus the third.

What the numbers do not show: other machines, activations that do not fit, states on disk.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from provenance import provenance, write_results

# Equal losses need kernels that add up in the same order every time (flash attention's backward does not by itself).
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn

import anytorch
from anytorch.memory import TieredOptimizer, activations, fit, fitted, unfit

OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}
STEPS = 3  # compared with the plain loop
ROW = 5  # steps timed in a row


class Layer(nn.Module):
    """The matrices of a Qwen3-8B layer (width 4096, 12288 inside), attention by torch."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.first(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(mixed.reshape(rows, length, width))
        inside = self.second(x)
        result: torch.Tensor = x + self.down(nn.functional.silu(self.gate(inside)) * self.up(inside))
        return result


class Model(nn.Module):
    def __init__(self, layers: int, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, inner, heads) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def make(options: argparse.Namespace, device: torch.device) -> Model:
    torch.manual_seed(0)
    with torch.device(device):
        model = Model(options.layers, options.width, 3 * options.width, options.width // 128)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return model.to(torch.bfloat16).train()


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def batch(options: argparse.Namespace, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(1)
    length = min(options.tokens, 2048)
    size = (options.tokens // length, length, options.width)
    return torch.randn(size, generator=generator, device=device).to(torch.bfloat16)


def plain_losses(options: argparse.Namespace, device: torch.device, streamed: set[str]) -> tuple[list[float], float]:
    """The reference, and the time of a forward and backward with everything on the device.

    The parameters named in `streamed` are updated on the host, the others on the device: the two round differently.
    """
    model, x = make(options, device), batch(options, device)
    activations(model, "checkpoint")
    moving = [p for name, p in model.named_parameters() if name in streamed]
    staying = [p for name, p in model.named_parameters() if name not in streamed]
    copies = [nn.Parameter(p.detach().cpu()) for p in moving]
    optimizers = [torch.optim.AdamW(group, **OPTIONS) for group in (copies, staying) if group]
    losses, times = [], []
    for _ in range(STEPS):
        anytorch.synchronize(device)
        begin = time.perf_counter()
        loss = loss_of(model, x)
        loss.backward()
        anytorch.synchronize(device)
        times.append(time.perf_counter() - begin)
        losses.append(loss.item())
        for copy, parameter in zip(copies, moving, strict=True):
            assert parameter.grad is not None
            copy.grad = parameter.grad.cpu()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            for copy, parameter in zip(copies, moving, strict=True):
                parameter.copy_(copy)
    return losses, min(times)


def link_gb_per_s(device: torch.device) -> tuple[float, float]:
    """Pinned host memory to the device and back, GB/s."""
    if device.type == "cpu":
        return (memory_gb_per_s(),) * 2  # type: ignore[return-value]
    host, there = (
        torch.empty(2**28, dtype=torch.uint8, pin_memory=True),
        torch.empty(2**28, dtype=torch.uint8, device=device),
    )
    found = []
    for target, source in ((there, host), (host, there)):
        times = []
        for _ in range(5):
            anytorch.synchronize(device)
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            anytorch.synchronize(device)
            times.append(time.perf_counter() - begin)
        found.append(2**28 / min(times) / 1e9)
    return found[0], found[1]


def memory_gb_per_s() -> float:
    """What torch's own threads reach on the host for y = x + y: two reads and a write."""
    x, y = torch.ones(2**27), torch.ones(2**27)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        y.add_(x)
        times.append(time.perf_counter() - begin)
    return 3 * x.nbytes / min(times) / 1e9


def run_way(
    options: argparse.Namespace, device: torch.device, model: Model, overlap: Any, expected: list[float], begun: float
) -> dict[str, Any]:
    """The losses of the first steps, then the time of whole steps in a row."""
    activations(model, "checkpoint")
    optimizer = TieredOptimizer(model, torch.optim.AdamW, overlap=overlap, **OPTIONS)
    x = batch(options, device)

    def steps(count: int) -> list[float]:
        losses = []
        for _ in range(count):
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        optimizer.wait()
        anytorch.synchronize(device)
        return [loss.item() for loss in losses]

    losses = steps(STEPS)
    times: list[float] = []
    before = fitted(model).mover.stats.from_host_nbytes
    while len(times) < 3 or (time.perf_counter() - begun < options.seconds and len(times) < 5):
        anytorch.synchronize(device)
        begin = time.perf_counter()
        losses += steps(ROW)
        times.append((time.perf_counter() - begin) / ROW)
    after = fitted(model).mover.stats.from_host_nbytes
    optimizer.close()
    return {
        "losses": losses,
        "times_s": times,
        "step_s": statistics.median(times),
        "up_nbytes_per_step": (after - before) / len(times) / ROW,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device = anytorch.best_device() if options.device == "auto" else torch.device(options.device)
    begun = time.perf_counter()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would fill every new tensor, ours and theirs
    up, down = link_gb_per_s(device)
    host = memory_gb_per_s()
    model = make(options, device)
    nbytes, parameters = sum(p.nbytes for p in model.parameters()), sum(p.numel() for p in model.parameters())
    budgets: dict[str, Any] = {"device_budget": options.device_budget, "host_budget": options.host_budget}
    fit(model, device, host_reserve=nbytes, disk=options.disk, training=True, **budgets)
    homes, groups = fitted(model).plan.homes, fitted(model).found.groups
    moving = {path for name, group in groups.items() if homes[name] != "device" for path in group.paths}
    expected, resident_s = plain_losses(options, device, moving)
    gc.collect()
    anytorch.cleanup(device)
    del model
    gc.collect()
    ways: dict[str, Any] = {}
    for overlap in (None, "forward", "backward"):
        model = make(options, device)
        fit(model, device, host_reserve=nbytes, disk=options.disk, training=True, **budgets)
        ways[str(overlap)] = run_way(options, device, model, overlap, expected, begun)
        levels, plan = fitted(model).stats()["levels"], fitted(model).plan
        streamed = sum(fitted(model).images[name].nbytes for name, home in homes.items() if home != "device")
        unfit(model, "cpu")
        del model
        gc.collect()
        anytorch.cleanup(device)
    up_s = max(streamed, 2 * streamed - plan.ring_nbytes) / up / 1e9
    down_s, host_s = streamed / down / 1e9, 7 * streamed / host / 1e9
    bound_s, in_turn_s = max(resident_s, up_s, down_s, host_s), max(resident_s, up_s, down_s) + host_s
    best = min(ways.values(), key=lambda way: way["step_s"])
    return {
        "parameters": parameters,
        "weights_nbytes": nbytes,
        "streamed_nbytes": streamed,
        "tokens": options.tokens,
        "expected": expected,
        "losses_equal": all(way["losses"][:STEPS] == expected for way in ways.values()),
        "resident_forward_backward_s": resident_s,
        "link_gb_per_s": {"up": up, "down": down},
        "host_memory_gb_per_s": host,
        "parts_of_the_bound_s": {"device": resident_s, "up": up_s, "down": down_s, "host memory": host_s},
        "bound_s": bound_s,
        "bound_in_turn_s": in_turn_s,
        "ways": {
            name: {**way, "times_bound": way["step_s"] / bound_s, "times_bound_in_turn": way["step_s"] / in_turn_s}
            for name, way in ways.items()
        },
        "step_s": best["step_s"],
        "ratio_to_bound": best["step_s"] / bound_s,
        "levels": levels,
        "plan": plan.explain(),
        "torch": torch.__version__,
        "device": str(device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--device-budget", default="2GB")
    parser.add_argument("--host-budget", default="40GB")
    parser.add_argument("--disk", default=None)
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    result = {**provenance(), **measure(options)}
    if not result["losses_equal"]:
        raise SystemExit(f"the losses differ: {result['ways']} instead of {result['expected']}")
    print(json.dumps({key: value for key, value in result.items() if key != "plan"}, indent=1))
    print(
        f"{result['step_s']:.3f} s per step, {result['ratio_to_bound']:.2f} times the bound of {result['bound_s']:.3f} s "
        f"if everything overlaps; the losses are equal"
    )
    if options.output:
        write_results(options.output, result)


if __name__ == "__main__":
    main()
