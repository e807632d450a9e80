"""One engine beside a pool of processes: the same vectors, how fast, and what a killed worker costs.

Without arguments: one process with all cores beside one process per core. With a device that is named several times
("cuda:0,cuda:0") the pool has several processes on it, which is how a machine with one card tries the code for two.
Rounds are interleaved; the answers are compared first; then a worker is killed with kill -9 in the middle of a run.

python bench/embed_pool.py [--devices cuda:0,cuda:0] [--model FOLDER] [--texts FILE.json.gz] [--sentences 2000] [--rounds 3]
                           [--seconds 45] [--output bench/results/embed-pool.json]

No round begins after --seconds; what was found is written after every step, also when a later one fails. The order of the
answers is checked by giving the same texts backwards; the killed worker's by comparing with the vectors from before.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance, write_results

from anytorch.text.embed import ArrowEngine, encoder_builder
from anytorch.text.embed.encoder_device import choose_device
from anytorch.text.embed.pool import PoolEncoder, PoolJob
from anytorch.text.embed.pool_devices import cpu_jobs

LEAST_COSINE = 0.9995


def pool_engine(devices: list[str], single: ArrowEngine, quantization: str | None) -> ArrowEngine:
    """An engine whose encoder is a pool, also where the same device is named twice (which `devices=` refuses)."""
    model = {"model": str(single.recipe.folder), "pooling": list(single.pooling)}
    model |= {"quantization": quantization, "dtype": "auto", "normalize": single._builder.normalize}
    places = [choose_device(device) for device in devices]
    if all(place.torch_name == "cpu" for place in places):
        jobs = cpu_jobs(len(places), model, None)
    else:
        jobs = [PoolJob(place.id, {**model, "device": place.id, "threads": None}) for place in places]
    real = encoder_builder.build_encoder
    encoder_builder.build_encoder = lambda *given, **named: (PoolEncoder(jobs), "a pool")  # type: ignore[assignment]
    try:
        return ArrowEngine(single.recipe.folder, devices[0], quantization)
    finally:
        encoder_builder.build_encoder = real


def worst(a: Any, b: Any) -> float:
    """The least cosine of two rows; a device's half precision makes vectors depend a little on their batch."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(((a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))).min())


def rate(engine: ArrowEngine, texts: list[str]) -> float:
    began = time.perf_counter()
    engine.encode(texts)
    return len(texts) / (time.perf_counter() - began)


def with_a_kill(engine: ArrowEngine, texts: list[str]) -> tuple[Any, dict[str, Any]]:
    pool: Any = engine._runner.encoder
    killed: list[int] = []

    def kill_once(done: int, total: int | None) -> None:
        if not killed:  # the first answer is here, and the next batches are under way
            killed.append(pool.process_ids[0])
            os.kill(killed[0], signal.SIGKILL)
            left.append(len(texts) - done)

    left: list[int] = []
    began = time.perf_counter()
    vectors = engine.encode(texts, progress=kill_once)
    took = time.perf_counter() - began
    if pool.process_ids[0] == killed[0] and pool.describe()["workers"][0]["alive"]:
        raise SystemExit("the killed worker was not missed: give it more texts")
    return vectors, {"per_s": round(len(texts) / took, 1), "texts_left_when_killed": left[0]}


def texts_for(options: argparse.Namespace) -> list[str]:
    if options.texts is None:
        import corpus

        return [*corpus.sentences(options.sentences), *corpus.passages(options.sentences // 10)]
    with gzip.open(options.texts, "rt", encoding="utf-8") as file:
        found = json.load(file)
    return [*found["short"][: options.sentences], *found["long"][: options.sentences // 10]]


def measure(options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    end = time.perf_counter() + options.seconds
    texts = texts_for(options)
    result: dict[str, Any] = {
        "benchmark": "embed_pool",
        **provenance(),
        "devices": options.devices,
        "quantization": options.quantization,
        "texts": len(texts),
    }
    began = time.perf_counter()
    single = ArrowEngine(options.model, options.devices[0], options.quantization)
    result["one_ready_s"] = round(time.perf_counter() - began, 1)
    began = time.perf_counter()
    several = pool_engine(options.devices, single, options.quantization)
    result["pool_ready_s"] = round(time.perf_counter() - began, 1)
    with single, several:
        about = several._runner.encoder.describe()
        result |= {"kernels": about.get("kernels"), "load": os.getloadavg()[0]}
        expected, found = single.encode(texts), several.encode(texts)
        backwards = several.encode(texts[::-1])[::-1]
        result |= {
            "same_bits": bool((expected == found).all()),
            "cosine_min": worst(expected, found),
            "backwards_cosine_min": worst(expected, backwards),
        }
        keep(result)
        if min(result["cosine_min"], result["backwards_cosine_min"]) < LEAST_COSINE:
            raise SystemExit(f"the pool's vectors are not the engine's: {result}")
        rates: dict[str, list[float]] = {"one process": [], "pool": []}
        for number in range(options.rounds):
            if number and time.perf_counter() > end:
                break
            rates["one process"].append(rate(single, texts))
            rates["pool"].append(rate(several, texts))
            ratios = [b / a for a, b in zip(rates["one process"], rates["pool"], strict=True)]
            result |= {
                "rounds": len(ratios),
                "texts_per_s": {name: round(statistics.median(values), 1) for name, values in rates.items()},
                "pool_to_one": round(statistics.median(ratios), 3),
            }
            keep(result)
        survived, facts = with_a_kill(several, texts)
        result |= {
            "with_a_killed_worker": {**facts, "cosine_min": worst(survived, expected)},
            "workers": several._runner.encoder.describe()["workers"],
        }
    keep(result)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = ["cpu"] * len(os.sched_getaffinity(0))
    parser.add_argument("--devices", type=lambda text: text.split(","), default=cores)
    parser.add_argument("--model", help="a model's folder; the default model when left out")
    parser.add_argument("--texts", help="a .json.gz with the lists `short` and `long`")
    parser.add_argument("--quantization")
    parser.add_argument("--sentences", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600.0, help="no round begins after this")
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()

    def keep(result: dict[str, Any]) -> None:
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            write_results(options.output, result)

    result = measure(options, keep)
    print(json.dumps(result, indent=1))
    return 0 if result["with_a_killed_worker"]["cosine_min"] >= LEAST_COSINE else 1


if __name__ == "__main__":
    sys.exit(main())
