"""Many chats at once on a GPU: our scheduler over our kernels, beside transformers' continuous batching where there is one.

    python bench/decode_serving.py                                       the 0.6B and 8B shapes, 16 and 64 chats, bfloat16
    python bench/decode_serving.py --only 0.6B --chats 16
    python bench/decode_serving.py --output bench/results/decode-serving-h200.json

Random weights; every chat has a prompt of 32 to 512 tokens and asks for 192 new ones, which it gets in full, greedy; when it
ends, the next one takes its place, until three for each place are done. Same requests for both sides. tokens/s counts new
tokens from the first request to the last answer. "per token" is the time between two tokens of one chat (p50, p99; of
transformers by the times it notes itself), "first" the time to a chat's first token, of ours: transformers gets all chats at
once, and lets them wait. Answers are checked first: every token of three chats among the
others is the best one by float32, or as near to it as rounding lets one tell.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import threading
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from decode import SHAPES, distance, model, of_transformers
from provenance import provenance, write_results

from anytorch.text.decoders import Decoder
from anytorch.text.generate.kernel import KernelRows, Opened
from anytorch.text.generate.requests import End, TextRequest
from anytorch.text.generate.sampling import Sampling
from anytorch.text.generate.scheduler import Scheduler
from anytorch.text.persistent.launched import LaunchedSteps

ROUNDS, NEW = 3, 192  # chats for each place; tokens of each


def chats(vocabulary: int, count: int) -> list[tuple[list[int], int]]:
    """Prompts, and how many tokens each asks for."""
    dice = random.Random(5)
    return [([dice.randrange(vocabulary) for _ in range(dice.randint(32, 512))], NEW) for _ in range(count)]


def shares(found: list[float]) -> dict[str, float]:
    ordered = sorted(found)
    return {
        "p50_ms": round(statistics.median(ordered) * 1e3, 3),
        "p99_ms": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1e3, 3),
    }


def ours(decoder: Decoder, asked: list[tuple[list[int], int]], at_once: int) -> tuple[dict[str, Any], list[list[int]]]:
    opened = Opened(decoder, lambda rows, positions: LaunchedSteps(decoder, rows, positions), "LaunchedSteps", "")
    scheduler = Scheduler(KernelRows(opened, 60 << 30), most_at_once=at_once, most_waiting=4096, guard=torch.no_grad)

    def run() -> tuple[dict[str, Any], list[list[int]]]:
        requests = [TextRequest(list(ids), Sampling(), new, frozenset(), torch.Generator()) for ids, new in asked]
        gaps: list[list[float]] = [[] for _ in requests]
        firsts: list[float] = [0.0] * len(requests)
        turn, lock = iter(range(len(requests))), threading.Lock()

        def client() -> None:
            while True:
                with lock:
                    number = next(turn, None)
                if number is None:
                    return
                request, begun = requests[number], time.perf_counter()
                scheduler.submit(request)
                last = None
                while not isinstance(event := request.mailbox.get(), End):
                    now = time.perf_counter()
                    if last is None:
                        firsts[number] = now - begun
                    else:
                        gaps[number].append(now - last)
                    last = now
                if event.error is not None:
                    raise event.error

        begun = time.perf_counter()
        clients = [threading.Thread(target=client) for _ in range(at_once)]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
        took = time.perf_counter() - begun
        made = [request.tokens[request.prompt_length :] for request in requests]
        facts = {
            "tokens_per_s": round(sum(map(len, made)) / took, 1),
            "per_token": shares([gap for some in gaps for gap in some]),
            "first": shares(firsts),
        }
        return facts, made

    run()  # compiles and records
    found = run()
    scheduler.close()
    return found


def theirs(decoder: Decoder, asked: list[tuple[list[int], int]], name: str) -> dict[str, Any]:
    """transformers' generate_batch with the same weights."""
    import transformers

    peer = of_transformers(decoder, name)
    settings = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    begun = time.perf_counter()
    made = peer.generate_batch(inputs=[ids for ids, _ in asked[:4]], generation_config=settings)
    warm = time.perf_counter() - begun
    begun = time.perf_counter()
    made = peer.generate_batch(inputs=[ids for ids, _ in asked], generation_config=settings, record_timestamps=True)
    took = time.perf_counter() - begun
    tokens = sum(len(one.generated_tokens) for one in made.values())
    return {
        "tokens_per_s": round(tokens / took, 1),
        "tokens": tokens,
        "per_token": shares([later - one for chat in made.values() for one, later in pairwise(chat.timestamps)]),
        "warm_up_s": round(warm, 1),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="shapes whose name has this part")
    parser.add_argument("--chats", default="16,64")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"what": __doc__, **provenance(), "torch": torch.__version__, "rows": []}
    result["gpu"] = torch.cuda.get_device_name()
    for name in SHAPES:
        if options.only not in name or name == "Llama-3.2-1B":
            continue
        decoder = model(name, torch.bfloat16)
        for count in map(int, options.chats.split(",")):
            asked = chats(decoder.spec.vocabulary, ROUNDS * count)
            facts, made = ours(decoder, asked, count)
            answers = [distance(decoder, asked[number][0], made[number]) for number in (0, count, 2 * count)]
            for one in answers:
                if one["largest_gap"] > 2 * max(one["rounding"], 1e-3 * one["logits_std"]):
                    raise SystemExit(f"{name}, {count} chats: wrong tokens, {one}")
            row: dict[str, Any] = {"name": name, "chats": count, "ours": facts, "answers": answers}
            print(f"{name} x {count}: {facts}", flush=True)
            if find_spec("transformers") is None:
                row["transformers"] = "not installed on that machine"
            else:
                try:
                    row["transformers"] = theirs(decoder, asked, name)
                except Exception as exc:  # noqa: BLE001  (a peer that does not run is a finding)
                    row["transformers"] = f"{type(exc).__name__}: {str(exc)[:300]}"
            print(f"  transformers: {row['transformers']}", flush=True)
            result["rows"].append(row)
            if options.output:
                write_results(options.output, result)
            gc.collect()
            torch.cuda.empty_cache()
        del decoder


if __name__ == "__main__":
    main()
