"""Decoding on a GPU: one text in one launch, several by a recorded step of our kernels, beside recorded steps of torch's.

    python bench/decode.py                                          three shapes with random weights, bfloat16
    python bench/decode.py --rows 1,16                              one text, and sixteen at once (1, 4, 8 and 16 else)
    python bench/decode.py --only 0.6B --compiled                   one, and torch.compile's step (a minute to compile)
    python bench/decode.py --only 8B --rows 1 --weights int8,int4   one text with packed weights, too
    python bench/decode.py --output bench/results/decode-h200.json

64 tokens of context, 1,024 new ones. Answers first: every token of ours is compared, by the decoder in float32 where that
fits and in its own dtype, with the best one; the largest distance of logits is printed beside the rounding of the dtype.
Then all sides take turns, three rounds; times are medians of ms per token of each text. "one launch" is timed from its
launch to its end, divided by the tokens. A recorded step is replayed 32 times at each of five contexts between 64 and
1,088, in recordings of the next power of two, and averaged: nothing of the host is in it. "generate" is our step with all
of the host: 256 new tokens by one call, wall time. "scheduled" is what `TextGenerator` computes, without its tokenizer: as
many requests as texts, greedy, from the moment all have their first token to the end of all, wall time; "by chance" is the
same with temperature 0.7, top_k 20 and top_p 0.8. "transformers" (where installed) is its `generate` with the same
weights, 16 tokens, wall time; "transformers' static step" (with --compiled) is the same with its static cache, torch.compile
and CUDA graphs, 256 tokens. torch.compile's step has a static cache of 1,089 places, and is recorded, too.

Packed weights ("int4 launch") are compared with what they stand for: the gap may be as large as what rounding the inputs
of the reference to 8 bits makes of its logits.

The share is of the rate at which this GPU reads 8 GB, measured in the same run: weights are all that counts as read.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write_results

from anytorch.text.decoders import Decoder
from anytorch.text.decoders.spec import DecoderSpec, Rotary
from anytorch.text.decoders.steps import RecordedSteps
from anytorch.text.generate.kernel import KernelRows, Opened
from anytorch.text.generate.requests import End, TextRequest
from anytorch.text.generate.sampling import Sampling
from anytorch.text.generate.scheduler import Scheduler
from anytorch.text.persistent.cuda import SOURCE, CudaKernel, build_on
from anytorch.text.persistent.cuda_weights import PackedDecoder
from anytorch.text.persistent.fused import FusedSteps
from anytorch.text.persistent.launched import LaunchedSteps
from anytorch.text.persistent.nvrtc import compile_ahead
from anytorch.text.persistent.panels import rounded

CONTEXT, NEW, ROUNDS, REPLAYS = 64, 1024, 3, 32
SHAPES = {  # as their config.json says; vocabulary, width, layers, heads, heads of keys, head, inner
    "Qwen3-0.6B": ("qwen3", 151_936, 1024, 28, 16, 8, 128, 3072, True, True),
    "Llama-3.2-1B": ("llama", 128_256, 2048, 16, 32, 8, 64, 8192, False, True),
    "Qwen3-8B": ("qwen3", 151_936, 4096, 36, 32, 8, 128, 12_288, True, False),
}


def spec_of(name: str) -> DecoderSpec:
    family, vocabulary, width, layers, heads, kv_heads, head, inner, qk_norm, tied = SHAPES[name]
    return DecoderSpec(
        *(family, vocabulary, width, layers, heads, kv_heads, head, inner, 40_960, 1e-6, Rotary(theta=1e6)),
        qk_norm=qk_norm,
        tied=tied,
        windows=(0,) * layers,
    )


def model(name: str, dtype: torch.dtype) -> Decoder:
    """Random weights of a shape, such that every layer and every word counts."""
    spec = spec_of(name)
    tied = spec.tied
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


def prompt(spec: DecoderSpec, seed: int) -> list[int]:
    return torch.randint(0, spec.vocabulary, (CONTEXT,), generator=torch.Generator().manual_seed(seed)).tolist()


def checked(decoder: Decoder, prompts: list[list[int]], texts: list[list[int]], what: str) -> list[dict[str, float]]:
    answers = [distance(decoder, ids, made) for ids, made in zip(prompts, texts, strict=True)]
    for one in answers:
        if one["largest_gap"] > 2 * max(one["rounding"], 1e-3 * one["logits_std"]):
            raise SystemExit(f"{what}: wrong tokens, {one}")
    return answers


def steps_timed(steps: RecordedSteps) -> Callable[[], float]:
    contexts = [CONTEXT + NEW * part // 4 for part in range(5)]

    def timed() -> float:
        found = []
        for context in contexts:
            for row in range(steps.rows):
                steps.lengths[row] = context
                steps._put(row, 5 + row, context - 1)
            for _ in range(2):  # the second is recorded, if it was not
                steps.step()
            found.append(milliseconds(lambda: [steps.step() for _ in range(REPLAYS)]) / REPLAYS)
        return (sum(found) - (found[0] + found[-1]) / 2) / 4

    return timed


def of_transformers(decoder: Decoder, name: str) -> Any:
    """transformers' model of a shape with the decoder's own weights."""
    import transformers

    family, vocabulary, width, layers, heads, kv_heads, head, inner, _, tied = SHAPES[name]
    config = getattr(transformers, {"qwen3": "Qwen3Config", "llama": "LlamaConfig"}[family])(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head, intermediate_size=inner, tie_word_embeddings=tied,
        max_position_embeddings=40_960, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    kind = getattr(transformers, {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[family])
    with torch.device("meta"):
        made = kind(config)
    made.load_state_dict(decoder.state_dict(), strict=False, assign=True)
    made.model.rotary_emb = type(made.model.rotary_emb)(config)  # its angles are no parameters
    return made.to("cuda").eval()


def transformers_timed(peer: Any, given: list[list[int]], new: int, **options: Any) -> Callable[[], float]:
    """ms per token of `generate`, greedy, with its default cache or as the options ask."""
    ids = torch.tensor(given, device="cuda")
    mask = torch.ones_like(ids)

    def timed() -> float:
        took = []
        for count in (1, new):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            made = peer.generate(
                ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, **options
            )
            torch.cuda.synchronize()
            assert made.shape[1] == ids.shape[1] + count
            took.append(time.perf_counter() - begun)
        return (took[1] - took[0]) * 1e3 / (new - 1)

    return timed


class Compiled(RecordedSteps):
    """A step by torch.compile, over all places there are at any time."""

    def _computed(self, rows: int, places: int) -> torch.Tensor:
        made: torch.Tensor = self._compiled(self.rows, self.positions)
        return made

    @functools.cached_property
    def _compiled(self) -> Any:
        return torch.compile(super()._computed, dynamic=False)


def scheduled(decoder: Decoder, given: list[list[int]], new: int, sampling: Sampling) -> Callable[[], float]:
    """ms per token of as many requests as prompts, as `TextGenerator`'s worker computes them."""
    opened = Opened(decoder, lambda rows, positions: LaunchedSteps(decoder, rows, positions), "LaunchedSteps", "")
    scheduler = Scheduler(KernelRows(opened, 60 << 30), most_at_once=len(given), most_waiting=1000, guard=torch.no_grad)

    def timed() -> float:
        requests = [
            TextRequest(list(ids), sampling, new, frozenset(), torch.Generator().manual_seed(row))
            for row, ids in enumerate(given)
        ]
        for request in requests:
            scheduler.submit(request)
        for request in requests:
            first = request.mailbox.get()
            if isinstance(first, End):
                raise SystemExit(f"a request ended with {first}")
        begun, least = time.perf_counter(), min(request.made for request in requests)
        for request in requests:
            while not isinstance(event := request.mailbox.get(), End):
                pass
            if event.error is not None or request.made != new:
                raise SystemExit(f"a request ended after {request.made} of {new} tokens: {event}")
        return (time.perf_counter() - begun) * 1e3 / (new - least)

    return timed


