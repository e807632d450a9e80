"""What the job adds to the kernel on a CPU: time per token by the kernel, by TextGenerator and by the service's stream.

    python bench/decode_job.py [--threads 2] [--tokens 256] [--rounds 5] [--layers 28] [--shapes tiny,0.6B]
                               [--output bench/results/decode-job.json]

The model that comes with anytorch (3.5 million weights, a token takes a fraction of a millisecond) and random weights of
Qwen3-0.6B's shape with a vocabulary of 32,000 in bfloat16. Greedy, one request. Answers come first: all three must have
written the same. Then each takes its turn, `--rounds` times. Counted is the time from the first token to the last, at the
client, by the clock; and the processor time of the whole process (kernel, TextGenerator), which a busy machine disturbs
less: workers that wait for one another look on, so it is a little more than the work. The service is a process of its own.
What it does not show: several requests, prompts, GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from decode_cpu import SHAPE
from provenance import provenance, write_results
from safetensors.torch import save_file

import anytorch
from anytorch import native
from anytorch.text.decoders import Decoder, load_decoder
from anytorch.text.decoders.spec import read_spec
from anytorch.text.generate.loading import TINY_FOLDER
from anytorch.text.persistent.host import HostKernel

PROMPT = "The with statement is used to wrap the execution of a block"


def large(folder: Path, layers: int) -> Path:
    """Random weights in bfloat16, with the small model's tokenizer."""
    torch.manual_seed(0)
    shape = {**SHAPE, "num_hidden_layers": layers, "architectures": ["Qwen3ForCausalLM"]}
    decoder = Decoder(read_spec(shape, "SHAPE")).requires_grad_(False).to(torch.bfloat16)
    state = {name: one.contiguous() for name, one in decoder.state_dict().items() if name != "lm_head.weight"}
    save_file(state, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_FOLDER / name, folder / name)
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def by_kernel(kernel: HostKernel, ids: list[int], tokens: int) -> tuple[list[int], float, float]:
    """Tokens; seconds by the clock and of the processor for all but the first."""
    first = int(kernel.read(0, ids).argmax())
    kernel.follow(0, first)
    clock, used = time.perf_counter(), time.process_time()
    (made,) = kernel.ahead([0], tokens - 1)
    return [first, *made], time.perf_counter() - clock, time.process_time() - used


def by_generator(generator: anytorch.TextGenerator, ids: list[int], tokens: int) -> tuple[list[int], float, float]:
    clock = used = 0.0
    with generator.stream(ids, max_tokens=tokens, temperature=0.0, repetition_penalty=1.0) as stream:
        while stream.completion_tokens < 1 and stream.finish_reason is None:
            next(stream, "")
        clock, used = time.perf_counter(), time.process_time()
        for _ in stream:
            pass
        seconds, work = time.perf_counter() - clock, time.process_time() - used
        return stream._request.tokens[len(ids) :], seconds, work


def by_service(client: httpx.Client, model: str, tokens: int) -> tuple[str, int, float]:
    """The text, the number of its tokens, and seconds from the first event to the last."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True}
    text, clock, usage = "", 0.0, {}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            clock = clock or time.perf_counter()
            text += chunk["choices"][0]["text"]
            usage = chunk.get("usage") or usage
        return text, usage["completion_tokens"], time.perf_counter() - clock


@contextmanager
def service(folder: Path) -> Iterator[httpx.Client]:
    command = [sys.executable, "-m", "anytorch", "serve", "--port", "0", "--json", "--no-forecast", "--no-browser"]
    process = subprocess.Popen([*command, "--model", str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        with httpx.Client(base_url=json.loads(process.stdout.readline())["url"], timeout=600) as client:
            yield client
    finally:
        process.terminate()
        process.wait()


def compare(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    tokens = options.tokens if name == "tiny" else min(options.tokens, options.large_tokens)
    with anytorch.TextGenerator(folder, device="cpu") as generator, service(folder) as client:
        ids = generator.tokenize(PROMPT)
        kernel = HostKernel(load_decoder(folder), positions=len(ids) + tokens + 8, threads=options.threads)
        ends = generator._ends["text"]
        wanted, *_ = by_kernel(kernel, ids, tokens)
        if set(wanted) & ends:
            tokens = next(place for place, token in enumerate(wanted) if token in ends)
            wanted = wanted[:tokens]
        if by_generator(generator, ids, tokens)[0] != wanted:
            raise SystemExit(f"{name}: TextGenerator has written other tokens than the kernel")
        times: dict[str, list[float]] = {"kernel": [], "TextGenerator": [], "service": []}
        work: dict[str, list[float]] = {"kernel": [], "TextGenerator": []}
        turns: list[tuple[str, Callable[[], Any]]] = [
            ("kernel", lambda: by_kernel(kernel, ids, tokens)),
            ("TextGenerator", lambda: by_generator(generator, ids, tokens)),
            ("service", lambda: by_service(client, folder.name, tokens)),
        ]
        text = generator.decode(wanted) if name == "tiny" else None  # random tokens have no text of their own
        for turn in range(options.rounds + 1):
            for who, call in turns:
                made, count_or_seconds, last = call()
                if who == "service":
                    if text is not None and made != text:
                        raise SystemExit(f"{name}: the service has written another text than the kernel")
                    count, seconds = count_or_seconds, last
                else:
                    count, seconds = tokens, count_or_seconds
                if turn:
                    times[who].append(seconds / (count - 1) * 1e3)
                    if who in work:
                        work[who].append(last / (count - 1) * 1e3)
    print(f"{name}: {tokens} tokens")
    entry: dict[str, Any] = {"shape": name, "tokens": tokens, "ms_per_token": times, "cpu_ms_per_token": work}
    for who, taken in times.items():
        ratio = statistics.median(a / b for a, b in zip(taken, times["kernel"], strict=True))
        spent = f", processor {min(work[who]):.4f} ms" if who in work else ""
        middle = statistics.median(taken)
        print(
            f"    {who:14} {min(taken):8.4f} ms/token at best, median {middle:8.4f}; {ratio:.3f} of the kernel's{spent}"
        )
        entry.setdefault("times_the_kernels", {})[who] = ratio
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--large-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--shapes", default="tiny,0.6B")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.shapes.split(","):
            if name == "tiny":  # greedy without its own settings: a penalty is no part of the comparison
                folder = Path(scratch) / "tiny-plain"
                shutil.copytree(TINY_FOLDER, folder)
                (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
            else:
                folder = Path(scratch) / "large"
                folder.mkdir()
                large(folder, options.layers)
            results.append(compare(name, folder, options))
    body = {"what": "decode_job", **provenance(), "simd": native.level().name, "threads": options.threads,
            "load_average_after": os.getloadavg()[0], "results": results}  # fmt: skip
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_results(options.output, body)
        print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
