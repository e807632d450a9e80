"""One launch with other constants of its source, and where a token's time goes: for whoever changes code/decode.cu.

    python bench/decode_variants.py                                  the 0.6B shape with 8, 12 and 16 warps, bfloat16
    python bench/decode_variants.py --only 8B --weights int4         one shape, packed weights
    python bench/decode_variants.py --variants "WARPS=12;WARPS=16,SPLIT=256"

Tokens are compared with the first variant's. Times are ms per token at three contexts, medians of three launches in turns;
then µs of each phase (mean over blocks and layers, and of the slowest block) of a token at the middle context.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from decode import SHAPES, milliseconds, model, prompt

from anytorch.text.decoders import Decoder
from anytorch.text.persistent import trace
from anytorch.text.persistent.cuda import CudaKernel
from anytorch.text.persistent.cuda_weights import PackedDecoder

CONTEXTS, NEW = (64, 512, 1024), 64


def measured(decoder: Decoder, variants: list[dict[str, int]], weights: str | None) -> None:
    packed = None if weights is None else PackedDecoder(decoder, weights)
    if packed is not None:
        print(f"  packed: {packed.nbytes / 1e9:.3f} GB", flush=True)
    kernels: dict[str, Any] = {}
    for constants in variants:
        name = ",".join(f"{key}={value}" for key, value in constants.items()) or "as it is"
        try:
            kernels[name] = [
                CudaKernel(decoder, 1100, weights=packed, constants=constants, profile=profile)
                for profile in (False, True)
            ]
        except Exception as exc:  # noqa: BLE001  (the others are measured all the same)
            print(f"  {name}: {type(exc).__name__}: {str(exc)[:300]}", flush=True)
    ids = prompt(decoder.spec, 1)
    wanted = None
    for name, (kernel, _) in kernels.items():
        made = kernel.generate(ids, 200)
        wanted = made if wanted is None else wanted
        same = next((i for i, (a, b) in enumerate(zip(made, wanted, strict=True)) if a != b), len(made))
        print(f"  {name}: the first {same} of {len(made)} tokens are the first variant's", flush=True)
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(3):
        for name, (kernel, _) in kernels.items():
            for context in CONTEXTS:
                kernel.length = context
                took = milliseconds(lambda kernel=kernel: list(kernel.follow(5, NEW)))  # type: ignore[misc]
                found.setdefault((name, context), []).append(took / NEW)
    for name in kernels:
        times = "  ".join(f"{context}: {statistics.median(found[name, context]):.4f}" for context in CONTEXTS)
        print(f"  {name:24} ms/token at {times}", flush=True)
    for name, (_, kernel) in kernels.items():
        kernel.length = CONTEXTS[1]
        list(kernel.follow(5, 8))
        spans = trace.table(kernel.marks)
        print(
            f"  {name}: " + "  ".join(f"{what} {mean:.2f}/{most:.2f}" for what, (mean, most) in spans.items()),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="0.6B", help="shapes whose name has this part")
    parser.add_argument("--weights", choices=["int8", "int4"])
    parser.add_argument("--variants", default=";WARPS=12;WARPS=16")
    options = parser.parse_args()
    variants = [
        {key: int(value) for key, value in (pair.split("=") for pair in one.split(",") if pair)}
        for one in options.variants.split(";")
    ]
    for name in SHAPES:
        if options.only in name:
            print(f"{name}, {options.weights or 'bfloat16'}", flush=True)
            measured(model(name, torch.bfloat16), variants, options.weights)


if __name__ == "__main__":
    main()
