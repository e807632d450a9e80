"""Embeddings on the CPU: anytorch beside its peers, on real sentences and long passages, with what each costs.

Every contender runs in a process of its own, pinned to one core and then to two, and is started anew in every round;
rounds are interleaved. The texts (`corpus.py`: 2,000 sentences, 200 passages of 200 to 400 tokens, cut at the model's 256)
are dealt out over the rounds, the same share to every contender, so that accuracy covers all of them. Reported:

- sentences/s, passages/s and their ratio to sentence-transformers in the same round (medians over the rounds);
- CPU time per text, user + system: the honest figure on a machine that others use, too;
- the share of the cores' float32 GEMM peak (measured in the same rounds) that the model's own arithmetic makes, without
  padding; integer kernels can pass 100 %;
- cosine to sentence-transformers' float32 vectors, mean and minimum, over all texts;
- the worst cosine of a text alone with itself in a call with 63 others;
- peak resident memory (VmHWM) and process start to first vector.

python bench/embed_cpu.py                    everything, about 10 minutes on two quiet cores; continues where it was stopped
python bench/embed_cpu.py --only anytorch    measure these again (a part of the name; may be repeated), keep the others
python bench/embed_cpu.py --quick            one round, a sixth of the texts
python bench/embed_cpu.py --fresh            the run that is published: forget earlier ones
python bench/embed_cpu.py --install          make the peers' virtual environments under .cache/embed_peers first
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import corpus
from embed_cpu_child import CONTENDERS
from embed_cpu_report import KINDS, REFERENCE, apart, show, targets
from provenance import provenance, write_results

ROOT = Path(__file__).parents[1]
WORK = ROOT / ".cache" / "embed_cpu"
TIMEOUT_S = 300
# Two environments beside the first: sentence-transformers 6 cannot use its own ONNX back end (optimum-onnx has no
# transformers 5), and infinity pins sentence-transformers below 4.
PEERS = {
    "main": [
        "torch",
        "sentence-transformers",
        "onnx",
        "onnxruntime",
        "onnxscript",
        "openvino",
        "nncf",
        "fastembed",
        "ctranslate2",
    ],
    "backends": ["torch", "sentence-transformers[onnx,openvino]<6", "transformers<5"],
    "infinity": ["torch", "infinity-emb[torch]"],
}
PREPARE = {"onnx": "main", "openvino": "main", "ctranslate2": "main", "backends": "backends"}


# --- getting ready -------------------------------------------------------------------------------------------------


def python_of(peers: Path, name: str) -> Path:
    return Path(sys.executable) if name == "own" else peers / name / "bin" / "python"


def install(peers: Path) -> None:
    pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    torch_pin = next(line for line in pins if line.startswith("torch=="))  # without it pip brings gigabytes of CUDA
    for name, packages in PEERS.items():
        if not python_of(peers, name).exists():
            print(f"making {peers / name}", file=sys.stderr)
            subprocess.run([sys.executable, "-m", "venv", peers / name], check=True)
        subprocess.run([python_of(peers, name), "-m", "pip", "install", "--quiet", torch_pin, *packages], check=True)


def prepare(peers: Path, model: Path) -> None:
    for step, environment in PREPARE.items():
        output = WORK / step
        done = output / "prepared.json"
        if done.exists() and json.loads(done.read_text()) == str(model):
            continue
        if python_of(peers, environment).exists():
            print(f"preparing {step}", file=sys.stderr)
            script = ROOT / "bench" / "embed_cpu_prepare.py"
            command = [python_of(peers, environment), script, step, model, output]
            output.parent.mkdir(parents=True, exist_ok=True)
            finished = subprocess.run(command, capture_output=True, text=True, check=False)
            if finished.returncode:
                raise SystemExit(f"{step} could not be prepared:\n{finished.stderr[-3000:]}")
            done.write_text(json.dumps(str(model)))


def compile_ours(model: Path) -> dict[str, float]:
    """Seconds to the first vector where nothing was compiled yet, once per machine and clone (wheels carry the kernels);
    and then everything compiled, since that is not what process start to first vector is about."""
    found = {}
    for quantization in (None, "int8"):
        code = f"from anytorch import ArrowEngine; ArrowEngine({str(model)!r}, 'cpu', {quantization!r}).encode('x')"
        with tempfile.TemporaryDirectory() as empty:
            for cache in (empty, None):
                variables = {**os.environ, **({} if cache is None else {"ANYTORCH_CACHE_DIR": cache})}
                began = time.perf_counter()
                finished = subprocess.run(
                    [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False
                )
                if cache is not None:
                    found[quantization or "fp32"] = round(time.perf_counter() - began, 2)
        if finished.returncode:
            print(f"anytorch with quantization={quantization} failed:\n{finished.stderr[-1000:]}", file=sys.stderr)
    return found


def versions(peers: Path) -> dict[str, dict[str, str]]:
    wanted = ["anytorch", "torch", "sentence-transformers", "transformers", "onnxruntime", "openvino", "fastembed"]
    wanted += ["ctranslate2", "infinity-emb", "optimum-onnx", "optimum-intel", "tokenizers", "numpy"]
    code = (
        "import importlib.metadata as m, json, sys\nfound = {}\nfor n in sys.argv[1:]:\n"
        " try: found[n] = m.version(n)\n except m.PackageNotFoundError: pass\nprint(json.dumps(found))"
    )
    found = {}
    for name in ("own", *PEERS):
        if python_of(peers, name).exists():
            told = subprocess.run(
                [python_of(peers, name), "-c", code, *wanted], capture_output=True, text=True, check=True
            )
            found[name] = json.loads(told.stdout)
    return found


# --- running -------------------------------------------------------------------------------------------------------


class Runs:
    """Finished runs, one JSON line each, so that an interrupted benchmark goes on where it was."""

    def __init__(self, path: Path, plan: str) -> None:
        self.path, self.plan = path, plan
        self.found: dict[tuple[str, int, int], dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                run = json.loads(line)
                if run["plan"] == plan:
                    self.found[run["name"], run["cores"], run["round"]] = run

    def add(self, name: str, cores: int, turn: int, **what: Any) -> None:
        run = {"plan": self.plan, "name": name, "cores": cores, "round": turn, "at": time.time(), **what}
        self.found[name, cores, turn] = run
        with self.path.open("a") as file:
            file.write(json.dumps(run) + "\n")


def run_child(name: str, cores: list[int], python: Path, job: dict[str, Any]) -> dict[str, Any]:
    """What the child answered, or {"error": …}: one contender that fails must not end the others' run."""
    answer, described = WORK / "answer.json", WORK / "job.json"
    answer.unlink(missing_ok=True)
    described.write_text(json.dumps({**job, "answer": str(answer), "cores": cores}))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "MKL_", "PYTHON"))}
    command = [python, ROOT / "bench" / "embed_cpu_child.py", name, described, repr(time.monotonic())]
    try:
        finished = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not finished after {TIMEOUT_S} s"}
    if not answer.exists():
        lines = [line for line in finished.stderr.splitlines() if line.strip()]
        return {"error": f"exit status {finished.returncode}: {lines[-1] if lines else 'nothing said'}"[:500]}
    told: dict[str, Any] = json.loads(answer.read_text())
    return told


