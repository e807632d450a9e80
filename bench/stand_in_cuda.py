"""The stand-in on a machine that has CUDA: `--device cuda` changes nothing, `--device webgpu` beside CUDA computes the same.

python bench/stand_in_cuda.py [--output bench/results/stand-in-h200.json] [--only gan,vit] [--jobs 6]

Every program of tests/run/programs is run by `python` twice, by `anytorch run --device cuda`, and by `anytorch run --device
webgpu --json`. What it prints with CUDA must be the same to the byte under `anytorch run --device cuda` (if two plain runs
agree); on webgpu the numbers must be near, and the report says what the CPU computed. Then a training loop is timed by
`python` and by `anytorch run --device cuda`, in turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "tests" / "run" / "programs"
DISTRIBUTED = ("ddp", "fsdp")
NUMBER = re.compile(r"-?\d+\.?\d*(?:[eE][-+]?\d+)?")
LIMIT_S = 80
ROUNDS = 5
LOOP = """
import time, torch
torch.manual_seed(0)
device = torch.device("cuda")
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)), torch.nn.Linear(64, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = [(torch.randn(16, 64), torch.randn(16, 1)) for _ in range(8)]
losses = []
for step in range(640):
    if step == 40:
        torch.cuda.synchronize()
        began = time.perf_counter()
    x, y = (one.to(device) for one in data[step % 8])
    optimizer.zero_grad()
    hidden = x
    for layer in model:
        hidden = torch.tanh(layer(hidden))
    loss = (hidden - y).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
torch.cuda.synchronize()
print(time.perf_counter() - began, losses[-1].hex(), sum(losses).hex())
"""


def environment(scratch: Path) -> dict[str, str]:
    """The variables of tests/device/run.py: our sources, carried packages, and a Vulkan driver for a headless card."""
    spec = importlib.util.spec_from_file_location("device_run", ROOT / "tests" / "device" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, str] = module.environment(scratch)
    found["ANYTORCH_WEBGPU_FALLBACK"] = "silent"
    return found


def run(line: list[str], env: dict[str, str]) -> dict[str, Any]:
    """Status, compared lines, the report if there is one, seconds, and the end of what was printed if it failed."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen([sys.executable, *line], env=env, stdout=out, stderr=err, start_new_session=True)
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            status = 124
        out.seek(0)
        err.seek(0)
        text, told = out.read(), err.read()
    report = next((line for line in reversed(text.splitlines()) if line.startswith('{"device"')), None)
    return {
        "status": status,
        "lines": [line for line in text.splitlines() if line.startswith("= ")],
        "report": json.loads(report) if report else None,
        "seconds": round(time.monotonic() - began, 1),
        "end": "" if status == 0 else (text + told)[-1500:],
    }


def most_apart(expected: list[str], found: list[str]) -> float | None:
    """The greatest relative difference of the numbers in two lists of lines; None if there are not as many."""
    wanted, got = ([float(number) for line in lines for number in NUMBER.findall(line)] for lines in (expected, found))
    if len(wanted) != len(got) or not wanted:
        return None
    return max(abs(a - b) / max(abs(a), 0.1) for a, b in zip(wanted, got, strict=True))


def try_out(path: Path, env: dict[str, str]) -> dict[str, Any]:
    """One program, in four runs."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"] if path.stem in DISTRIBUTED else []
    program = [*start, str(path)]
    plain, again = run(program, env), run(program, env)
    cuda = run(["-m", "anytorch", "run", "--device", "cuda", *program], env)
    webgpu = run(["-m", "anytorch", "--json", "run", "--device", "webgpu", *program], env)
    report = webgpu["report"] or {}
    return {
        "plain": plain["status"],
        "plain_end": plain["end"],
        "plain_repeats": plain["lines"] == again["lines"],
        "cuda": cuda["status"],
        "cuda_equal": cuda["lines"] == plain["lines"],
        "webgpu": webgpu["status"],
        "webgpu_most_apart": most_apart(plain["lines"], webgpu["lines"]),
        "webgpu_lines": webgpu["lines"],
        "plain_lines": plain["lines"],
        "webgpu_on_cpu": report.get("on_cpu"),
        "webgpu_device_seconds": report.get("device_seconds"),
        "webgpu_end": webgpu["end"],
        "seconds": [plain["seconds"], cuda["seconds"], webgpu["seconds"]],
    }


def speed(env: dict[str, str], scratch: Path) -> dict[str, Any]:
    """The same loop by `python` and by `anytorch run --device cuda`, in turns."""
    loop = scratch / "loop.py"
    loop.write_text(LOOP)
    times: dict[str, list[float]] = {"plain": [], "run": []}
    losses = set()
    for number in range(ROUNDS):
        for way in ("plain", "run") if number % 2 else ("run", "plain"):
            start = ["-m", "anytorch", "run", "--device", "cuda"] if way == "run" else []
            done = subprocess.run(
                [sys.executable, *start, str(loop)], env=env, capture_output=True, text=True, check=True
            )
            seconds, *found = done.stdout.split()
            times[way].append(float(seconds))
            losses.add(tuple(found))
    medians = {way: statistics.median(found) for way, found in times.items()}
    return {"seconds": times, "median_ratio": medians["run"] / medians["plain"], "losses_bit_equal": len(losses) == 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=6)
    options = parser.parse_args()
    import torch

    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        env = environment(scratch)
        answer: dict[str, Any] = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA here",
        }
        if torch.cuda.is_available():
            answer["speed"] = speed(env, scratch)
            print(json.dumps(answer["speed"]), flush=True)
        wanted = options.only.split(",") if options.only else None
        paths = [path for path in sorted(PROGRAMS.glob("*.py")) if wanted is None or path.stem in wanted]
        with ThreadPoolExecutor(options.jobs) as pool:
            found = dict(
                zip([path.stem for path in paths], pool.map(lambda path: try_out(path, env), paths), strict=True)
            )
    answer["programs"] = found
    for name, told in found.items():
        short = {key: told[key] for key in ("plain", "cuda", "cuda_equal", "webgpu", "webgpu_most_apart", "seconds")}
        print(name, json.dumps(short), json.dumps(told["webgpu_on_cpu"]))
        if told["plain"] or told["webgpu"]:
            print((told["plain_end"] or told["webgpu_end"])[-900:])
    if options.output:
        options.output.write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