def packed_side(decoder: Decoder, weights: str, ids: list[int], answers: dict[str, Any]) -> Callable[[], float]:
    """One launch with packed weights, after its tokens were compared with what they stand for. The decoder gets those."""
    packed = PackedDecoder(decoder, weights)
    packed.lend(decoder)
    kernel = CudaKernel(decoder, CONTEXT + NEW + 1, weights=packed)
    made = kernel.generate(ids, 256)
    whole = [ids + made[:-1]]
    truth = decoder(whole)[0, len(ids) - 1 :].float()
    hooks = [
        one.register_forward_pre_hook(lambda _, given: (rounded(given[0]),))
        for one in decoder.modules()
        if isinstance(one, torch.nn.Linear)
    ]
    rough = decoder(whole)[0, len(ids) - 1 :].float()
    for hook in hooks:
        hook.remove()
    gap = truth.amax(-1) - truth[torch.arange(len(made)), torch.tensor(made)]
    rounding = float((truth - rough).abs().max())
    found = {"same": int((gap == 0).sum()), "of": len(made), "largest_gap": float(gap.max()), "rounding": rounding}
    answers[f"{weights} launch"] = [{**found, "logits_std": float(truth.std()), "nbytes": packed.nbytes}]
    if found["largest_gap"] > 2 * rounding:
        raise SystemExit(f"{weights}: wrong tokens, {found}")
    return launch_timed(kernel, ids)