def measure(options: argparse.Namespace, texts: dict[str, list[str]], runs: Runs, names: list[str]) -> None:
    slots = [(cores, turn) for turn in range(options.rounds) for cores in options.cores]
    allowed = sorted(os.sched_getaffinity(0))
    parts = len(slots) * (6 if options.quick else 1)
    again = set(names) if options.only else set()
    for number, (cores, turn) in enumerate(slots):
        share = WORK / "texts.json"
        share.write_text(json.dumps({kind: texts[kind][number::parts] for kind in KINDS}))
        # The order turns with the round, so that nobody always follows the same neighbour.
        for name in ["gemm", *names[turn % len(names) :], *names[: turn % len(names)]]:
            if cores == 1 and name.endswith("processes"):
                continue  # the same thing with one core
            if name in again or (name, cores, turn) not in runs.found:
                environment = "own" if name == "gemm" else CONTENDERS[name][0]
                job = {
                    "model": str(options.model),
                    "work": str(WORK),
                    "texts": str(share),
                    "vectors": str(WORK / "vectors" / f"{runs.plan}-{name.replace(' ', '_')}-{number}"),
                    "together": turn == 0 and cores == max(options.cores),
                }
                told = run_child(name, allowed[:cores], python_of(options.peers, environment), job)
                runs.add(name, cores, turn, part=number, parts=parts, load=os.getloadavg()[0], answer=told)
                print(f"round {turn + 1}, {cores} cores, {name}: {summary(told)}", file=sys.stderr)


