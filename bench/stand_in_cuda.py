"""The stand-in on a machine that has CUDA: `--device cuda` changes nothing, `--device webgpu` beside CUDA computes the same.

python bench/stand_in_cuda.py [--seconds 120] [--output bench/results/stand-in-h200.json]

The programs of tests/run/programs run one after the other in one process, by `python` twice, by `anytorch run --device
cuda`, and by `anytorch run --device webgpu --json`, the four at once. What they print with CUDA must be the same to the byte
under `anytorch run --device cuda` (where two plain runs agree); on webgpu the numbers must be near, and the report says what
the CPU computed. Then a training loop is timed by `python` and by `anytorch run --device cuda`, in turns, as long as there
is time. What is known is written and printed as it comes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from provenance import provenance, write_results

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "tests" / "run" / "programs"
# The most telling first; those that start processes of their own or need other packages are left out.
FIRST = ("old_style", "gan", "lstm_lm", "vit", "checkpoints", "amp_accumulation", "streams", "graphs", "seq2seq")
NAMES = (*FIRST, "diffusion", "segmentation", "devices", "dqn", "transforms", "lora", "optional_packages", "profiled")
NUMBER = re.compile(r"-?\d+\.?\d*(?:[eE][-+]?\d+)?")
ROUNDS = 3
MANY = """
import contextlib, io, json, os, runpy, sys, time, traceback
folder, names, sys.argv = sys.argv[1], sys.argv[2:], sys.argv[:1]
import torch
torch.set_num_threads(2)
for name in names:
    printed, began, failed = io.StringIO(), time.time(), ""
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(os.path.join(folder, name + ".py"), run_name="__main__")
    except BaseException as error:
        failed = "".join(traceback.format_exception(error))[-700:]
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("= ")]
    print(json.dumps({"name": name, "lines": lines, "failed": failed, "s": round(time.time() - began, 1)}), flush=True)
"""
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


def start(way: str, names: Sequence[str], env: dict[str, str], scratch: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """All programs in one process, in one of the four ways; its standard output is a file."""
    many, output = scratch / "many.py", scratch / way
    many.write_text(MANY)
    device = way.partition("-")[0]
    line = [] if device == "plain" else ["-m", "anytorch", "--json", "run", "--device", device]
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *line, str(many), str(PROGRAMS), *names], env=env, stdout=file, stderr=subprocess.STDOUT
        )
    return process, output


def read(output: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Programs by name, and the report, as far as they are there."""
    programs: dict[str, Any] = {}
    report: dict[str, Any] = {}
    for line in output.read_text(errors="replace").splitlines():
        if line.startswith('{"name"'):
            found = json.loads(line)
            programs[found["name"]] = found
        elif line.startswith('{"device"'):
            report = json.loads(line)
    return programs, report


def most_apart(expected: list[str], found: list[str]) -> float | None:
    """The greatest relative difference of the numbers in two lists of lines; None if there are not as many."""
    wanted, got = ([float(number) for line in lines for number in NUMBER.findall(line)] for lines in (expected, found))
    if len(wanted) != len(got) or not wanted:
        return None
    return max(abs(a - b) / max(abs(a), 0.1) for a, b in zip(wanted, got, strict=True))


def compare(ways: dict[str, Path]) -> dict[str, Any]:
    """What is known so far, program by program."""
    found = {way: read(output) for way, output in ways.items()}
    programs: dict[str, Any] = {}
    for name in NAMES:
        told = {way: document[0].get(name) for way, document in found.items()}
        plain = told["plain"]
        if plain is None:
            continue
        entry: dict[str, Any] = {
            "plain": plain["failed"] or "ran",
            "plain_lines": plain["lines"],
            "plain_s": plain["s"],
        }
        if (again := told.get("plain-again")) is not None:
            entry["plain_repeats"] = again["lines"] == plain["lines"]
        if (cuda := told.get("cuda")) is not None:
            entry["cuda_equal"] = cuda["lines"] == plain["lines"] and cuda["failed"] == plain["failed"]
        if (other := told.get("webgpu")) is not None:
            entry.update(webgpu=other["failed"] or "ran", webgpu_lines=other["lines"], webgpu_s=other["s"])
            entry["webgpu_most_apart"] = most_apart(plain["lines"], other["lines"])
        programs[name] = entry
    report = found["webgpu"][1]
    kept = ("device", "name", "on_cpu", "device_seconds", "seconds", "cpu_seconds", "peak_memory", "refused")
    return {"programs": programs, "webgpu_report": {key: report[key] for key in kept if key in report}}


def speed(env: dict[str, str], scratch: Path, end: float) -> dict[str, Any]:
    """The same loop by `python` and by `anytorch run --device cuda`, in turns."""
    loop = scratch / "loop.py"
    loop.write_text(LOOP)
    times: dict[str, list[float]] = {"plain": [], "run": []}
    losses = set()
    for number in range(ROUNDS):
        if time.monotonic() > end - 15:
            break
        for way in ("plain", "run") if number % 2 else ("run", "plain"):
            by = ["-m", "anytorch", "run", "--device", "cuda"] if way == "run" else []
            done = subprocess.run([sys.executable, *by, str(loop)], env=env, capture_output=True, text=True, check=True)
            seconds, *found = done.stdout.split()
            times[way].append(float(seconds))
            losses.add(tuple(found))
    if not times["run"]:
        return {"seconds": times}
    medians = {way: statistics.median(found) for way, found in times.items()}
    return {"seconds": times, "median_ratio": medians["run"] / medians["plain"], "losses_bit_equal": len(losses) == 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--only", default=",".join(NAMES))
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    answer: dict[str, Any] = {}
    shown: set[str] = set()

    def tell(ways: dict[str, Path]) -> None:
        answer.update(compare(ways))
        for name, entry in answer["programs"].items():
            if name not in shown and "webgpu" in entry:
                shown.add(name)
                print(name, json.dumps(entry)[:1500], flush=True)
        if options.output:
            write_results(options.output, {**provenance(), **answer})

    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        env = environment(scratch)
        ways = {
            way: start(way, options.only.split(","), env, scratch) for way in ("webgpu", "plain", "cuda", "plain-again")
        }
        outputs = {way: output for way, (_, output) in ways.items()}
        try:
            while time.monotonic() < end - 35 and any(process.poll() is None for process, _ in ways.values()):
                time.sleep(1)
                tell(outputs)
        finally:
            for process, _ in ways.values():
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        tell(outputs)
        print(json.dumps(answer["webgpu_report"]), flush=True)
        if not answer["webgpu_report"]:
            print(outputs["webgpu"].read_text(errors="replace")[-2500:], flush=True)
        answer["speed"] = speed(env, scratch, end)
        print(json.dumps(answer["speed"]), flush=True)
        tell(outputs)


if __name__ == "__main__":
    main()
