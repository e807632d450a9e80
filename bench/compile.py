"""`torch.compile(model, backend="anytorch")` beside eager torch and inductor: three models, inference and a training step.

    python bench/compile.py                                       fp32 on the CPU, about 10 minutes on two quiet cores
    python bench/compile.py --device cuda --dtype bfloat16        on a GPU
    python bench/compile.py --device webgpu                       on any GPU, beside our own kernels op by op
    python bench/compile.py --only encoder --output bench/results/compile-cpu.json

Answers first: outputs and gradients of each side are compared with float64, beside eager's own error; a side that is wrong
has no time, and where that is ours the script fails. Then all sides take turns, nine rounds, each on the same inputs after a
warm-up; times are medians. On a GPU nothing is recorded: what is measured is what a program that calls the model sees,
launches and all.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from provenance import provenance, write_results
from torch import nn

from anytorch.graph.clock import Clock
from anytorch.graph.compiler import compile_graph

ROUNDS = 9
TIMES_EAGER = 32.0  # what a side may be off by, as a multiple of eager torch's error or of one rounding
# The name "anytorch" is known to torch where the package is installed; a copied source tree has the function alone.
BACK_ENDS: dict[str, Any] = {"anytorch": compile_graph, "inductor": "inductor"}


class Wrong(Exception):
    """An answer that must have no time."""


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, width = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, width)
        x = self.first(x + self.out(mixed))
        return self.second(x + self.down(F.gelu(self.up(x))))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.before, self.after = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * self.head, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, n, width = x.shape
        y = self.before(x)
        q = rotated(self.q(y).view(b, n, self.heads, self.head).transpose(1, 2), cos, sin)
        k = rotated(self.k(y).view(b, n, self.kv_heads, self.head).transpose(1, 2), cos, sin)
        v = self.v(y).view(b, n, self.kv_heads, self.head).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, n, width))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self, layers: int = 4, width: int = 512, heads: int = 8, kv_heads: int = 2, length: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(width, heads, kv_heads) for _ in range(layers))
        self.norm = RMSNorm(width)
        angles = torch.outer(torch.arange(length), 1e4 ** -(torch.arange(0, width // heads, 2) / (width // heads)))
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos())
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.cos.to(x.dtype), self.sin.to(x.dtype))
        return self.norm(x)


class ResNetBlock(nn.Module):
    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(narrow, wide, 3, stride, 1, bias=False),
            nn.Conv2d(wide, wide, 3, 1, 1, bias=False),
        )
        self.norm, self.after = nn.BatchNorm2d(wide), nn.BatchNorm2d(wide)
        self.short = nn.Identity()
        if stride > 1 or narrow != wide:
            self.short = nn.Sequential(nn.Conv2d(narrow, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm(self.first(x)))
        return F.relu(self.after(self.second(y)) + self.short(x))


def resnet() -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    width = 64
    for wide, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [ResNetBlock(width, wide, stride), ResNetBlock(wide, wide, 1)]
        width = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 100))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BERT encoder, 6 x 384, 8 x 128 tokens": (
        lambda: nn.Sequential(*(EncoderLayer(384, 12) for _ in range(6))),
        (8, 128, 384),
    ),
    "Llama decoder, 4 x 512, 4 x 128 tokens": (Decoder, (4, 128, 512)),
    "ResNet-18, 4 x 96 x 96": (resnet, (4, 3, 96, 96)),
}


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for parameter in model.parameters():
        parameter.grad = None
    made = model(x)
    (made - target(made.shape, made.dtype, made.device)).float().square().mean().backward()
    return made.detach()


@cache
def target(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a step learns: not zeros, as the mean of squares of a normed output is constant and its gradients rounding."""
    return torch.arange(shape.numel()).reshape(shape).remainder(7).to(device, dtype)


def infer(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x)


def wrong(
    model: nn.Module, found: torch.Tensor, truth: tuple[torch.Tensor, list[torch.Tensor]], training: bool
) -> float:
    """The largest error of the output and of the gradients, each as a share of its largest number. A gradient that is
    missing, and what is no number, are infinitely wrong."""
    pairs: list[tuple[torch.Tensor | None, torch.Tensor]] = [(found, truth[0])]
    if training:
        pairs += [(p.grad, t) for p, t in zip(model.parameters(), truth[1], strict=True)]
    worst = 0.0
    for a, b in pairs:
        off = math.inf if a is None else float((a.double().cpu() - b).abs().max() / b.abs().max().clamp_min(1e-30))
        worst = max(worst, off if math.isfinite(off) else math.inf)
    return worst


