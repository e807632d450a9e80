"""Decoding one text on a GPU: the whole of it in one launch, beside steps of torch that are recorded, and compiled ones.

    python bench/decode.py                                          three shapes with random weights, bfloat16
    python bench/decode.py --only 0.6B --compiled                   one, and torch.compile's step (minutes to compile)
    python bench/decode.py --output bench/results/decode-h200.json

64 tokens of context, 1,024 new ones. Answers first: every token of ours is compared, by the decoder in float32 where that
fits and in its own dtype, with the best one; the largest distance of logits is printed beside the rounding of the dtype.
Then all sides take turns, three rounds; times are medians of ms per token. Ours is timed from its launch to its end,
divided by the tokens. A recorded step of torch is replayed 32 times at each of five contexts between 64 and 1,088, in
recordings of the next power of two, and averaged: nothing of the host is in it.

The share is of the rate at which this GPU reads 8 GB, measured in the same run: weights are all that counts as read.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provenance import provenance

from anytorch.text.decoders import Decoder
from anytorch.text.decoders.spec import DecoderSpec, Rotary
from anytorch.text.decoders.steps import RecordedSteps
from anytorch.text.persistent.cuda import CudaKernel

CONTEXT, NEW, ROUNDS, REPLAYS = 64, 1024, 3, 32
SHAPES = {  # as their config.json says; vocabulary, width, layers, heads, heads of keys, head, inner
    "Qwen3-0.6B": ("qwen3", 151_936, 1024, 28, 16, 8, 128, 3072, True, True),
    "Llama-3.2-1B": ("llama", 128_256, 2048, 16, 32, 8, 64, 8192, False, True),
    "Qwen3-8B": ("qwen3", 151_936, 4096, 36, 32, 8, 128, 12_288, True, False),
}


def model(name: str, dtype: torch.dtype) -> Decoder:
    """Random weights of a shape, such that every layer and every word counts."""
    family, vocabulary, width, layers, heads, kv_heads, head, inner, qk_norm, tied = SHAPES[name]
    spec = DecoderSpec(
        *(family, vocabulary, width, layers, heads, kv_heads, head, inner, 40_960, 1e-6, Rotary(theta=1e6)),
        qk_norm=qk_norm,
        tied=tied,
        windows=(0,) * layers,
    )
    with torch.device("meta"):
        made = Decoder(spec)
    made = made.to(dtype).to_empty(device="cuda").requires_grad_(False)
    if tied:
        made.lm_head.weight = made.model.embed_tokens.weight
    torch.manual_seed(0)
    for parameter_name, one in made.named_parameters():
        if "norm" in parameter_name:
            one.data.uniform_(0.5, 1.5)
        else:
            one.data.normal_(0, 1.0 if "embed" in parameter_name and not tied else one.shape[-1] ** -0.5)
    return made


def milliseconds(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def read_rate() -> float:
    """Bytes per second of reading 8 GB: the least of five sums."""
    much = torch.ones(2 << 30, dtype=torch.float32, device="cuda")
    much.sum()
    return much.nbytes / min(milliseconds(much.sum) for _ in range(5)) * 1e3


def distance(decoder: Decoder, ids: list[int], made: list[int]) -> dict[str, float]:
    """How far the tokens' logits are from the best ones', and how far the decoder's own logits are off, in one another's
    units; by float32, if that fits."""
    whole = [ids + made[:-1]]
    own = decoder(whole)[0, len(ids) - 1 :].float()
    free = torch.cuda.mem_get_info()[0]
    numbers = sum(one.numel() for one in decoder.parameters())
    if 4 * numbers + (16 << 30) < free:
        with torch.device("meta"):
            wide = Decoder(decoder.spec)
        wide = wide.to_empty(device="cuda").requires_grad_(False)
        if decoder.spec.tied:
            wide.lm_head.weight = wide.model.embed_tokens.weight
        wide.load_state_dict(decoder.state_dict())
        truth = wide(whole)[0, len(ids) - 1 :]
    else:
        truth = own
    chosen = truth[torch.arange(len(made)), torch.tensor(made)]
    gap = truth.amax(-1) - chosen
    return {
        "same": int((gap == 0).sum()),
        "of": len(made),
        "largest_gap": float(gap.max()),
        "rounding": float((truth - own).abs().max()),
        "logits_std": float(truth.std()),
    }


@torch.no_grad()
def measure(name: str, dtype: torch.dtype, rate: float, compiled: bool) -> dict[str, Any]:
    decoder = model(name, dtype)
    spec = decoder.spec
    kernel = CudaKernel(decoder, positions=CONTEXT + NEW + 1)
    ids = torch.randint(0, spec.vocabulary, (CONTEXT,), generator=torch.Generator().manual_seed(1)).tolist()
    answers = []
    for seed in range(3):
        given = torch.randint(0, spec.vocabulary, (CONTEXT,), generator=torch.Generator().manual_seed(seed)).tolist()
        answers.append(distance(decoder, given, kernel.generate(given, 256)))
    for one in answers:
        if one["largest_gap"] > 2 * max(one["rounding"], 1e-3 * one["logits_std"]):
            raise SystemExit(f"{name}: wrong tokens, {one}")

    def ours() -> float:
        kernel.read(ids)
        counted: list[int] = []
        return milliseconds(lambda: counted.extend(kernel.follow(5, NEW))) / len(counted)

    def steps_of(steps: RecordedSteps) -> Callable[[], float]:
        contexts = [CONTEXT + NEW * part // 4 for part in range(5)]

        def timed() -> float:
            found = []
            for context in contexts:
                steps.lengths[0] = context
                steps._put(0, 5, context - 1)
                steps.step()
                found.append(milliseconds(lambda: [steps.step() for _ in range(REPLAYS)]) / REPLAYS)
            return (sum(found) - (found[0] + found[-1]) / 2) / 4

        return timed

    sides: dict[str, Callable[[], float]] = {"one launch": ours}
    recorded = RecordedSteps(decoder, 1, CONTEXT + NEW + 1)
    recorded.read(0, ids)
    sides["recorded step"] = steps_of(recorded)
    if compiled:
        quick = RecordedSteps(decoder, 1, CONTEXT + NEW + 1)
        quick.read(0, ids)
        quick._computed = torch.compile(quick._computed, dynamic=False)  # type: ignore[method-assign]
        sides["compiled, recorded step"] = steps_of(quick)
    for run in sides.values():
        run()
    found: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(ROUNDS):
        for side, run in sides.items():
            found[side].append(run())
    nbytes = spec.weight_numbers() * decoder.lm_head.weight.element_size()
    ms = {side: statistics.median(times) for side, times in found.items()}
    return {
        "name": name,
        "ms": {side: round(one, 4) for side, one in ms.items()},
        "floor_ms": round(nbytes / rate * 1e3, 4),
        "share": {side: round(nbytes / rate * 1e3 / one, 3) for side, one in ms.items()},
        "answers": answers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="shapes whose name has this part")
    parser.add_argument("--compiled", action="store_true", help="torch.compile's step, too")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rate = read_rate()
    result: dict[str, Any] = {"what": __doc__, **provenance(), "torch": torch.__version__, "dtype": options.dtype}
    result.update(gpu=torch.cuda.get_device_name(), read_TB_per_s=round(rate / 1e12, 3), rows=[])
    for name in SHAPES:
        if options.only and options.only not in name:
            continue
        row = measure(name, getattr(torch, options.dtype), rate, options.compiled)
        result["rows"].append(row)
        times = "  ".join(f"{side} {ms:.3f} ms ({row['share'][side]:.0%})" for side, ms in row["ms"].items())
        gap = max(one["largest_gap"] for one in row["answers"])
        rounding = max(one["rounding"] for one in row["answers"])
        print(
            f"{name:14} {times}  floor {row['floor_ms']:.3f} | furthest from the best {gap:.2g}, rounding {rounding:.2g}"
        )
        if options.output:
            options.output.write_text(json.dumps(result, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