def launch_timed(kernel: CudaKernel, ids: list[int]) -> Callable[[], float]:
    def launched() -> float:
        kernel.read(ids)
        counted: list[int] = []
        return milliseconds(lambda: counted.extend(kernel.follow(5, NEW))) / len(counted)

    return launched


@torch.no_grad()
def measure(
    decoder: Decoder,
    name: str,
    rows: int,
    rate: float,
    compiled: bool,
    weights: list[str],
    only: list[str],
    rounds: int,
) -> dict[str, Any]:
    spec, positions = decoder.spec, CONTEXT + NEW + 1
    ids, answers = prompt(spec, 1), {}
    packed_nbytes: dict[str, int] = {}
    sides: dict[str, Callable[[], float]] = {}
    if rows == 1:
        kernel = CudaKernel(decoder, positions=positions)
        given = [prompt(spec, seed) for seed in range(3)]
        answers["one launch"] = checked(decoder, given, [kernel.generate(one, 256) for one in given], name)
        sides["one launch"] = launch_timed(kernel, ids)
    steps = FusedSteps(decoder, rows, positions)
    given = [prompt(spec, seed) for seed in range(rows)]
    if not only or {"our step", "generate"} & set(only):
        made = steps.generate(given, 256)
        answers["our step"] = checked(decoder, given[:4], made[:4], f"{name}, {rows} texts")

    def whole() -> float:
        begun = time.perf_counter()
        first = steps.generate(given, 1)
        read_s = time.perf_counter() - begun
        begun = time.perf_counter()
        texts = steps.generate(given, 257)
        assert [text[:1] for text in texts] == first
        return (time.perf_counter() - begun - read_s) * 1e3 / 256

    sides.update({"our step": steps_timed(steps), "generate": whole})
    sides["torch's step"] = steps_timed(RecordedSteps(decoder, rows, positions))
    new = NEW if rows == 1 else 256
    sides["scheduled"] = scheduled(decoder, given, new, Sampling())
    sides["by chance"] = scheduled(decoder, given, 256, Sampling(0.7, 0.8, 20))
    if find_spec("transformers") is not None:
        peer = of_transformers(decoder, name)
        sides["transformers"] = transformers_timed(peer, given, 17)
        if compiled:
            static = transformers_timed(peer, given, 257, cache_implementation="static")
            sides["transformers' static step"] = static
    if compiled:
        sides["torch.compile's step"] = steps_timed(Compiled(decoder, rows, positions))
    for one in weights if rows == 1 else ():  # last, as the decoder gets what each stands for
        copied = model(name, decoder.lm_head.weight.dtype)
        sides[f"{one} launch"] = packed_side(copied, one, ids, answers)
        packed_nbytes[f"{one} launch"] = answers[f"{one} launch"][0]["nbytes"]
    if only:
        sides = {side: run for side, run in sides.items() if side in only}
    for side, run in sides.items():
        if "launch" not in side and side != "scheduled":  # these have nothing to record, and have run above
            run()
    found: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, run in sides.items():
            found[side].append(run())
    nbytes = spec.weight_numbers() * decoder.lm_head.weight.element_size()
    ms = {side: statistics.median(times) for side, times in found.items()}
    return {
        "name": name,
        "rows": rows,
        "ms": {side: round(one, 4) for side, one in ms.items()},
        "floor_ms": round(nbytes / rate * 1e3, 4),
        "share": {side: round(packed_nbytes.get(side, nbytes) / rate * 1e3 / one, 3) for side, one in ms.items()},
        "answers": answers,
    }


