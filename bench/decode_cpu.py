"""One token after the other on the CPU: our kernel beside transformers and llama.cpp, at every precision, in turns.

    python bench/decode_cpu.py [--threads 2] [--precisions float32,bfloat16,int8,int4] [--rounds 5]
                               [--prompt 32] [--tokens 24] [--layers 28] [--no-transformers]
                               [--llama package/bins/linux-x64 [--llama-cpu haswell]] [--folder FOLDER]
                               [--output bench/results/decode-cpu.json]

Random weights of Qwen3-0.6B's shape with a vocabulary of 32,000 and a tied head, batch 1, greedy. For each precision all
contenders have the same weights (rounded each in its own way for int8 and int4) and take turns, a generation at a time; the
table gives the best and the median time per token, without the prompt, and which share of the read bandwidth that is: bytes
of weights that a token reads, by the time, by the bandwidth measured just before and after (torch adds up 256 MiB), the
median of all turns.
Answers come first: after the prompt and some more tokens every contender's logits are compared with the float32 decoder's on
the weights it should have. For int8 and int4 ours must be as close to that as rounding the inputs explains, times 1.5: the
reference is computed with inputs rounded, too. llama.cpp's, which rounds in its own way, must be as close to the unrounded
weights' as ours, times 2.
`--llama` is a folder with llama.cpp's libraries (bench/decode_cpu_llama.py says where from); GGUF files are written to
--folder, and removed again. ANYTORCH_SIMD=avx2 with --llama-cpu haswell compares both without AVX-512.
What it does not show: prompts, several texts, long contexts, quality on real text, other people's machines.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decode_cpu_llama import Llama, libraries, write_gguf
from provenance import provenance, write_results
from safetensors.torch import save_file
from torch import nn

from anytorch import native
from anytorch.text.decoders import Decoder
from anytorch.text.decoders.loading import load_decoder
from anytorch.text.decoders.spec import read_spec
from anytorch.text.generate.bandwidth import measure_read
from anytorch.text.persistent.host import HostKernel
from anytorch.text.persistent.panels import PanelMemory, rounded, unpacked

SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
CHECKED = 4  # tokens after the prompt whose logits are compared
# How far logits may be from the reference's, of their norm. llama.cpp keeps keys and values in float16.
ALLOWED = {"float32": 1e-4, "bfloat16": 0.05}
LLAMA_ALLOWED = {"float32": 5e-3, "bfloat16": 0.05}
PACKED = ("int8", "int4")
Generate = Callable[
    [list[int], int], tuple[float, list[int]]
]  # a prompt and a number of tokens → seconds without the prompt, tokens


def made(layers: int) -> Decoder:
    """In bfloat16, as such models are published."""
    torch.manual_seed(0)
    decoder = Decoder(read_spec({**SHAPE, "num_hidden_layers": layers}, "this bench")).eval().requires_grad_(False)
    for name, parameter in decoder.named_parameters():
        if "norm" not in name:
            parameter.normal_(0, 0.04)
    return as_loaded(decoder.to(torch.bfloat16), torch.bfloat16)


def as_loaded(decoder: Decoder, dtype: torch.dtype) -> Decoder:
    """The same weights in memory as `load_decoder` leaves them, from a folder as they are published."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": decoder.spec.layers}))
        state = {name: value for name, value in decoder.state_dict().items() if name != "lm_head.weight"}  # tied
        save_file(state, Path(folder, "model.safetensors"))
        return load_decoder(folder, "cpu", dtype)


