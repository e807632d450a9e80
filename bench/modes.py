"""What each mode does to a model: memory, time and answers of inference and of training, beside plain torch.

    python bench/modes.py [--device cpu] [--layers 6] [--width 512] [--tokens 128] [--rows 4] [--steps 20] [--output FILE]

The models are GPT-like blocks (attention by torch, a feed-forward part of four times the width), float32, random weights;
the programs are a plain `model(x)` under no_grad and the usual training loop with torch's AdamW. Nothing in them names a
mode: it is turned on around them, finds the model when it first runs and is turned off again, after which the answer must be
the first one to the bit.

Every contender runs in a process of its own (`--one-process`: after the other, on a device that counts its own memory), in
turns over `--rounds` rounds:
`plain` (float32), `autocast` (torch's own, in the dtype that is fast on the device; left out where none is), `speed`,
`balanced`, `memory`. Checked first: the losses of training are those of plain float32 training within the tolerance of the
precision used, and the answers of inference have a cosine of at least 0.95 (int4 weights) or 0.999 (others) with those of
plain torch.

Memory is what the device's own allocator holds above what was there before the model (on a CPU: the resident set): at most
(`peak`, from the mode's beginning on, packing included) and after the last call (`held`). Time is the median of the calls
after the first quarter of them, in which kernels are measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write_results
from torch import nn
from torch.nn import functional

import anytorch
from anytorch.devices.precision import autocast_dtype

CONTENDERS = ("plain", "autocast", "speed", "balanced", "memory")
CHECKED = 8  # losses compared with plain training
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}  # relative, of each of them
LEAST_COSINE = {"memory": 0.95}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.first(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(mixed.reshape(rows, length, width))
        result: torch.Tensor = x + self.down(functional.gelu(self.up(self.second(x))))
        return result


class Model(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.embed = nn.Embedding(options.words, options.width)
        self.blocks = nn.ModuleList(Block(options.width, options.width // 64) for _ in range(options.layers))
        self.norm, self.head = nn.LayerNorm(options.width), nn.Linear(options.width, options.words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(self.norm(x))
        return result


def resident(peak: bool) -> int:
    """The process's resident set, now or at most since `reset_peak`."""
    name = "VmHWM:" if peak else "VmRSS:"
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def peak_of(device: torch.device) -> int:
    return resident(peak=True) if device.type == "cpu" else int(torch.accelerator.max_memory_allocated())


def held_by(device: torch.device) -> int:
    return resident(peak=False) if device.type == "cpu" else int(torch.accelerator.memory_allocated())


def reset_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cpu":
        Path("/proc/self/clear_refs").write_text("5")
    else:
        torch.accelerator.reset_peak_memory_stats()


