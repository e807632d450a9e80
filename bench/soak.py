"""A long bad day: hostile mixed load against `anytorch serve --workers 2`, and bounds on what it may cost.

For `--minutes` these go on at once, each without end: embeddings, forecasts and completions that are right; broken
bodies; huge ones (15 MB of one text, a table of 100,000 columns, more than the limit); clients that send a byte now and
then; clients that leave; loads of other models and of models that do not exist; and a worker is killed every
`--kill-every` seconds, always the younger one, so that the other lives through it all.

Bounds, each broken one named on standard error, with exit status 1: resident memory of all processes, and its growth in
the worker that lives on; threads and descriptors of every process; the p99 and the share of right requests that were
answered, and no wrong answer among them; no 500; nothing under way and health green after a pause; an end within
--drain + 5 s of SIGTERM.

python bench/soak.py                          thirty minutes
python bench/soak.py --minutes 2 --output /tmp/soak.json
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from load import Server, free_port
from provenance import provenance, write_results
from soak_clients import Clients, Tally

RESULT = Path(__file__).parents[1] / "bench" / "results" / "soak-cpu.json"
DRAIN_S = 10.0
TIMEOUT_S = 30.0  # of a request, in the service
SAMPLE_S = 2.0
SETTLE_S = 45.0  # after the load: what was abandoned at the time limit has ended by then


@dataclass(frozen=True)
class Bounds:
    """What must hold. Numbers of one process are of the parent or of a worker, whichever has more."""

    memory_nbytes: int = 5 << 30  # all processes together
    growth: float = 0.25  # of the surviving worker's memory, the last quarter over the second
    threads: int = 120  # of one process
    descriptors: int = 400  # of one process
    p99_s: tuple[tuple[str, float], ...] = (("embeddings", 15.0), ("forecast", 30.0), ("completions", 30.0))
    answered: float = 0.9  # of the right requests, with 200


class Soak(Clients):
    """The service, its attackers, and what they saw."""

    def __init__(self, server: Server, seed: int, kill_every_s: float) -> None:
        super().__init__(server.port)
        self.server, self.seed, self.kill_every_s = server, seed, kill_every_s
        self.tallies: dict[str, Tally] = {}
        self.samples: list[dict[str, Any]] = []
        self.kills = 0
        self.failed: list[str] = []  # an attacker that ended by an error of its own

    def run(self, seconds: float) -> None:
        clients: list[tuple[str, Callable[[Tally, random.Random], None]]] = [
            *[("embeddings", self.embeddings)] * 3,
            ("forecast", self.forecasts),
            ("completions", self.completions),
            ("malformed", self.malformed),
            ("huge", self.huge),
            ("slow", self.slow),
            ("leaving", self.leaving),
            ("loads", self.loads),
            ("killer", self.killer),
            ("watch", self.watch),
        ]
        threads = []
        for number, (name, work) in enumerate(clients):
            tally = self.tallies.setdefault(f"{name} {number}", Tally())
            args = (name, work, tally, random.Random(self.seed * 1000 + number))
            threads.append(threading.Thread(target=self._guarded, args=args, name=f"soak-{name}"))
        for thread in threads:
            thread.start()
        with contextlib.suppress(KeyboardInterrupt):
            self.end.wait(seconds)
        self.end.set()
        for thread in threads:
            thread.join(120)
            if thread.is_alive():
                self.failed.append(f"{thread.name} was not answered within 120 s")

    def _guarded(
        self, name: str, work: Callable[[Tally, random.Random], None], tally: Tally, chance: random.Random
    ) -> None:
        try:
            work(tally, chance)
        except Exception:  # noqa: BLE001  (whatever it is, it is told as a broken bound)
            self.failed.append(f"{name}: {traceback.format_exc()[-1500:]}")
            self.end.set()

    def together(self, name: str) -> Tally:
        """All clients of one kind as one."""
        whole = Tally()
        for key, one in self.tallies.items():
            if key.rpartition(" ")[0] == name:
                whole.statuses += one.statuses
                whole.seconds += one.seconds
                whole.wrong += one.wrong
        return whole

    def killer(self, tally: Tally, chance: random.Random) -> None:
        while not self.end.wait(self.kill_every_s):
            workers = self.workers()
            if len(workers) > 1:
                os.kill(workers[-1], signal.SIGKILL)
                self.kills += 1
                tally.statuses["killed"] += 1

    # --- what it costs ------------------------------------------------------------------------------------------------

    def workers(self) -> list[int]:
        """The worker processes, the oldest first."""
        assert self.server.process is not None
        found = self.server.process.pid
        children = [int(pid) for pid in Path(f"/proc/{found}/task/{found}/children").read_text().split()]
        return sorted(children, key=_began)

    def watch(self, tally: Tally, chance: random.Random) -> None:
        began = time.perf_counter()
        while not self.end.wait(SAMPLE_S):
            self.samples.append({"at_s": round(time.perf_counter() - began, 1), **self.costs()})

    def costs(self) -> dict[str, Any]:
        """Memory of all processes and of the oldest worker, and the most threads and descriptors that one has, now."""
        total = threads = descriptors = 0
        for pid in self.server.pids():
            with contextlib.suppress(OSError):  # it was killed in between
                told = dict(
                    line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
                )
                total += int(told.get("VmRSS", "0 kB").split()[0]) * 1024
                threads = max(threads, int(told["Threads"]))
                descriptors = max(descriptors, len(list(Path(f"/proc/{pid}/fd").iterdir())))
        oldest = 0
        with contextlib.suppress(OSError, IndexError):
            words = Path(f"/proc/{self.workers()[0]}/statm").read_text().split()
            oldest = int(words[1]) * os.sysconf("SC_PAGE_SIZE")
        return {
            "memory_nbytes": total,
            "survivor_nbytes": oldest,
            "threads": threads,
            "descriptors": descriptors,
            "load_average": round(os.getloadavg()[0], 2),
        }


def _began(pid: int) -> int:
    """When a process began, in ticks since the start of the machine; one that is gone counts as young."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return sys.maxsize