def compile_all(weights: dict[str, list[str]], dtype: torch.dtype) -> None:
    """Kernels of all shapes at once: one after the other they would take longer than the measurements."""
    device = torch.device("cuda", torch.cuda.current_device())
    builds = [
        build_on(device, spec_of(name), dtype, bits)
        for name, packed in weights.items()
        for bits in (16, *(int(one.removeprefix("int")) for one in packed))
    ]
    with ThreadPoolExecutor(len(builds)) as pool:
        for made in [pool.submit(compile_ahead, SOURCE, dict(build.sizes), device) for build in builds]:
            made.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="shapes whose name has this part")
    parser.add_argument("--rows", default="1,4,8,16", help="texts at once; default: %(default)s")
    parser.add_argument("--compiled", action="store_true", help="torch.compile's step, too")
    parser.add_argument("--weights", default="", help="packed weights for one text, too: int8,int4")
    parser.add_argument("--packed", default="", help="shapes that --weights are for: whose name has this part")
    parser.add_argument("--sides", default="", help="only these, by their names in the result: one launch,scheduled")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rate = read_rate()
    weights = [one for one in options.weights.split(",") if one]
    sides = [one for one in options.sides.split(",") if one]
    result: dict[str, Any] = {"what": __doc__, **provenance(), "torch": torch.__version__, "dtype": options.dtype}
    result.update(gpu=torch.cuda.get_device_name(), read_TB_per_s=round(rate / 1e12, 3), rows=[])
    names = [name for name in SHAPES if not options.only or options.only in name]
    if "1" in options.rows.split(","):
        compile_all({name: weights if options.packed in name else [] for name in names}, getattr(torch, options.dtype))
    for name in names:
        decoder = model(name, getattr(torch, options.dtype))
        for rows in map(int, options.rows.split(",")):
            own = weights if options.packed in name else []
            row = measure(decoder, name, rows, rate, options.compiled, own, sides, options.rounds)
            result["rows"].append(row)
            times = "  ".join(f"{side} {ms:.3f} ms ({row['share'][side]:.0%})" for side, ms in row["ms"].items())
            every = [one for some in row["answers"].values() for one in some]
            gap, rounding = (max(one[what] for one in every) for what in ("largest_gap", "rounding"))
            print(
                f"{name:14} x {rows:2} {times}  floor {row['floor_ms']:.3f} | furthest from the best {gap:.2g}, "
                f"rounding {rounding:.2g}",
                flush=True,
            )
            if options.output:
                write_results(options.output, result)
            gc.collect()
            torch.cuda.empty_cache()
        del decoder


if __name__ == "__main__":
    main()