def batch(options: argparse.Namespace, device: torch.device, number: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(number % 4)  # four batches, seen again and again: the loss can fall
    return torch.randint(0, options.words, (options.rows, options.tokens + 1), generator=random).to(device)


def contend(options: argparse.Namespace) -> dict[str, Any]:
    """One contender, in this process: its figures, its answers and what the mode says it did."""
    device = torch.device(anytorch.resolve(options.device).device)
    torch.manual_seed(0)
    before = held_by(device)
    model = Model(options).to(device)
    name, training = options.contender, options.part == "training"
    dtype = autocast_dtype(device)
    around = torch.autocast(device.type, dtype=getattr(torch, dtype)) if name == "autocast" and dtype else nullcontext()
    mode = anytorch.mode(name, device=device) if name not in ("plain", "autocast") else None
    ids = batch(options, device)
    model.train(training)
    with torch.no_grad():
        plain = model.eval()(ids[:, :-1]) if not training else torch.zeros(())
    model.train(training)
    reset_peak(device)
    if mode is not None:
        mode.on()
    times, losses, cosine = [], [], None
    if training:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        for step in range(options.steps):
            ids = batch(options, device, step)
            begin = now(device)
            with around:
                loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            times.append(now(device) - begin)
    else:
        with torch.no_grad(), around:
            for _ in range(options.steps):
                begin = now(device)
                found = model(ids[:, :-1])
                times.append(now(device) - begin)
        cosine = float(functional.cosine_similarity(found.float().flatten(0, 1), plain.flatten(0, 1)).min())
    result = {
        "contender": name,
        "peak_nbytes": peak_of(device) - before,
        "held_nbytes": held_by(device) - before,
        "resident_nbytes": sum(t.nbytes for t in (*model.parameters(), *model.buffers())),
        "first_s": times[0],
        "median_s": statistics.median(times[len(times) // 4 :]),
        "losses": losses,
        "least_cosine": cosine,
        "dtype": dtype if name != "plain" and dtype else "float32",
    }
    if mode is not None:
        result["models"] = mode.describe()["models"]
        result["explained"] = mode.explain()
        mode.off()
        if not training:
            with torch.no_grad():
                result["same_bits_after"] = bool(torch.equal(model(ids[:, :-1]), plain))
    return result


def now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def run(options: argparse.Namespace, contender: str, part: str) -> dict[str, Any]:
    left = ("output", "rounds", "contender", "part", "one_process")
    values = {name: value for name, value in vars(options).items() if name not in left and value is not None}
    command = [sys.executable, __file__, "--contender", contender, "--part", part]
    for key, value in values.items():
        command += [f"--{key}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{contender} {part} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def alone(options: argparse.Namespace, contender: str, part: str) -> dict[str, Any]:
    """One contender in this process, with the device's memory given back before and after."""
    found = contend(argparse.Namespace(**{**vars(options), "contender": contender, "part": part}))
    gc.collect()
    torch.accelerator.empty_cache()
    return found


def merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    best = dict(runs[0])
    best["median_s"] = statistics.median(one["median_s"] for one in runs)
    best["all_medians_s"] = [one["median_s"] for one in runs]
    best["peak_nbytes"] = max(one["peak_nbytes"] for one in runs)
    best["held_nbytes"] = max(one["held_nbytes"] for one in runs)
    return best


def check(part: str, found: dict[str, dict[str, Any]]) -> None:
    for name, one in found.items():
        if part == "training":
            allowed = LOSS_TOLERANCE[one["dtype"]]
            for ours, plain in zip(one["losses"][:CHECKED], found["plain"]["losses"][:CHECKED], strict=True):
                assert abs(ours - plain) <= allowed * abs(plain), (name, ours, plain)
            assert one["losses"][-1] < one["losses"][0], name
        else:
            assert one["least_cosine"] >= LEAST_COSINE.get(name, 0.999), (name, one["least_cosine"])
            assert one.get("same_bits_after", True), f"{name} did not put the model back"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    for option, value in {
        "layers": 6,
        "width": 512,
        "tokens": 128,
        "rows": 4,
        "words": 4096,
        "steps": 20,
        "rounds": 3,
    }.items():
        parser.add_argument(f"--{option}", type=int, default=value)
    parser.add_argument("--one-process", action="store_true", help="not for a CPU, whose memory is the process's")
    parser.add_argument("--contender")
    parser.add_argument("--part", choices=["inference", "training"])
    parser.add_argument("--output")
    options = parser.parse_args()
    if options.contender:
        sys.stdout.write(json.dumps(contend(options)) + "\n")
        return
    device = torch.device(anytorch.resolve(options.device).device)
    contenders = [name for name in CONTENDERS if name != "autocast" or autocast_dtype(device)]
    result: dict[str, Any] = provenance() | {
        "torch": torch.__version__,
        "device": str(device),
        "options": {k: v for k, v in vars(options).items() if k not in ("output", "contender", "part")},
        "parameters": sum(p.numel() for p in Model(options).parameters()),
        "left_out": [] if "autocast" in contenders else ["autocast: no dtype is faster than float32 here"],
    }
    for part in ("inference", "training"):
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
        for _ in range(options.rounds):
            for name in contenders:
                runs[name].append(alone(options, name, part) if options.one_process else run(options, name, part))
        found = {name: merged(them) for name, them in runs.items()}
        check(part, found)
        result[part] = found
        if options.output:  # what there is, should the rest be cut off
            write_results(Path(options.output), result)
        plain = found["plain"]
        for name, one in found.items():
            sys.stdout.write(
                f"{part:10} {name:9} peak {one['peak_nbytes'] / 2**20:8.1f} MiB "
                f"({one['peak_nbytes'] / plain['peak_nbytes']:.2f}×)  held {one['held_nbytes'] / 2**20:8.1f} MiB  "
                f"{one['median_s'] * 1e3:8.2f} ms ({plain['median_s'] / one['median_s']:.2f}× as fast)  "
                f"weights {one['resident_nbytes'] / 2**20:.1f} MiB  cosine {one['least_cosine']}  "
                f"loss {one['losses'][0] if one['losses'] else 0:.4f} → {one['losses'][-1] if one['losses'] else 0:.4f}\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
