"""The webgpu device beside tinygrad's WEBGPU runtime (Dawn) on the same adapter: one run, processes interleaved.

    pip install tinygrad dawn-python            # or name another interpreter that has them: --python
    python bench/webgpu_peers.py [--rounds 5] [--python PEER_PYTHON] [--output bench/results/webgpu-peers.json]

Work, in float32, each answer checked against NumPy before the clock: one small addition at a time; a product of 256 × 256; a
two-layer perceptron, batch 32, as a user writes it (eager here, realized per call there) and at its best (a recorded graph
here, TinyJit there). Times are the best of several windows, results synchronised; CPU time is of the whole process.
What it does not show: a real GPU (both then wait for Python), other shapes, training, compile times.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from provenance import provenance, write_results

COMMON = """
import json, sys, time
import numpy as np
rng = np.random.default_rng(0)
A, B = rng.standard_normal((64, 64)).astype("f4"), rng.standard_normal((64, 64)).astype("f4")
M = rng.standard_normal((256, 256)).astype("f4")
X, W, V = (rng.standard_normal(s).astype("f4") / 20 for s in ((32, 784), (784, 512), (512, 10)))
WANT = {"add": A + B, "matmul": M @ M, "mlp": np.maximum(X @ W, 0) @ V}
def check(name, got):
    error = float(np.abs(got - WANT[name]).max() / np.abs(WANT[name]).max())
    assert error < 1e-4, (name, error)
def timed(work, wait, calls):
    for _ in range(3): work()
    wait()
    best = (9e9, 9e9)
    for _ in range(5):
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls): work()
        wait()
        best = min(best, ((time.perf_counter() - wall) / calls, (time.process_time() - cpu) / calls))
    return {"wall_us": best[0] * 1e6, "cpu_us": best[1] * 1e6}
"""

OURS = (
    COMMON
    + """
import torch, anytorch.webgpu
torch.set_grad_enabled(False)
a, b, m, x, w, v = (torch.from_numpy(t).to("webgpu") for t in (A, B, M, X, W, V))
mlp = lambda: torch.relu(x @ w) @ v
check("add", (a + b).cpu().numpy()); check("matmul", (m @ m).cpu().numpy()); check("mlp", mlp().cpu().numpy())
graph = torch.webgpu.Graph()
with graph: y = mlp()
graph.replay(); check("mlp", y.cpu().numpy())
wait = torch.webgpu.synchronize
print(json.dumps({"add": timed(lambda: a + b, wait, 200), "matmul": timed(lambda: m @ m, wait, 10),
  "mlp": timed(mlp, wait, 20), "mlp, recorded": timed(graph.replay, wait, 20)}))
"""
)

TINYGRAD = (
    COMMON
    + """
from tinygrad import Device, Tensor, TinyJit
a, b, m, x, w, v = (Tensor(t).realize() for t in (A, B, M, X, W, V))
mlp = lambda: ((x @ w).relu() @ v).realize()
jit = TinyJit(lambda x: ((x @ w).relu() @ v).realize())
check("add", (a + b).numpy()); check("matmul", (m @ m).numpy()); check("mlp", mlp().numpy())
for _ in range(3): y = jit(x)
check("mlp", y.numpy())
wait = Device[Device.DEFAULT].synchronize
print(json.dumps({"add": timed(lambda: (a + b).realize(), wait, 50), "matmul": timed(lambda: (m @ m).realize(), wait, 10),
  "mlp": timed(mlp, wait, 10), "mlp, recorded": timed(lambda: jit(x), wait, 20)}))
"""
)


def run(python: str, code: str, env: dict[str, str]) -> dict[str, dict[str, float]]:
    done = subprocess.run([python, "-W", "ignore", "-c", code], capture_output=True, text=True, env=env, timeout=300)
    if done.returncode:
        raise SystemExit(
            f"{python} failed:\n{done.stderr[-1500:]}\nis tinygrad there? pip install tinygrad dawn-python"
        )
    answer: dict[str, dict[str, float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", default=sys.executable, help="an interpreter with tinygrad and dawn-python")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    env = dict(os.environ)
    suffix = "dylib" if sys.platform == "darwin" else "so"
    pattern = f"/lib/*{platform.machine()}.{suffix}"
    finder = f"import pydawn, glob, os; print(glob.glob(os.path.dirname(pydawn.__file__) + {pattern!r})[0])"
    found = subprocess.run([options.python, "-c", finder], capture_output=True, text=True)
    library = found.stdout.strip()
    peer_env = {**env, "DEV": "WEBGPU", **({"WEBGPU_PATH": library} if library else {})}
    best: dict[str, dict[str, dict[str, float]]] = {"anytorch": {}, "tinygrad": {}}
    for _ in range(options.rounds):
        for name, python, code, where in (
            ("anytorch", sys.executable, OURS, env),
            ("tinygrad", options.python, TINYGRAD, peer_env),
        ):
            for work, times in run(python, code, where).items():
                known = best[name].setdefault(work, times)
                best[name][work] = {unit: min(known[unit], times[unit]) for unit in times}
    print(f"{'work':16} {'anytorch':>22} {'tinygrad WEBGPU':>22} {'ratio':>14}")
    print(f"{'':16} {'wall / CPU (µs)':>22} {'wall / CPU (µs)':>22} {'wall / CPU':>14}")
    for work, ours in best["anytorch"].items():
        theirs = best["tinygrad"][work]
        pair = [f"{t['wall_us']:10.1f} /{t['cpu_us']:10.1f}" for t in (ours, theirs)]
        ratio = f"{theirs['wall_us'] / ours['wall_us']:.1f} / {theirs['cpu_us'] / ours['cpu_us']:.1f}"
        print(f"{work:16} {pair[0]:>22} {pair[1]:>22} {ratio:>14}")
    if options.output:
        write_results(options.output, {**provenance(), "best": best, "rounds": options.rounds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