def summary(told: dict[str, Any]) -> str:
    if "error" in told:
        return f"failed: {told['error']}"
    if "gemm_gflops" in told:
        return f"{told['gemm_gflops']:.0f} GFLOP/s"
    rates = ", ".join(f"{told[kind]['count'] / told[kind]['wall_s']:.1f} {kind}/s" for kind in KINDS)
    return f"{rates}, {told['peak_rss_mb']:.0f} MB, first vector after {told['cold_s']:.1f} s"


# --- reporting -----------------------------------------------------------------------------------------------------


def report(options: argparse.Namespace, texts: dict[str, list[str]], runs: Runs) -> dict[str, Any]:
    flops = {
        kind: [text_flops(options.model, length) for length in lengths(options.model, texts[kind])] for kind in KINDS
    }
    tables = {}
    for cores in options.cores:
        peaks = [run["answer"].get("gemm_gflops", 0) for key, run in runs.found.items() if key[:2] == ("gemm", cores)]
        rows = {}
        for name in CONTENDERS:
            turns = [
                runs.found[name, cores, turn] for turn in range(options.rounds) if (name, cores, turn) in runs.found
            ]
            if turns:
                rows[name] = row(name, turns, runs, flops, max(peaks, default=0.0))
        tables[str(cores)] = {"gemm_gflops": max(peaks, default=None), "rows": rows}
    return {
        "benchmark": "embed_cpu",
        **provenance(),
        "versions_of_each": versions(options.peers),
        "texts": {kind: {"count": len(texts[kind]), "checksum": corpus.checksum(texts[kind])} for kind in KINDS},
        "model": options.model.name if options.model.name != "model" else options.model.parent.name,
        "rounds": options.rounds,
        "first_vector_with_compiling_s": options.compile_s,
        "quick": options.quick,
        "cores": tables,
        "targets": targets(tables),
    }


def row(
    name: str, turns: list[dict[str, Any]], runs: Runs, flops: dict[str, list[float]], peak: float
) -> dict[str, Any]:
    good = [turn for turn in turns if "error" not in turn["answer"]]
    if not good:
        return {"error": turns[-1]["answer"]["error"]}
    found: dict[str, Any] = {"rounds": len(good), "load": round(statistics.median(turn["load"] for turn in good), 1)}
    found["measured"] = [
        datetime.fromtimestamp(f(t["at"] for t in good), timezone.utc).isoformat(timespec="seconds") for f in (min, max)
    ]
    for kind in KINDS:
        rates, cpu, shares, ratios, cpu_ratios, cosines = [], [], [], [], [], []
        for turn in good:
            told = turn["answer"][kind]
            rates.append(told["count"] / told["wall_s"])
            cpu.append(1e3 * told["cpu_s"] / told["count"])
            work = sum(flops[kind][turn["part"] :: turn["parts"]])
            shares.append(work / told["wall_s"] / 1e9 / peak if peak else 0.0)
            beside = runs.found.get((REFERENCE, turn["cores"], turn["round"]), {}).get("answer", {"error": ""})
            if "error" not in beside:
                ratios.append(beside[kind]["wall_s"] / told["wall_s"])
                cpu_ratios.append(beside[kind]["cpu_s"] / told["cpu_s"])
                cosines += cosine(runs.plan, name, turn["part"], kind)
        found[kind] = {"per_s": middle(rates), "ratio": middle(ratios), "cpu_ms": middle(cpu)}
        found[kind] |= {"cpu_ratio": middle(cpu_ratios), "share_of_peak": middle(shares)}
        if cosines:
            found[kind] |= {"cosine_mean": round(statistics.fmean(cosines), 7), "cosine_min": round(min(cosines), 7)}
    alone = [turn["answer"] for turn in good if "alone_cosine_min" in turn["answer"]]
    if alone:
        found["alone_cosine_min"] = round(min(answer["alone_cosine_min"] for answer in alone), 7)
        found["alone_identical"] = all(answer["alone_identical"] for answer in alone)
    for figure in ("peak_rss_mb", "cold_s", "cold_cpu_s"):
        found[figure] = middle([turn["answer"][figure] for turn in good])
    return found