def make_text_model(folder: Path) -> Path:
    """A tiny language model with random weights, as `--text-model` takes it."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["one word after another makes a text"], trainer)
    path = folder / "tiny-llama"
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def growth(samples: list[dict[str, Any]]) -> float:
    """How much more memory the surviving worker has in the last quarter than in the second; the first fills caches."""
    sizes = [one["survivor_nbytes"] for one in samples if one["survivor_nbytes"]]
    quarter = len(sizes) // 4
    if quarter < 3:
        return 0.0
    return float(np.median(sizes[-quarter:]) / np.median(sizes[quarter : 2 * quarter]) - 1)


def settle(soak: Soak) -> dict[str, Any]:
    """After a pause without load: is it ready and healthy, does it compute rightly, and is nothing left?"""
    time.sleep(SETTLE_S)
    found: dict[str, Any] = {"costs": soak.costs()}
    for name in ("readyz", "healthz"):
        try:
            with urllib.request.urlopen(f"{soak.base}/v1/{name}", timeout=60) as answer:
                found[name] = answer.status
        except OSError as exc:
            found[name] = str(exc)
    with urllib.request.urlopen(f"{soak.base}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    said = [line.split()[1] for line in lines if line.startswith("anytorch_requests_under_way")]
    found["under_way"] = sum(float(number) for number in said) - 1  # that question itself
    return found


def stop(server: Server) -> dict[str, Any]:
    """SIGTERM to the service: its status and how long it took to end."""
    assert server.process is not None
    began = time.perf_counter()
    server.process.send_signal(signal.SIGTERM)
    status = server.process.wait(DRAIN_S + 60)
    return {"status": status, "seconds": round(time.perf_counter() - began, 2)}


def broken(soak: Soak, bounds: Bounds, report: dict[str, Any]) -> list[str]:
    """The bounds that did not hold, in words."""
    found = list(soak.failed)

    def at_most(what: str, value: float, most: float) -> None:
        if not value <= most:
            found.append(f"{what}: {value:g}, at most {most:g} are allowed")

    for name in ("memory_nbytes", "threads", "descriptors"):
        at_most(name, report["most"][name], getattr(bounds, name))
    at_most("growth of the surviving worker's memory", report["growth"], bounds.growth)
    for name, most in bounds.p99_s:
        tally = report["clients"][name]
        at_most(f"p99 of {name} (s)", tally["p99_s"] if tally["p99_s"] is not None else float("inf"), most)
        whole = tally["sent"]
        share = tally["statuses"].get("200", 0) / whole if whole else 0.0
        if share < bounds.answered:
            found.append(f"{name}: {share:.1%} of {whole} answered, {bounds.answered:.0%} are wanted")
    for name, tally in report["clients"].items():
        if tally["wrong_count"]:
            found.append(f"{name}: {tally['wrong_count']} wrong answers, such as {tally['wrong'][0]}")
    after = report["afterwards"]
    if after["readyz"] != 200 or after["healthz"] != 200:
        found.append(f"not healthy afterwards: readyz {after['readyz']}, healthz {after['healthz']}")
    at_most("requests under way afterwards", after["under_way"], 0)
    if report["end"]["status"]:
        found.append(f"it ended with status {report['end']['status']}")
    at_most("seconds from SIGTERM to the end", report["end"]["seconds"], DRAIN_S + 5)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kill-every", type=float, default=45.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--beside", default="", help="what else ran on the machine, for the result")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    bounds = Bounds()
    before = provenance()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-soak-")))
        port = free_port()
        command = [sys.executable, "-m", "anytorch", "serve", "--port", str(port), "--no-browser", "--workers", "2"]
        command += ["--threads", "1", "--timeout", f"{TIMEOUT_S:g}", "--drain", f"{DRAIN_S:g}"]
        command += ["--text-model", str(make_text_model(folder))]
        server = Server("anytorch", command, port, "/v1/embeddings", "/v1/readyz")
        stack.callback(server.stop)
        server.start(folder)
        soak = Soak(server, options.seed, options.kill_every)
        print(f"ready after {server.start_s:.1f} s; {options.minutes:g} minutes of load", file=sys.stderr)
        began = time.perf_counter()
        soak.run(60 * options.minutes)
        report: dict[str, Any] = {
            "what": __doc__,
            **before,
            "beside": options.beside,
            "minutes": round((time.perf_counter() - began) / 60, 2),
            "workers": 2,
            "kills": soak.kills,
            "clients": {
                name: soak.together(name).summary()
                for name in dict.fromkeys(key.rpartition(" ")[0] for key in soak.tallies)
                if name != "watch"
            },
            "most": {
                name: max(one[name] for one in soak.samples)
                for name in ("memory_nbytes", "survivor_nbytes", "threads", "descriptors", "load_average")
            },
            "growth": round(growth(soak.samples), 3),
            "bounds": {**bounds.__dict__, "p99_s": dict(bounds.p99_s), "end_s": DRAIN_S + 5},
            "afterwards": settle(soak),
            "end": stop(server),
            "samples": soak.samples[:: max(1, len(soak.samples) // 200)],
        }
        log = server.log.read_text(errors="replace") if server.log is not None else ""
        report["tracebacks_in_the_log"] = log.count("Traceback (most recent call last)")
        report["log"] = log[-3000:]
    report["broken"] = broken(soak, bounds, report)
    write_results(options.output, report)
    show(report)
    for one in report["broken"]:
        print(f"broken: {one}", file=sys.stderr)
    return 1 if report["broken"] else 0


def show(report: dict[str, Any]) -> None:
    most = report["most"]
    print(f"{report['minutes']:g} minutes, {report['kills']} workers killed, load average up to {most['load_average']}")
    for name, one in report["clients"].items():
        p99 = "" if one["p99_s"] is None else f", p50 {one['p50_s']:.2f} s, p99 {one['p99_s']:.2f} s"
        print(f"  {name}: {one['sent']} {one['statuses']}{p99}, {one['wrong_count']} wrong")
    memory = f"{most['memory_nbytes'] / 2**20:.0f} MiB at most, {report['growth']:+.1%} in the surviving worker"
    print(f"memory {memory}; {most['threads']} threads and {most['descriptors']} descriptors at most in one process")
    print(f"afterwards {report['afterwards']}; SIGTERM: ended after {report['end']['seconds']} s")


if __name__ == "__main__":
    sys.exit(main())
