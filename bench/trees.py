"""Two checkouts of anytorch beside each other: what a change of the code alone did to the times of five jobs.

    python bench/trees.py /path/to/the/old/checkout [--rounds 4] [--only embed …]

Each job runs in a fresh process of each tree in turn; answers of the two trees are compared first (a digest of the vectors,
the drawn candles, the outputs). Printed: the best time of each, and old / new (above 1: the new tree is faster). For the
ratios to other libraries see the job's own benchmark: the other side of those does not change with our code.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from provenance import provenance, write_results

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "bench" / "results" / "trees.json"

START = """
import hashlib, json, sys, time, warnings
warnings.simplefilter("ignore")
def best(work, rounds=7):
    found = []
    for _ in range(rounds):
        begun = time.perf_counter(); work(); found.append(time.perf_counter() - begun)
    return min(found)
def answer(times, *arrays):
    digest = hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()[:16]
    print("ANSWER " + json.dumps({"times": times, "digest": digest}), flush=True)
"""

JOBS = {
    "embed": """
import anytorch, torch
torch.set_num_threads(1)
texts = [f"{n} sentences about weather, prices and the {n % 7} seas" for n in range(600)]
times, vectors = {}, []
for quantization in (None, "int8"):
    engine = anytorch.ArrowEngine(device="cpu", quantization=quantization)
    vectors.append(engine.encode(texts))
    name = quantization or "float32"
    times[f"600 sentences, {name}"] = best(lambda: engine.encode(texts), 5)
    times[f"one sentence, {name}"] = best(lambda: [engine.encode(texts[0]) for _ in range(20)]) / 20
answer(times, *vectors)
""",
    "webgpu": """
import anytorch, torch
torch.manual_seed(0)
device = anytorch.enable("webgpu")
x, y = torch.randn(64, 64), torch.randn(64, 64)
a, b = x.to(device), y.to(device)
layer = torch.nn.LayerNorm(64).to(device)
def many(op, count=400):
    def work():
        before = time.process_time()
        for _ in range(count): op()
        spent.append((time.process_time() - before) / count)
        torch.webgpu.synchronize() if hasattr(torch, "webgpu") else None
    spent = []
    work(); spent.clear()
    for _ in range(7): work()
    return min(spent)
with torch.no_grad():
    ops = {"x + y": lambda: a + b, "x @ y": lambda: a @ b, "softmax": lambda: a.softmax(-1), "layer norm": lambda: layer(a),
           "x.sum(1)": lambda: a.sum(1), "cat": lambda: torch.cat([a, b])}
    times = {name: many(op) for name, op in ops.items()}
    answer(times, (a + b).cpu().numpy(), a.softmax(-1).cpu().numpy())
""",
    "tiers": """
import anytorch, tempfile, torch
torch.manual_seed(0); torch.set_num_threads(2)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24)))
x = torch.randn(64, 1024)
with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    anytorch.memory.fit(model, "cpu", device_budget=24 << 20, host_budget=48 << 20, disk=folder)
    made = model(x)
    answer({"a pass of 24 layers": best(lambda: model(x), 9)}, made.numpy())
    anytorch.memory.fitted(model).close()
""",
    "forecast": """
import anytorch, numpy as np, torch
torch.set_num_threads(2)
candles = anytorch.sample_candles(400, seed=1)
predictor = anytorch.load_predictor(device="cpu")
def forecast():
    return predictor.predict(candles, pred_len=12, sample_count=4, seed=1, verbose=False)
made = forecast()
drawn = np.ascontiguousarray(made[["open", "close"]].to_numpy("float64").round(4))
answer({"12 candles, 4 samples": best(forecast, 7)}, drawn)
""",
    "serve": """
import http.client, socket, subprocess, numpy as np
with socket.socket() as free:
    free.bind(("127.0.0.1", 0)); port = free.getsockname()[1]
command = [sys.executable, "-m", "anytorch", "serve", "--port", str(port), "--device", "cpu"]
service = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
body = json.dumps({"input": ["a sentence about prices"] * 4, "model": "all-MiniLM-L6-v2"})
def ask(connection):
    connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    read = reply.read()
    assert reply.status == 200, read[:300]
    return json.loads(read)["data"][0]["embedding"]
try:
    for _ in range(300):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port); vector = ask(connection); break
        except (OSError, AssertionError) as exc:
            time.sleep(0.2); said = exc
    else:
        raise SystemExit(f"the service did not answer: {said}")
    answer({"POST of 4 sentences": best(lambda: [ask(connection) for _ in range(50)], 7) / 50}, np.float32(vector))
finally:
    service.terminate(); service.wait()
""",
    "info": """
import resource, subprocess, numpy as np
def spent():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
def once(*words):
    before = spent()
    subprocess.run([sys.executable, "-m", "anytorch", *words], stdout=subprocess.DEVNULL, check=True)
    return spent() - before
answer({f"anytorch {word}": min(once(word) for _ in range(9)) for word in ("info", "--help")}, np.zeros(1))
""",
}


def run(tree: Path, script: str) -> dict[str, object]:
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree / 'compat' / 'src'}"}
    done = subprocess.run(
        [sys.executable, "-c", START + script], cwd="/", env=environment, capture_output=True, text=True, timeout=600
    )
    for line in done.stdout.splitlines():
        if line.startswith("ANSWER "):
            found: dict[str, object] = json.loads(line.removeprefix("ANSWER "))
            return found
    raise SystemExit(f"{tree}: no answer\n{done.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--output", type=Path, default=RESULT)
    asked = parser.parse_args()
    trees = {"old": asked.old.resolve(), "new": ROOT}
    rows = []
    for job in asked.only:
        times: dict[str, dict[str, float]] = {"old": {}, "new": {}}
        digests = {}
        for _ in range(asked.rounds):
            for name, tree in trees.items():
                found = run(tree, JOBS[job])
                digests[name] = found["digest"]
                for what, seconds in found["times"].items():  # type: ignore[attr-defined]
                    times[name][what] = min(seconds, times[name].get(what, seconds))
        same = digests["old"] == digests["new"]
        for what, old in times["old"].items():
            new = times["new"][what]
            rows.append({"job": job, "what": what, "old_s": old, "new_s": new, "ratio": old / new, "same answer": same})
            said = "same answer" if same else "ANOTHER ANSWER"
            print(f"{job:9} {what:26} {old * 1e6:10.1f} µs {new * 1e6:10.1f} µs  {old / new:5.2f}  {said}", flush=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=trees["old"], capture_output=True, text=True, check=True)
    body = {**provenance(), "old commit": head.stdout.strip(), "rounds": asked.rounds, "rows": rows}
    write_results(asked.output, body)


if __name__ == "__main__":
    main()
