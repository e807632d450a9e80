"""Families that we have no decoder of: our step of transformers' own model, beside transformers' generate.

    python bench/decode_families.py                                 on the GPU, if there is one: real shapes, bfloat16
    python bench/decode_families.py --only GPT-2,Mamba --rows 1,4
    python bench/decode_families.py --small                         shapes of a few million weights, float32: for the CPU
    python bench/decode_families.py --output bench/results/decode-families-h200.json

Random weights, 64 tokens of context, greedy, all sides with the same model object. Tokens first: each of ours is compared,
by the model in float32 where that fits and in its own dtype, with the best one; the largest distance of logits may be twice
the rounding. Then all sides take turns, three rounds; medians of ms per token of each text, wall time: what many new tokens
take longer than one. "ours" is what `TextGenerator` computes, without its tokenizer: as many requests as texts through its
scheduler. "transformers" is `generate` with its default cache; "static, compiled" is its static cache with torch.compile and
CUDA graphs (mode reduce-overhead), on a GPU, for the families that it does that for: else the reason stands there. Each
side runs in a thread of its own, as ours does anyway: on a busy CPU torch is another one in the main thread.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from provenance import provenance, write_results

from anytorch.devices.memory import memory, synchronize
from anytorch.text.generate.bandwidth import weight_nbytes_per_token
from anytorch.text.generate.cache import new_cache
from anytorch.text.generate.forward import Forward
from anytorch.text.generate.kernel import KernelRows, Opened
from anytorch.text.generate.model_steps import open_model
from anytorch.text.generate.requests import End, TextRequest
from anytorch.text.generate.sampling import Sampling
from anytorch.text.generate.scheduler import Scheduler

CONTEXT, ROUNDS = 64, 3
WORDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
# As their config.json says, where the class's own defaults are not the model's.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", {}),
    "Gemma-2-2B": ("Gemma2", {"hidden_size": 2304, "num_hidden_layers": 26, "intermediate_size": 9216,
                              "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}),
    "Phi-3-mini": ("Phi3", {}),
    "Qwen1.5-MoE-A2.7B": ("Qwen2Moe", {}),
    "Mamba-1.4B": ("Mamba", {"hidden_size": 2048, "num_hidden_layers": 48}),
}  # fmt: skip
LLAMA = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", {"vocab_size": 4096, "n_embd": 256, "n_layer": 4, "n_head": 4}),
    "Gemma-2": ("Gemma2", {**LLAMA, "head_dim": 64, "sliding_window": 96}),
    "Phi-3": ("Phi3", LLAMA),
    "Qwen-MoE": ("Qwen2Moe", {**LLAMA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
                              "shared_expert_intermediate_size": 256}),
    "Mamba": ("Mamba", {"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 4}),
}  # fmt: skip


def model(shape: tuple[str, dict[str, Any]], dtype: torch.dtype, device: torch.device) -> Any:
    """Random weights of a shape, made where they are used."""
    family, sizes = shape
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**WORDS, **sizes})
    with device:
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    made.generation_config.pad_token_id = 0
    return made.to(device).eval().requires_grad_(False)


def prompts(vocabulary: int, rows: int) -> list[list[int]]:
    dice = torch.Generator().manual_seed(1)
    return torch.randint(0, vocabulary, (rows, CONTEXT), generator=dice).tolist()


def scheduled(opened: Opened, given: list[list[int]], new: int) -> tuple[list[list[int]], float]:
    """The new tokens of as many requests as prompts, and the seconds they took, from the first to the last."""
    scheduler = Scheduler(KernelRows(opened, 1 << 40), most_at_once=len(given), most_waiting=99, guard=torch.no_grad)
    try:
        for _ in range(2):  # the first records
            requests = [TextRequest(list(ids), Sampling(), new, frozenset(), torch.Generator()) for ids in given]
            begun = time.perf_counter()
            for request in requests:
                scheduler.submit(request)
            for request in requests:
                while not isinstance(event := request.mailbox.get(), End):
                    pass
                if event.error is not None:
                    raise event.error
            took = time.perf_counter() - begun
    finally:
        scheduler.close()
    return [request.tokens[request.prompt_length :] for request in requests], took


def ours(opened: Opened, given: list[list[int]], new: int) -> Callable[[], float]:
    def timed() -> float:
        return (scheduled(opened, given, new)[1] - scheduled(opened, given, 1)[1]) * 1e3 / (new - 1)

    return timed


def theirs(made: Any, given: list[list[int]], new: int, **options: Any) -> Callable[[], float]:
    """ms per token of `generate`, greedy."""
    ids = torch.tensor(given, device=made.device)
    mask = torch.ones_like(ids)

    @torch.no_grad()
    def run() -> float:
        took = []
        for count in (1, new):
            synchronize(made.device)
            begun = time.perf_counter()
            found = made.generate(
                ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, **options
            )
            synchronize(made.device)
            assert found.shape[1] == CONTEXT + count
            took.append(time.perf_counter() - begun)
        return (took[1] - took[0]) * 1e3 / (new - 1)

    def timed() -> float:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(run).result()

    return timed


@torch.no_grad()
def checked(made: Any, given: list[list[int]], texts: list[list[int]], what: str) -> list[dict[str, float]]:
    """How far the tokens' logits are from the best ones', and the model's own logits from float32's, where that fits."""
    wide, free = made, memory(made.device).free
    numbers = sum(one.numel() for one in made.parameters())
    if made.dtype != torch.float32 and (free is None or 5 * numbers < free):
        wide = copy.deepcopy(made).float()
    answers = []
    for ids, text in zip(given, texts, strict=True):
        whole = torch.tensor([ids + text[:-1]], device=made.device)
        own, truth = (one(whole, use_cache=False).logits[0, len(ids) - 1 :].float() for one in (made, wide))
        # One token after the other rounds elsewhere than all at once: in float32, too.
        by_steps = stepped_logits(made, ids, text[: 1 + len(text) // 8])
        gap = truth.amax(-1) - truth[torch.arange(len(text)), torch.tensor(text)]
        rounding = max(float((truth - own).abs().max()), float((truth[: len(by_steps)] - by_steps).abs().max()))
        found = {"same": int((gap == 0).sum()), "of": len(text), "largest_gap": float(gap.max()), "rounding": rounding}
        answers.append(found)
        if found["largest_gap"] > 2 * max(rounding, 1e-5 * float(truth.std())):
            raise SystemExit(f"{what}: wrong tokens, {found}")
    return answers


def stepped_logits(made: Any, ids: list[int], text: list[int]) -> torch.Tensor:
    """transformers' own logits of some tokens, one after the other."""
    forward, cache, found = Forward(made, Path()), new_cache(made.config), []
    for begin, part in ((0, ids), *((len(ids) + number, [token]) for number, token in enumerate(text[:-1]))):
        places = torch.arange(begin, begin + len(part), device=made.device)[None]
        found.append(forward(torch.tensor([part], device=made.device), cache, places, None)[0].float())
    return torch.stack(found)


