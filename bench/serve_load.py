"""The service under attack and overload: what a server must stand on a bad day.

1. Capacity: a closed loop of 32 clients.
2. Overload: requests come at twice that rate for `--minutes`, whoever answers or not. Every request must get a status;
   resident memory must stay flat; the p99 of the requests that were accepted must stay bounded.
3. Ten thousand malformed requests (schemathesis over the OpenAPI schema, and broken bytes): never a 500.

python bench/serve_load.py                    ten minutes of overload, ten thousand malformed requests: about 17 minutes
python bench/serve_load.py --minutes 1 --malformed 500 --output /tmp/serve-load.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import malformed
import numpy as np
from load import Run, Server, client_program, free_port, request_bytes, run_client, write_requests
from provenance import machine, provenance, write_results

from serve import mixed_texts, say

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench" / "results" / "serve-load.json"
CONNECTIONS = 4096  # of the overload: more than the service lets wait, so that what is refused is refused at once
FACTOR = 2.0
SAMPLE_S = 5.0


class Watch:
    """Resident memory of a server, every few seconds, until `stop`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stopped = threading.Event()
        self.samples: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        began = time.perf_counter()
        while not self._stopped.wait(SAMPLE_S):
            self.samples.append((time.perf_counter() - began, self._server.memory_nbytes("VmRSS")))

    def stop(self) -> dict[str, Any]:
        self._stopped.set()
        self._thread.join()
        times, sizes = np.array([s[0] for s in self.samples]), np.array([s[1] for s in self.samples], float)
        late = times >= times[-1] / 4 if len(times) else times > 0  # the first quarter fills caches and pools
        slope = float(np.polyfit(times[late], sizes[late], 1)[0]) * 60 if late.sum() >= 3 else 0.0
        return {
            "first_nbytes": int(sizes[0]) if len(sizes) else None,
            "last_nbytes": int(sizes[-1]) if len(sizes) else None,
            "most_nbytes": int(sizes.max()) if len(sizes) else None,
            "growth_nbytes_per_minute_after_first_quarter": round(slope),
            "samples": [[round(moment, 1), size] for moment, size in self.samples],
        }


def by_minute(run: Run) -> list[dict[str, Any]]:
    """Statuses and p99 of each minute: bounded means that the last is like the first."""
    rows = []
    for minute in range(int(run.records["due"].max() // 60) + 1 if len(run.records) else 0):
        part = run.records[run.records["due"] // 60 == minute]
        good = part[part["status"] == 200]["latency"]
        statuses, counts = np.unique(part["status"], return_counts=True)
        rows.append(
            {
                "statuses": {str(s): int(c) for s, c in zip(statuses, counts, strict=True)},
                "p50_ms": round(float(np.percentile(good, 50)) * 1e3, 1) if len(good) else None,
                "p99_ms": round(float(np.percentile(good, 99)) * 1e3, 1) if len(good) else None,
            }
        )
    return rows


def overload(server: Server, program: Path, requests: Path, minutes: float) -> dict[str, Any]:
    run_client(program, server.port, requests, connections=32, seconds=5)
    capacity = run_client(program, server.port, requests, connections=32, seconds=15).summary()
    rate = FACTOR * capacity["per_second"]
    say(f"capacity {capacity['per_second']:.1f}/s; overload at {rate:.1f}/s for {minutes:g} minutes")
    watch = Watch(server)
    run = run_client(
        program, server.port, requests, connections=CONNECTIONS, seconds=60 * minutes, rate=rate, timeout_s=120
    )
    memory = watch.stop()
    found = run.summary()
    refused = run.records[(run.records["status"] == 429) | (run.records["status"] == 503)]["latency"]
    found["refused_p99_ms"] = float(np.percentile(refused, 99)) * 1e3 if len(refused) else None
    found["lost_without_a_status"] = found["statuses"].get("0", 0)
    after = run_client(program, server.port, requests, connections=1, seconds=5).summary()
    return {
        "capacity": capacity,
        "offered_per_second": rate,
        "seconds": run.seconds,
        "result": found,
        "minutes": by_minute(run),
        "memory": memory,
        "afterwards_one_client": after,
    }


def attack(server: Server, count: int, seed: int) -> dict[str, Any]:
    base = f"http://127.0.0.1:{server.port}"
    with urllib.request.urlopen(f"{base}/openapi.json") as answer:
        schema = json.loads(answer.read())
    operations = sum("post" in methods for methods in schema["paths"].values())
    began = time.perf_counter()
    first = malformed.from_schema(base, schema, max(2, count // 2 // operations), seed=seed)
    say(f"{first.sent} requests from the schema: {len(first.wrong)} wrong answers")
    second = malformed.from_bytes(base, count - first.sent, seed=seed)
    say(f"{second.sent} broken bodies: {len(second.wrong)} wrong answers")
    wrong = first.wrong + second.wrong
    statuses = first.statuses + second.statuses
    return {
        "sent": first.sent + second.sent,
        "seconds": round(time.perf_counter() - began, 1),
        "status_500": sum(count for name, count in statuses.items() if name.endswith(" 500")),
        "wrong": wrong[:20],
        "wrong_count": len(wrong),
        "slowest_s": round(max(first.slowest_s, second.slowest_s), 3),
        "statuses": dict(sorted(statuses.items())),
        "ready_afterwards": server.is_ready(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--malformed", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--text-model", type=Path, help="a causal language model, so that completions are attacked, too"
    )
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "anytorch", "serve", "--port", str(port), "--no-browser"]
    command += ["--workers", str(options.workers)]
    if options.text_model:
        command += ["--text-model", str(options.text_model)]
    server = Server("anytorch", command, port, "/v1/embeddings", "/v1/readyz")
    # A part that is left out now stays as an earlier run has left it.
    report: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    report["what"] = __doc__

    def keep(name: str, found: dict[str, Any]) -> None:
        report[name] = {**provenance(), "machine": before, "workers": options.workers, **found}
        write_results(options.output, {**report, **provenance()})

    before = machine()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-serve-")))
        program = client_program(folder)
        stack.callback(server.stop)
        server.start(folder)
        requests = folder / "requests"
        bodies = [json.dumps({"input": text}).encode() for text in mixed_texts()]
        write_requests(requests, [request_bytes(server.path, body) for body in bodies])
        if options.minutes:
            keep("overload", overload(server, program, requests, options.minutes))
        if options.malformed:
            keep("malformed", attack(server, options.malformed, options.seed))
    show(report)


def show(report: dict[str, Any]) -> None:
    if "overload" in report:
        found, memory = report["overload"]["result"], report["overload"]["memory"]
        print(f"offered {report['overload']['offered_per_second']:.0f}/s, answered {found['per_second']:.1f}/s")
        print(f"statuses {found['statuses']}, lost without a status: {found['lost_without_a_status']}")
        print(f"accepted: p50 {found['p50_ms']:.0f} ms, p99 {found['p99_ms']:.0f} ms, most {found['max_ms']:.0f} ms")
        growth = memory["growth_nbytes_per_minute_after_first_quarter"] / 2**20
        print(f"memory: {(memory['last_nbytes'] or 0) / 2**20:.0f} MiB at the end, {growth:+.2f} MiB a minute")
    if "malformed" in report:
        found = report["malformed"]
        print(f"malformed: {found['sent']} sent, {found['status_500']} with 500, {found['wrong_count']} wrong answers")


if __name__ == "__main__":
    main()