def as_transformers(decoder: Decoder) -> Any:
    """Qwen3ForCausalLM with the same tensors, not copies."""
    import transformers

    spec = decoder.spec
    config = transformers.Qwen3Config(**{**SHAPE, "num_hidden_layers": spec.layers}, attn_implementation="sdpa")
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config)
    model.load_state_dict(decoder.state_dict(), assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its angles are no part of the state
    return model.eval()


# --- contenders --------------------------------------------------------------------------------------------------------


def ours(kernel: HostKernel) -> Generate:
    begun = 0.0
    read = kernel.read

    def read_and_look(row: int, ids: Any) -> torch.Tensor:
        nonlocal begun
        logits = read(row, ids)
        begun = time.perf_counter()
        return logits

    kernel.read = read_and_look  # type: ignore[method-assign]

    def generate(ids: list[int], tokens: int) -> tuple[float, list[int]]:
        (found,) = kernel.generate([ids], tokens + 1)
        return time.perf_counter() - begun, found

    return generate


def theirs(model: Any) -> Generate:
    from transformers import DynamicCache

    @torch.no_grad()
    def generate(ids: list[int], tokens: int) -> tuple[float, list[int]]:
        cache = DynamicCache()
        found = [int(model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits[0, -1].argmax())]
        begun = time.perf_counter()
        for _ in range(tokens):
            found.append(int(model(torch.tensor([[found[-1]]]), past_key_values=cache).logits[0, -1].argmax()))
        return time.perf_counter() - begun, found

    return generate


def llamas(llama: Llama, vocabulary: int) -> Generate:
    def generate(ids: list[int], tokens: int) -> tuple[float, list[int]]:
        llama.clear()
        found = [int(llama.logits(ids, vocabulary).argmax())]
        begun = time.perf_counter()
        for _ in range(tokens):
            found.append(int(llama.logits([found[-1]], vocabulary).argmax()))
        return time.perf_counter() - begun, found

    return generate


# --- answers -----------------------------------------------------------------------------------------------------------


def of_unpacked(decoder: Decoder, precision: str, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's logits with the weights that the kernel's panels stand for; and with inputs rounded as there, too."""
    plain = Decoder(decoder.spec).eval().requires_grad_(False)
    plain.load_state_dict(decoder.state_dict())
    for layer in plain.modules():
        if isinstance(layer, nn.Linear):
            memory = PanelMemory([tuple(layer.weight.shape)], precision)
            layer.weight = nn.Parameter(unpacked(memory.add(layer.weight)), requires_grad=False)
    logits = reference(plain, ids)
    for layer in plain.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(lambda _layer, given: (rounded(given[0]),))
    return logits, reference(plain, ids)


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def reference(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    """float32 logits of the last CHECKED of some tokens."""
    wide = (
        decoder if decoder.lm_head.weight.dtype == torch.float32 else Decoder(decoder.spec).eval().requires_grad_(False)
    )
    if wide is not decoder:
        wide.load_state_dict(decoder.state_dict())
    return wide([ids])[0, -CHECKED:]


def kernel_logits(kernel: HostKernel, ids: list[int]) -> torch.Tensor:
    """By a new kernel, and all of it by the kernel: `read` would have the decoder's own weights."""
    rows = []
    for token in ids:
        kernel.follow(0, token)
        rows.append(kernel.step()[0].clone())
    return torch.stack(rows[-CHECKED:])


def must_be(what: str, error: float, allowed: float) -> None:
    if not error <= allowed:
        raise SystemExit(f"{what} is wrong: its logits are off by {error:.2g} of their norm, {allowed:.2g} is allowed")


# --- one precision -----------------------------------------------------------------------------------------------------


def compare(base: Decoder, precision: str, llama: Any, options: argparse.Namespace) -> dict[str, Any]:
    decoder = base
    if precision == "float32":
        decoder = as_loaded(base, torch.float32)
    ids = torch.randint(
        0, base.spec.vocabulary, (options.prompt + CHECKED,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    unrounded = reference(decoder, ids)
    kernel = HostKernel(
        decoder,
        positions=512,
        threads=options.threads,
        weights=precision if precision in PACKED else None,  # type: ignore[arg-type]
    )
    wanted, allowed = unrounded, ALLOWED.get(precision, 0.0)
    if precision in PACKED:
        wanted, explained = of_unpacked(base, precision, ids)
        allowed = 1.5 * off(explained, wanted)
    found = kernel_logits(kernel, ids)
    errors = {"anytorch": off(found, wanted)}
    must_be("ours", errors["anytorch"], allowed)
    to_unrounded = {"anytorch": off(found, unrounded)}
    nbytes = {"anytorch": kernel.weight_nbytes}
    runs = {"anytorch": ours(kernel)}
    if precision not in PACKED and not options.no_transformers:
        model = as_transformers(decoder).requires_grad_(False)
        errors["transformers"] = off(model(torch.tensor([ids])).logits[0, -CHECKED:], wanted)
        must_be("transformers", errors["transformers"], allowed)
        runs["transformers"], nbytes["transformers"] = theirs(model), nbytes["anytorch"]
    peer = None
    if llama is not None:
        path = options.folder / f"decode-cpu-{base.spec.layers}-{precision}.gguf"
        nbytes["llama.cpp"] = write_gguf(base, precision, path)
        peer = Llama(llama, path, options.threads)
        peer.logits(ids[:-CHECKED], base.spec.vocabulary)
        rows = [torch.from_numpy(peer.logits([token], base.spec.vocabulary).copy()) for token in ids[-CHECKED:]]
        to_unrounded["llama.cpp"] = off(torch.stack(rows), unrounded)
        must_be("llama.cpp", to_unrounded["llama.cpp"], LLAMA_ALLOWED.get(precision) or 2 * to_unrounded["anytorch"])
        runs["llama.cpp"] = llamas(peer, base.spec.vocabulary)
    times: dict[str, list[float]] = {name: [] for name in runs}
    shares: dict[str, list[float]] = {name: [] for name in runs}
    bandwidths = []
    for turn in range(options.rounds + 1):
        for name, generate in runs.items():
            # A machine's neighbours take bandwidth for seconds at a time: what counts is what there was meanwhile.
            before = measure_read(torch.device("cpu"))
            seconds, _tokens = generate(ids, options.tokens)
            after = measure_read(torch.device("cpu"))
            if turn:  # the first turn warms up
                times[name].append(seconds / options.tokens * 1e3)
                shares[name].append(nbytes[name] / 1e6 / times[name][-1] / ((before + after) / 2))
                bandwidths += [before, after]
    if peer is not None:
        peer.close()
        path.unlink()
    best = {name: min(taken) for name, taken in times.items()}
    print(f"{precision}: {max(bandwidths):.1f} GB/s read at best (median {statistics.median(bandwidths):.1f})")
    entry: dict[str, Any] = {"precision": precision, "gb_per_s": bandwidths, "contenders": {}}
    for name, taken in times.items():
        share = statistics.median(shares[name])
        ratios = [a / b for a, b in zip(taken, times["anytorch"], strict=True)]  # neighbours in time
        print(
            f"    {name:13} {best[name]:7.2f} ms/token at best, median {statistics.median(taken):7.2f};"
            f" {share:4.0%} of the bandwidth; {statistics.median(ratios):.2f} times ours",
            flush=True,
        )
        entry["contenders"][name] = {
            "ms_per_token": taken,
            "weight_nbytes": nbytes[name],
            "share_of_bandwidth": shares[name],
            "times_ours": ratios,
            "logits_off": errors.get(name),
            "logits_off_unrounded": to_unrounded.get(name),
        }
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precisions", default="float32,bfloat16,int8,int4")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--llama-cpu")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    llama, version = libraries(options.llama, options.llama_cpu) if options.llama else (None, None)
    start = time.perf_counter()
    base = made(options.layers)
    results = []
    for precision in options.precisions.split(","):
        results.append(compare(base, precision, llama, options))
        gc.collect()
    body = {
        "what": "decode_cpu",
        **provenance(),
        "simd": native.level().name,
        "threads": options.threads,
        "prompt": options.prompt,
        "tokens": options.tokens,
        "shape": {**SHAPE, "num_hidden_layers": options.layers},
        "torch": torch.__version__,
        "llama_cpp": version,
        "load_average_after": os.getloadavg()[0],
        "seconds": round(time.perf_counter() - start, 1),
        "results": results,
    }
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_results(options.output, body)
        print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