def measure(name: str, way: str, device: torch.device, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    torch.manual_seed(3)
    make, shape = MODELS[name]
    training = way == "training"
    plain = make().train(training)
    x = torch.randn(shape)
    exact = copy.deepcopy(plain).double()
    run = step if training else infer
    truth_out = run(exact, x.double())
    truth = (truth_out, [p.grad.clone() for p in exact.parameters()] if training else [])
    plain, x = plain.to(device, dtype), x.to(device, dtype)
    sides: dict[str, nn.Module] = {"eager": plain}
    first_s: dict[str, float] = {}
    for side, back_end in BACK_ENDS.items():
        torch._dynamo.reset()
        model = copy.deepcopy(plain)
        begun = time.perf_counter()
        try:
            made = torch.compile(model, backend=back_end, dynamic=False)
            run(made, x)
        except Exception as exc:
            if side == "anytorch":
                raise Wrong(f"{name}, {way}: anytorch cannot compile it") from exc
            traceback.print_exc(limit=2)
            continue
        first_s[side] = round(time.perf_counter() - begun, 1)
        sides[side] = made
    errors = {side: wrong(model, run(model, x), truth, training) for side, model in sides.items()}
    allowed = TIMES_EAGER * max(errors["eager"], torch.finfo(dtype).eps)
    for side in [side for side in sides if not errors[side] <= allowed]:
        said = (
            f"{name}, {way}: {side} is wrong: off by {errors[side]:.3g} of the largest number, {allowed:.3g} is allowed"
        )
        if side == "anytorch":
            raise Wrong(said)
        print(said)  # a peer that is wrong has no time
        del sides[side]
    clock = Clock(device)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side, model in sides.items():
            took = clock.plain.seconds(lambda model=model: run(model, x), 2)
            if number:
                seconds[side].append(took)
    median = {side: statistics.median(found) for side, found in seconds.items()}
    return {
        "name": name,
        "way": way,
        "ms": {side: round(s * 1e3, 3) for side, s in median.items()},
        "least_ms": {side: round(min(s) * 1e3, 3) for side, s in seconds.items()},
        "error": errors,
        "first_call_s": first_s,
        "over_eager": round(median["eager"] / median["anytorch"], 3) if "anytorch" in median else None,
        "over_inductor": round(median["inductor"] / median["anytorch"], 3) if len(median) == 3 else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", action="append", help="models whose name has this part")
    parser.add_argument("--way", choices=["inference", "training"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.device == "webgpu":
        import anytorch.webgpu  # noqa: F401  (registers the device, after which torch trains on no other: not for CUDA's rows)
    device = torch.device(options.device, 0) if options.device != "cpu" else torch.device("cpu")
    result: dict[str, Any] = {"what": __doc__, **provenance(), "torch": torch.__version__, "device": str(device)}
    result.update(threads=torch.get_num_threads(), dtype=options.dtype, rows=[])
    failed: list[str] = []
    for name in MODELS:
        if options.only and not any(part.lower() in name.lower() for part in options.only):
            continue
        for way in (options.way,) if options.way else ("inference", "training"):
            try:
                row = measure(name, way, device, getattr(torch, options.dtype), options.rounds)
            except Wrong as exc:
                traceback.print_exc(limit=2)
                failed.append(str(exc))
                continue
            result["rows"].append(row)
            times = "  ".join(f"{side} {ms:.2f}" for side, ms in row["ms"].items())
            errors = ", ".join(f"{side} {error:.1e}" for side, error in row["error"].items())
            print(f"{name:<40} {way:<10} ms: {times} | errors: {errors} | first call {row['first_call_s']}", flush=True)
            if options.output:
                write_results(options.output, result)
    known = [row["over_eager"] for row in result["rows"] if row["over_eager"]]
    if known:
        mean = math.exp(statistics.fmean(map(math.log, known)))
        print(f"over eager: {mean:.3f} on the geometric mean, least {min(known):.2f}")
    if failed:
        sys.exit(f"no numbers for {len(failed)} rows:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
