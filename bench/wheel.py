"""The kernels that a wheel carries beside those that this machine's own compiler makes, and the first vector.

    make dist && python bench/wheel.py [--repeats 5] [--output bench/results/wheel.json]

The wheel is installed into an environment of its own; packages that it depends on are lent by this one. Both kinds of kernel
are then run by the same installation, in turns, each time in a new process: `ANYTORCH_CARRIED_KERNELS` chooses. Times are
CPU time of one thread (the machine may be busy), the least of all repeats; the answers of the two are compared first.

`first vector` is the time from the start of a process to its first vector: with an empty cache, no compiler on PATH, and
byte code that pip has compiled, as it does. Wall time, so that it depends on the load, which the result names.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from provenance import provenance, write_results

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 0.6
JOBS = """
import json, sys, time
def least(work, repeats=7):
    times = []
    for _ in range(repeats):
        began = time.process_time(); work(); times.append(time.process_time() - began)
    return min(times)
import numpy as np
from anytorch.text.embed import ArrowEngine
found, answers = {}, {}
texts = [f"{word} number {i} of the texts that are measured here, with a few more words so that it has a usual length"
         for i, word in enumerate(["sentence", "kernel", "river", "market"] * 25)]
for kind in (None, "int8", "int4"):
    with ArrowEngine(device="cpu", threads=1, quantization=kind) as engine:
        answers[f"embed {kind or 'float32'}"] = engine.encode(texts[:8]).tolist()
        found[f"embed {kind or 'float32'}"] = least(lambda: engine.encode(texts))
import torch
torch.set_num_threads(1)
from anytorch.quant.kernels import cpp
from anytorch import quant
torch.manual_seed(0)
for name in ("int8", "int4"):
    packed = torch.nn.Sequential(torch.nn.Linear(1024, 1024))
    quant.quantize(packed, name)
    for rows in (1, 64):
        x = torch.randn(rows, 1024)
        with torch.inference_mode():
            answers[f"linear {name} {rows}"] = packed(x)[:, :8].flatten().tolist()
            found[f"linear {name}, {rows} rows"] = least(lambda: [packed(x) for _ in range(20)])
print(json.dumps({"seconds": found, "answers": answers}))
"""
FIRST = """
import time, sys
from anytorch.text.embed import ArrowEngine
with ArrowEngine(device="cpu") as engine:
    engine.encode("the first text")
    print(time.time())
"""


def environment(folder: Path, wheel: Path) -> Path:
    """A new environment with the wheel; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    install = ["install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    return python


def run(python: Path, code: str, cache: Path, **variables: str) -> Any:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ANYTORCH_"))}
    whole = {**kept, "ANYTORCH_CACHE_DIR": str(cache), "HF_HUB_OFFLINE": "1", **variables}
    done = subprocess.run([str(python), "-c", code], env=whole, cwd=cache, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def first_vector(python: Path, folder: Path) -> float:
    """Seconds from the start of a process to the first vector of an installation that has never run."""
    import time

    with tempfile.TemporaryDirectory(dir=folder) as cache:
        began = time.time()
        ended: float = run(python, FIRST, Path(cache), PATH=str(python.parent))
    return ended - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--wheel", type=Path, help="default: the one for Linux on x86-64 in dist/")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    wheel = options.wheel or next((ROOT / "dist").glob("*manylinux*x86_64.whl"), None)
    if wheel is None:
        raise SystemExit("there is no wheel in dist/: run `make dist`")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        python = environment(folder / "env", wheel)
        (folder / "cache").mkdir()
        kinds = {"carried": "1", "compiled here": "0"}
        results: dict[str, list[Any]] = {kind: [] for kind in kinds}
        for _ in range(options.repeats):
            for kind, value in kinds.items():
                results[kind].append(run(python, JOBS, folder / "cache", ANYTORCH_CARRIED_KERNELS=value))
        firsts = [first_vector(python, folder) for _ in range(options.repeats + 2)]
    least = {
        kind: {name: min(one["seconds"][name] for one in ran) for name in ran[0]["seconds"]}
        for kind, ran in results.items()
    }
    off = max(
        abs(a - b)
        for name, ours in results["carried"][0]["answers"].items()
        for a, b in zip(flat(ours), flat(results["compiled here"][0]["answers"][name]), strict=True)
    )
    if off > 1e-3:
        raise SystemExit(f"the two compute different answers: off by {off:.1e}")
    ratios = {name: least["carried"][name] / least["compiled here"][name] for name in least["carried"]}
    for name, ratio in ratios.items():
        ours, theirs = (f"{1e3 * least[kind][name]:8.2f} ms {kind}" for kind in kinds)
        print(f"{name:22} {ours}  {theirs}  {ratio:.2f}")
    middle = sorted(firsts)[len(firsts) // 2]
    print(
        f"answers differ by at most {off:.1e}; first vector after {min(firsts):.2f} s at best, usually {middle:.2f} s"
    )
    document = {
        **provenance(),
        "wheel": wheel.name,
        "nbytes": wheel.stat().st_size,
        "cpu_seconds": least,
        "carried_over_compiled": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "largest_difference": off,
        "first_vector_s": [round(one, 3) for one in firsts],
        "first_vector_limit_s": LIMIT_S,
    }
    if options.output:
        write_results(options.output, document)


def flat(value: Any) -> list[float]:
    return [one for part in value for one in flat(part)] if isinstance(value, list) else [value]


if __name__ == "__main__":
    main()
