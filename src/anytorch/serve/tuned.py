"""The measured choices in the cache folder, in one shape. Unknown entries of other versions are skipped."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from anytorch import logs
from anytorch.cache import Store
from anytorch.counts import counted
from anytorch.errors import CacheError
from anytorch.serve import schemas

log = logs.logger(__name__)

# "the fastest for 235 mixed tokens: rows 88.91 ms, one-by-one 65.38 ms"
TIMES = re.compile(r"([\w×+.\- ]+?) ([0-9.]+) ms")
SIZE = re.compile(r"\d+x\d+")


def tuned() -> list[schemas.Graph]:
    found: list[schemas.Graph] = []
    for name, read in READERS.items():
        store = Store(name)
        try:
            entries = store.entries()
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(store.path.stat().st_mtime)) if entries else None
        except (CacheError, OSError) as exc:
            log.warning("%s is left out: %s", name, exc)
            continue
        for key, value in entries.items():
            try:
                found += [one.model_copy(update={"when": when}) for one in read(key, value)]
            except (KeyError, TypeError, ValueError, AttributeError) as exc:
                log.info("%s in %s is left out: %s", key, name, exc)
    return found


def quant_kernels(key: str, value: Any) -> Iterator[schemas.Graph]:
    """Kernels for one product with packed weights: the case in words, and each kernel's time."""
    # Words after the version and the machine: "cpu 2 threads avx512vnni int8 1536x384 m1 float32 own 0.001".
    words = key.split()[2:]
    sizes = [place for place, word in enumerate(words) if SIZE.fullmatch(word)]
    if not sizes:
        raise ValueError("no size is named")
    size = sizes[0]
    candidates = [
        schemas.Candidate(name=one["name"], seconds=one["seconds"], correct=one.get("refused") in (None, ""))
        for one in value
    ]
    timed = [one for one in candidates if one.seconds is not None and one.correct]
    if not timed:
        return
    best = min(timed, key=lambda one: one.seconds or 0.0)
    slowest = max(one.seconds or 0.0 for one in timed)
    best.chosen = True
    yield schemas.Graph(
        id=f"quant:{key}",
        title=f"{words[size - 1]} weights {words[size]}, {counted(int(words[size + 1].removeprefix('m')), 'row')}",
        device=words[0],
        kind="quantized product",
        candidates=candidates,
        speedup=round(slowest / best.seconds, 2) if best.seconds else None,
    )


def encoders(key: str, value: Any) -> Iterator[schemas.Graph]:
    """How a text encoder lays its tokens out; the times are in its own words."""
    times = [(name.strip(), float(ms) / 1000) for name, ms in TIMES.findall(value["why"].partition(":")[2])]
    candidates = [
        schemas.Candidate(name=name, seconds=seconds, chosen=seconds == min(s for _, s in times))
        for name, seconds in times
    ] or [schemas.Candidate(name=value["layout"], chosen=True)]
    seconds = [one.seconds for one in candidates if one.seconds]
    yield schemas.Graph(
        id=f"encoder:{key}",
        title=f"text encoder, {value['dtype']}: {value['layout']}" + (", recorded" if value.get("graphs") else ""),
        device=str(value.get("device", "")),
        kind="layout of tokens",
        candidates=candidates,
        speedup=round(max(seconds) / min(seconds), 2) if len(seconds) > 1 else None,
    )


def webgpu_products(key: str, value: Any) -> Iterator[schemas.Graph]:
    for case, choice in value.items():
        schedule = ", ".join(f"{name} {number}" for name, number in choice["schedule"].items())
        splits = f", {choice['splits']} splits" if choice.get("splits", 1) > 1 else ""
        yield schemas.Graph(
            id=f"product:{key}:{case}",
            title=f"matrix product {case}",
            device=key,
            kind="matrix product",
            candidates=[schemas.Candidate(name=schedule + splits, chosen=True)],
        )


READERS: dict[str, Callable[[str, Any], Iterator[schemas.Graph]]] = {
    "quant-kernels": quant_kernels,
    "encoders": encoders,
    "webgpu-matmul": webgpu_products,
}