def measure(made: Any, name: str, rows: int, new: int, compiled: bool) -> dict[str, Any]:
    opened = open_model(made, Path(name), None)
    given = prompts(opened.needs.vocabulary, rows)
    texts, _ = scheduled(opened, given, new)
    row: dict[str, Any] = {"name": name, "rows": rows, "new": new, "says": opened.says, "without": {}}
    row["answers"] = checked(made, given[:3], texts[:3], f"{name} x {rows}")
    sides = {"ours": ours(opened, given, new), "transformers": theirs(made, given, new)}
    if compiled:
        sides["static, compiled"] = theirs(made, given, new, cache_implementation="static")
    found: dict[str, list[float]] = {}
    for side, run in sides.items():
        try:
            run()  # compiles and records
            found[side] = []
        except Exception as exc:  # a peer that does not run is a finding
            if side == "ours":
                raise
            row["without"][side] = f"{type(exc).__name__}: {str(exc)[:300]}"
    for _ in range(ROUNDS):
        for side, times in found.items():
            times.append(sides[side]())
    row["ms"] = {side: round(statistics.median(times), 4) for side, times in found.items()}
    row["spread_ms"] = {side: [round(min(times), 4), round(max(times), 4)] for side, times in found.items()}
    row["weight_nbytes_per_token"] = weight_nbytes_per_token(made)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="small shapes in float32")
    parser.add_argument("--only", default="", help="families whose name has one of these parts: GPT-2,Mamba")
    parser.add_argument("--rows", default="1,4", help="texts at once; default: %(default)s")
    parser.add_argument("--new", type=int, default=256, help="tokens of each; default: %(default)s")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.new < 2:
        parser.error("--new: use 2 or more, as a token's time is what the others take longer than the first")
    device = torch.device(options.device)
    dtype = torch.float32 if options.small else torch.bfloat16
    result: dict[str, Any] = {"what": __doc__, **provenance(), "device": str(device), "dtype": str(dtype), "rows": []}
    if device.type == "cuda":
        result["gpu"] = torch.cuda.get_device_name(device)
    for name, shape in (SMALL if options.small else SHAPES).items():
        if options.only and not any(part in name for part in options.only.split(",")):
            continue
        made = model(shape, dtype, device)
        for rows in map(int, options.rows.split(",")):
            row = measure(made, name, rows, options.new, device.type == "cuda")
            result["rows"].append(row)
            gap, rounding = (max(one[what] for one in row["answers"]) for what in ("largest_gap", "rounding"))
            times = "  ".join(f"{side} {ms:.3f} ms" for side, ms in row["ms"].items())
            print(
                f"{name:18} x {rows:2} {times} | furthest from the best {gap:.2g}, rounding {rounding:.2g}", flush=True
            )
            for side, why in row["without"].items():
                print(f"  without {side}: {why}")
            if options.output:
                write_results(options.output, result)
        del made
        gc.collect()


if __name__ == "__main__":
    main()
