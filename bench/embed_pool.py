"""One engine beside a pool of processes: the same vectors, how fast, and what a killed worker costs.

Without arguments: one process with all cores beside one process per core. With a device that is named several times
("cuda:0,cuda:0") the pool has several processes on it, which is how a machine with one card tries the code for two.
Rounds are interleaved; the answers are compared first; then a worker is killed with kill -9 in the middle of a run.

python bench/embed_pool.py [--devices cuda:0,cuda:0] [--sentences 2000] [--rounds 3] [--output bench/results/embed-pool.json]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import corpus
import numpy as np

from anytorch.engines.embed import ArrowEngine
from anytorch.engines.embed import engine as engine_module
from anytorch.engines.embed.place import choose_place
from anytorch.engines.embed.pool import Job, PoolEncoder
from anytorch.engines.embed.pool_devices import cpu_jobs

LEAST_COSINE = 0.9995


def pool_engine(devices: list[str], single: ArrowEngine, quantization: str | None) -> ArrowEngine:
    """An engine whose encoder is a pool, also where the same device is named twice (which `devices=` refuses)."""
    model = {"model": str(single.recipe.folder), "pooling": list(single.pooling)}
    model |= {"quantization": quantization, "dtype": "auto", "normalize": single._normalize}
    places = [choose_place(device) for device in devices]
    if all(place.torch_name == "cpu" for place in places):
        jobs = cpu_jobs(len(places), model, None)
    else:
        jobs = [Job(place.id, {**model, "device": place.id, "threads": None}) for place in places]
    real = engine_module.build_encoder
    engine_module.build_encoder = lambda *given, **named: (PoolEncoder(jobs), "a pool")  # type: ignore[assignment]
    try:
        return ArrowEngine(single.recipe.folder, devices[0], quantization)
    finally:
        engine_module.build_encoder = real


def worst(a: Any, b: Any) -> float:
    """The least cosine of two rows; a device's half precision makes vectors depend a little on their batch."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(((a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))).min())


def rate(engine: ArrowEngine, texts: list[str]) -> float:
    began = time.perf_counter()
    engine.encode(texts)
    return len(texts) / (time.perf_counter() - began)


def with_a_kill(engine: ArrowEngine, texts: list[str]) -> tuple[Any, float]:
    pool: Any = engine._runner.encoder
    killed: list[int] = []

    def kill_once(done: int, total: int | None) -> None:
        if not killed and done >= len(texts) // 3:
            killed.append(pool.process_ids[0])
            os.kill(killed[0], signal.SIGKILL)

    began = time.perf_counter()
    vectors = engine.encode(texts, progress=kill_once)
    assert killed
    return vectors, len(texts) / (time.perf_counter() - began)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    texts = [*corpus.sentences(options.sentences), *corpus.passages(options.sentences // 10)]
    single = ArrowEngine(None, options.devices[0], options.quantization)
    several = pool_engine(options.devices, single, options.quantization)
    with single, several:
        expected, found = single.encode(texts), several.encode(texts)
        if worst(expected, found) < LEAST_COSINE:
            raise SystemExit(f"the pool's vectors are not the engine's: cosine {worst(expected, found)}")
        rates: dict[str, list[float]] = {"one process": [], "pool": []}
        for _ in range(options.rounds):
            rates["one process"].append(rate(single, texts))
            rates["pool"].append(rate(several, texts))
        survived, killed_rate = with_a_kill(several, texts)
        ratios = [b / a for a, b in zip(rates["one process"], rates["pool"], strict=True)]
        about = several._runner.encoder.describe()
    asked = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "benchmark": "embed_pool",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": asked.stdout.strip() or None,
        "devices": options.devices,
        "quantization": options.quantization,
        "kernels": about.get("kernels"),
        "texts": len(texts),
        "same_bits": bool((expected == found).all()),
        "cosine_min": worst(expected, found),
        "texts_per_s": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        "pool_to_one": round(statistics.median(ratios), 3),
        "with_a_killed_worker": {"per_s": round(killed_rate, 1), "cosine_min": worst(survived, found)},
        "workers": about["workers"],
        "load": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = ["cpu"] * len(os.sched_getaffinity(0))
    parser.add_argument("--devices", type=lambda text: text.split(","), default=cores)
    parser.add_argument("--quantization")
    parser.add_argument("--sentences", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    result = measure(options)
    print(json.dumps(result, indent=1))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["with_a_killed_worker"]["cosine_min"] >= LEAST_COSINE else 1


if __name__ == "__main__":
    sys.exit(main())