def middle(values: list[float]) -> float | None:
    return float(f"{statistics.median(values):.4g}") if values else None


def cosine(plan: str, name: str, part: int, kind: str) -> list[float]:
    import numpy

    folder = WORK / "vectors"
    pair = [numpy.load(folder / f"{plan}-{who.replace(' ', '_')}-{part}-{kind}.npy") for who in (name, REFERENCE)]
    ours, theirs = (vectors / numpy.linalg.norm(vectors, axis=1, keepdims=True) for vectors in pair)
    similar: list[float] = (ours.astype(numpy.float64) * theirs).sum(1).tolist()
    return similar


def lengths(model: Path, texts: list[str]) -> list[int]:
    tokenizer = tokenizer_of(model)
    tokenizer.enable_truncation(256)
    return [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)]


def tokenizer_of(model: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def text_flops(model: Path, tokens: int) -> float:
    """Multiplications and additions of the layers' products for one text, no padding, embeddings and norms left out."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    linear = 2.0 * tokens * (4 * hidden * hidden + 2 * hidden * inner)
    return float(config["num_hidden_layers"] * (linear + 4.0 * tokens * tokens * hidden))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="contenders whose name has this part; again")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2])
    parser.add_argument("--quick", action="store_true", help="one round, a sixth of the texts")
    parser.add_argument("--fresh", action="store_true", help="forget finished runs")
    parser.add_argument("--install", action="store_true", help="make the peers' environments first")
    parser.add_argument("--peers", type=Path, default=ROOT / ".cache" / "embed_peers", metavar="FOLDER")
    parser.add_argument("--model", type=Path, help="a sentence-transformers folder; the embedded MiniLM when left out")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "embed-cpu.json", metavar="FILE")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    if options.model is None:
        from anytorch.text.checkpoints.locate import find_model

        options.model = find_model(None)
    (WORK / "vectors").mkdir(parents=True, exist_ok=True)
    if options.install:
        install(options.peers)
    prepare(options.peers, options.model)
    options.compile_s = compile_ours(options.model)
    here = [name for name, (environment, _) in CONTENDERS.items() if python_of(options.peers, environment).exists()]
    missing = sorted(set(CONTENDERS) - set(here))
    if missing:
        print(
            f"left out, their environments are not in {options.peers} (--install): {', '.join(missing)}",
            file=sys.stderr,
        )
    names = [name for name in here if not options.only or any(part in name for part in options.only)]
    tokenizer = tokenizer_of(options.model)
    texts = {
        "sentences": corpus.sentences(2000),
        "passages": corpus.passages(200, count_tokens=lambda text: len(tokenizer.encode(text).ids)),
    }
    everything = corpus.checksum([*texts["sentences"], *texts["passages"], str(options.model)])
    plan = f"{everything}-{options.rounds}{'q' if options.quick else ''}"
    path = WORK / "runs.jsonl"
    if options.fresh:
        path.unlink(missing_ok=True)
    runs = Runs(path, plan)
    measure(options, texts, runs, names)
    result = report(options, texts, runs)
    show(result)
    write_results(options.output, result)
    print(f"\nwritten to {options.output}", file=sys.stderr)
    if late := apart(result):
        print(f"not interleaved with {REFERENCE}, measured at another time: {', '.join(late)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
