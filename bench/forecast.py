"""How much does the exact cache save over the published loop, and are the answers the same?

    python bench/forecast.py [--device cpu] [--models mini,small,base] [--horizons 112,120] [--samples 1,5,20] [--quick]

Both sides run the same modules with the same random weights (published configurations), lookback 400, context 512, T 1,
top_p 0.9, one seed. The plain side is the published algorithm: every step runs the whole window of every sample through
the whole model, and draws as `torch.multinomial` does, from noise that both sides share.
Ours is `KronosPredictor`, exact rolling. Each side of each case is a
process of its own (so that peak memory is its own), on the CPU with one thread, whose CPU seconds are what a busy machine
cannot distort much. On an accelerator everything runs in one process, wall seconds after a warm-up, peak memory by the
device's own count. The JSON is written after every row; what `--seconds` leaves out is listed as skipped.

Answers first: the ids of both sides are compared and a case with different ids has no ratio. Where the whole plain loop
would take longer than `--patience` seconds, it is timed at some steps only, spread over all window lengths, and the sum is
interpolated; such a row says `extrapolated` and how many steps were timed, and at these steps the plain loop continues our
ids and must draw the same next id.

What the numbers do not show: trained weights (ids then repeat more, which changes nothing here), reading files, plotting.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from provenance import provenance, write_results

LOOKBACK, CONTEXT, SEED = 400, 512, 11
TIMED_STEPS = 7
# Gigaflops that a step of one 512-row window takes, for --patience.
STEP_GFLOP = {"mini": 4.0, "small": 25.0, "base": 103.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", default="mini,small,base")
    parser.add_argument("--horizons", default="112,120")
    parser.add_argument("--samples", default="1,5,20")
    parser.add_argument("--also", default="", help="our other ways, compared with ours: evict,trim,bfloat16,int8")
    parser.add_argument("--patience", type=float, default=150.0, help="seconds for one plain loop before it is sampled")
    parser.add_argument("--gflops", type=float, default=60.0, help="what the machine does, for --patience")
    parser.add_argument(
        "--profile", action="store_true", help="on an accelerator: print the kernels that take the time"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--rounds", type=int, default=2, help="timed runs of each side, in turns; the better one counts"
    )
    parser.add_argument("--all-ids", action="store_true", help="run the whole published loop whatever it takes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after this long")
    parser.add_argument("--quick", action="store_true", help="mini, horizon 8, 2 samples: shows that all of it runs")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(json.loads(given.child))))
        return
    if given.quick:
        given.models, given.horizons, given.samples = "mini", "8", "2"
    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    report = {
        **provenance(),
        **where(given),
        "lookback": LOOKBACK,
        "context": CONTEXT,
        "rows": rows,
        "skipped": skipped,
    }
    output = given.output or Path(__file__).parent / "results" / f"forecast-{given.device.replace(':', '')}.json"
    for model in given.models.split(","):
        for horizon in map(int, given.horizons.split(",")):
            for samples in map(int, given.samples.split(",")):
                if time.perf_counter() - began > given.seconds:
                    skipped.append(f"{model} {horizon} x{samples}")
                    continue
                row = compare(given, model, horizon, samples)
                rows.append(row)
                print(words(row), flush=True)
                for way in filter(None, given.also.split(",")):
                    print("    " + other_words(row, way, also(given, row, way)), flush=True)
                if not given.quick or given.output:
                    write_results(output, report)
    if skipped:
        print(f"skipped after {given.seconds:.0f} s: {', '.join(skipped)}")
    if not all(row["identical"] for row in rows):
        sys.exit("the two sides do not agree")


def compare(given: argparse.Namespace, model: str, horizon: int, samples: int) -> dict[str, Any]:
    case = {"model": model, "horizon": horizon, "samples": samples, "device": given.device, "threads": given.threads}
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"anytorch-forecast-bench-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    ids = str(folder / "ids.npz")
    ours = start({**case, "side": "ours", "ids": ids, "profile": given.profile})
    windows = sum(min(LOOKBACK + step, CONTEXT) for step in range(horizon)) / CONTEXT
    expected_s = windows * samples * STEP_GFLOP[model] / given.gflops
    whole = given.all_ids or expected_s <= given.patience
    # The sides take turns and are timed equally often; the better run of each counts, and both are kept.
    unit = "cpu_s" if given.device == "cpu" else "wall_s"
    plains = [start({**case, "side": "plain", "ids": ids, "whole": whole})]
    runs = [ours]
    for _ in range(given.rounds - 1):
        runs.append(start({**case, "side": "ours", "ids": ids}))
        plains.append(start({**case, "side": "plain", "ids": ids, "whole": whole}))
    ours, plain = (min(found, key=lambda one: one[unit]) for found in (runs, plains))
    plain["identical"] = all(one["identical"] for one in plains)
    ours["all_s"], plain["all_s"] = ([one[unit] for one in found] for found in (runs, plains))
    row: dict[str, Any] = {**case, "plain": plain, "ours": ours, "identical": plain.pop("identical")}
    row["compared_ids"] = plain.pop("compared_ids")
    if row["identical"]:
        row["ratio_cpu"] = round(plain["cpu_s"] / ours["cpu_s"], 1)
        row["ratio_wall"] = round(plain["wall_s"] / ours["wall_s"], 1)
    return row


def also(given: argparse.Namespace, row: dict[str, Any], way: str) -> dict[str, Any]:
    case = {name: row[name] for name in ("model", "horizon", "samples", "device", "threads")}
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"anytorch-forecast-bench-{os.getpid()}"
    found = start({**case, "side": "ours", "ids": str(folder / "ids.npz"), "way": way})
    row.setdefault("other_ways", {})[way] = found
    return found


def start(case: dict[str, Any]) -> dict[str, Any]:
    if case["device"] != "cpu":
        gc.collect()  # the other side's recordings and caches, so that peak memory is this side's
        return child(case)
    threads = str(case["threads"])
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(case)],
        env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# --- in the child ----------------------------------------------------------------------------------------------------


def child(case: dict[str, Any]) -> dict[str, Any]:
    import torch

    torch.set_num_threads(case["threads"])
    return ours_side(case) if case["side"] == "ours" else plain_side(case)


def parts(case: dict[str, Any]) -> tuple[Any, Any, Any]:
    return made(case["model"], case["horizon"])


@lru_cache(maxsize=1)
def made(name: str, horizon: int) -> tuple[Any, Any, Any]:
    """Model and tokenizer with random weights, and a made-up series: the same in every child."""
    import numpy as np
    import torch

    from anytorch.forecast.inputs import Series
    from anytorch.forecast.model import PUBLISHED, Kronos, KronosTokenizer

    checkpoint = PUBLISHED[f"kronos-{name}"]
    torch.manual_seed(SEED)
    model, tokenizer = Kronos(**checkpoint.config).eval(), KronosTokenizer(**checkpoint.tokenizer_config).eval()
    with torch.no_grad():  # as in the golden cases: logits with a shape, not a flat noise
        for head in (model.head.proj_s1, model.head.proj_s2):
            head.weight.mul_(3)
    walk = np.random.default_rng(SEED).standard_normal((LOOKBACK, 6)).cumsum(0)
    normal = ((walk - walk.mean(0)) / walk.std(0)).astype(np.float32)
    minutes = 570 + 5 * np.arange(LOOKBACK + horizon)  # from 09:30 on Monday, 4 March, every five minutes
    day = minutes // 1440
    stamp = np.stack((minutes % 60, minutes // 60 % 24, day % 7, 4 + day % 27, np.full_like(day, 3)), axis=1)
    scale = np.ones(6, np.float32)
    series = Series("made up", normal, 0 * scale, scale, stamp[:LOOKBACK], stamp[LOOKBACK:], None)
    return model, tokenizer, series


class Meter:
    """CPU and wall seconds, and peak memory, of what happens inside."""

    def __init__(self, device: Any) -> None:
        import anytorch

        self.device, self.anytorch = device, anytorch

    def __enter__(self) -> Meter:
        self.anytorch.synchronize(self.device)
        if self.device.type != "cpu":
            import torch

            torch.get_device_module(self.device).reset_peak_memory_stats()
        self.cpu, self.wall, self.before = time.process_time(), time.perf_counter(), self.resident()
        return self

    def __exit__(self, *about: object) -> None:
        self.anytorch.synchronize(self.device)
        self.cpu, self.wall = time.process_time() - self.cpu, time.perf_counter() - self.wall
        self.peak = self.resident()

    def resident(self) -> int:
        if self.device.type == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return self.anytorch.memory(self.device).peak or 0

    def found(self) -> dict[str, Any]:
        return {
            "cpu_s": round(self.cpu, 4),
            "wall_s": round(self.wall, 4),
            "peak_nbytes": self.peak,
            "peak_before_nbytes": self.before,
        }


def ours_side(case: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    from anytorch.forecast import KronosPredictor
    from anytorch.forecast.decoding.sampling import Sampler

    model, tokenizer, series = parts(case)
    way = case.get("way", "")
    options: dict[str, Any] = {"dtype": way} if way == "bfloat16" else {"quantization": way} if way == "int8" else {}
    rolling = way if way in ("evict", "trim") else "exact"
    threads = case["threads"] if case["device"] == "cpu" else None
    predictor = KronosPredictor(model, tokenizer, case["device"], CONTEXT, threads=threads, **options)
    sampler = Sampler(1.0, 0, 0.9)
    warm = case["device"] != "cpu"
    predictor.decoder()
    warming = []
    if warm:
        warming = settled(
            predictor, lambda: predictor.paths([series], sampler, case["samples"], rolling=rolling, seed=SEED)
        )
    with Meter(predictor.device) as meter:
        (paths,) = predictor.paths([series], sampler, case["samples"], rolling=rolling, seed=SEED)
    found = meter.found() | {"tokens_per_s": round(case["samples"] * case["horizon"] / meter.wall, 1)}
    if warm:
        found["warm_up_s"] = round(sum(warming), 2)
        found["warm_up_forecasts_s"] = [*warming[:4], max(warming)]  # the first four, and the longest of all
        kept = predictor.decoder().kept
        found["recorded"] = kept is not None and kept.recorder is not None and bool(kept.recorder.recordings)
        found["recording_failed"] = "" if kept is None or kept.recorder is None else kept.recorder.failed
        found["no_kernels"] = "nothing is recorded" if kept is None else kept.no_kernels
        full = predictor.decoder().kept_rolled
        found["no_kernels_in_full_windows"] = "nothing is prepared" if full is None else full.no_kernels
        found["choices"] = [asdict(one) for part in (kept, full) if part is not None for one in part.choices.values()]
        found["parts_s"] = parts_of(
            predictor, lambda: predictor.paths([series], sampler, case["samples"], rolling=rolling, seed=SEED)
        )
        if case.get("profile"):
            profile(lambda: predictor.paths([series], sampler, case["samples"], rolling=rolling, seed=SEED))
    if way:
        with np.load(case["ids"]) as exact:
            same = (exact["s1"] == paths.s1) & (exact["s2"] == paths.s2)
            found["same_ids"] = float(same.mean())
            found["first_steps_same_ids"] = float(same[:, :10].mean())
            # Paths part for good once one id differs; the mean of the samples says what that means for a forecast.
            found["mean_difference"] = float(np.abs(exact["normal"].mean(0) - paths.normal.mean(0)).mean())
            other = predictor_spread(exact["normal"])
            found["mean_difference_of_half_the_samples"] = other
    else:
        np.savez(case["ids"], s1=paths.s1, s2=paths.s2, normal=paths.normal)
    return found


def settled(predictor: Any, work: Any) -> list[float]:
    """Forecasts until kernels are compiled, measured (once per machine) and recorded (once per process); their seconds."""
    import anytorch

    seconds: list[float] = []
    more = 4
    while more and sum(seconds) < 150:
        start = time.perf_counter()
        work()
        anytorch.synchronize(predictor.device)
        seconds.append(round(time.perf_counter() - start, 3))
        decoder = predictor.decoder()
        steps = [part for part in (decoder.kept, decoder.kept_rolled) if part is not None]
        more -= all(part.tried_kernels for part in steps)
    return seconds


def parts_of(predictor: Any, work: Any) -> dict[str, float]:
    """Seconds of one more forecast by its parts, waiting for the device after each: their sum is more than a forecast."""
    import anytorch
    from anytorch.forecast.decoding.decoder import Cache, Codec
    from anytorch.forecast.generation.generate import ChunkState
    from anytorch.forecast.generation.steps import RolledSteps, StaticSteps

    seconds: dict[str, float] = {}

    def timed(owner: Any, name: str) -> Any:
        inner = getattr(owner, name)

        def wrapper(*args: Any, **named: Any) -> Any:
            anytorch.synchronize(predictor.device)
            start = time.perf_counter()
            found = inner(*args, **named)
            anytorch.synchronize(predictor.device)
            key = f"{owner.__name__}.{name}"
            seconds[key] = round(seconds.get(key, 0.0) + time.perf_counter() - start, 5)
            return found

        setattr(owner, name, wrapper)
        return owner, name, inner

    patched = [
        timed(owner, name)
        for owner, name in (
            (Codec, "__init__"),
            (Codec, "encode"),
            (Codec, "decode"),
            (Cache, "prefill"),
            (StaticSteps, "run"),
            (RolledSteps, "prepare"),
            (RolledSteps, "run"),
            (ChunkState, "__init__"),
            (ChunkState, "first"),
            (ChunkState, "recomputed"),
            (ChunkState, "next"),
        )
    ]
    try:
        work()
    finally:
        for owner, name, inner in patched:
            setattr(owner, name, inner)
    return seconds


def profile(work: Any) -> None:
    """The kernels that take the time, to standard error."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        work()
    table = found.key_averages().table(sort_by="self_device_time_total", row_limit=30, max_name_column_width=70)
    print(table, file=sys.stderr)


def predictor_spread(normal: Any) -> float | None:
    """How far the means of two halves of the samples are apart: what chance alone does."""
    import numpy as np

    half = len(normal) // 2
    return float(np.abs(normal[:half].mean(0) - normal[half : 2 * half].mean(0)).mean()) if half else None


def plain_side(case: dict[str, Any]) -> dict[str, Any]:
    """The published algorithm over the same modules."""
    import numpy as np
    import torch

    import anytorch
    from anytorch.forecast.decoding.sampling import Noise, Sampler

    model, tokenizer, series = parts(case)
    device = anytorch.resolve(case["device"]).device
    model, tokenizer = model.to(device), tokenizer.to(device)
    sampler, samples, horizon = Sampler(1.0, 0, 0.9), case["samples"], case["horizon"]
    with np.load(case["ids"]) as stored:
        ours = [torch.from_numpy(stored[name]) for name in ("s1", "s2")]
    noise = list(
        zip(range(horizon), Noise.seeded(SEED, samples, (1024, 1024)).steps(torch.arange(samples)), strict=False)
    )
    stamp = torch.from_numpy(np.concatenate((series.stamp, series.future_stamp))).to(device)
    stamp = stamp[None].repeat(samples, 1, 1)
    x = torch.from_numpy(np.clip(series.normal, -5, 5)).to(device)[None].repeat(samples, 1, 1)

    def step(s1: Any, s2: Any, number: int) -> tuple[Any, Any]:
        rows = slice(max(0, s1.shape[1] - CONTEXT), None)
        logits, context = model.decode_s1(s1[:, rows], s2[:, rows], stamp[:, : s1.shape[1]][:, rows])
        first, second = (part.to(device) for part in noise[number][1])
        # What torch.multinomial(p, 1) computes from its own noise: the same arithmetic, with numbers that do not
        # depend on the device.
        one = (sampler.probabilities(logits[:, -1]) / first).argmax(-1, keepdim=True)
        two = (sampler.probabilities(model.decode_s2(context, one)[:, -1]) / second).argmax(-1, keepdim=True)
        return one, two

    with torch.inference_mode():
        if device.type != "cpu":
            step(*tokenizer.encode(x, half=True), 0)
        with Meter(device) as encoding:
            s1, s2 = tokenizer.encode(x, half=True)
        history = (s1, s2)
        if case["whole"]:
            with Meter(device) as loop:
                for number in range(horizon):
                    one, two = step(s1, s2, number)
                    s1, s2 = torch.cat((s1, one), 1), torch.cat((s2, two), 1)
            made = [part[:, LOOKBACK:].cpu() for part in (s1, s2)]
            identical = all(torch.equal(found, wanted) for found, wanted in zip(made, ours, strict=True))
            found, compared = loop.found() | {"extrapolated": False, "timed_steps": horizon}, 2 * samples * horizon
        else:
            found, identical, compared = sampled_loop(step, history, ours, horizon, device)
        whole = [torch.cat((past, new.to(device)), 1)[:, -CONTEXT:] for past, new in zip(history, ours, strict=True)]
        with Meter(device) as decoding:
            tokenizer.decode(whole, half=True)
    for name, key in (("cpu_s", "cpu"), ("wall_s", "wall")):
        found[name] = round(found[name] + getattr(encoding, key) + getattr(decoding, key), 4)
    found["peak_nbytes"] = max(found["peak_nbytes"], decoding.peak)
    found["peak_before_nbytes"] = encoding.before
    found["tokens_per_s"] = round(samples * horizon / found["wall_s"], 1)
    return found | {"identical": identical, "compared_ids": compared}


def sampled_loop(step: Any, history: Any, ours: Any, horizon: int, device: Any) -> tuple[dict[str, Any], bool, int]:
    """Some steps of the loop, each behind our ids; their times interpolated over all steps."""
    import numpy as np
    import torch

    chosen = sorted({round(share * (horizon - 1)) for share in np.linspace(0, 1, TIMED_STEPS)})
    cpu, wall, same = [], [], []
    for number in chosen:
        s1, s2 = (torch.cat((past, new[:, :number].to(device)), 1) for past, new in zip(history, ours, strict=True))
        with Meter(device) as meter:
            one, two = step(s1, s2, number)
        cpu.append(meter.cpu)
        wall.append(meter.wall)
        same += [torch.equal(made[:, 0].cpu(), new[:, number]) for made, new in zip((one, two), ours, strict=True)]
    every = range(horizon)
    found = meter.found() | {
        "cpu_s": round(float(np.interp(every, chosen, cpu).sum()), 4),
        "wall_s": round(float(np.interp(every, chosen, wall).sum()), 4),
        "extrapolated": True,
        "timed_steps": len(chosen),
    }
    return found, all(same), 2 * len(chosen) * len(ours[0])


# --- words -----------------------------------------------------------------------------------------------------------


def words(row: dict[str, Any]) -> str:
    plain, ours = row["plain"], row["ours"]
    seconds = "cpu_s" if row["device"] == "cpu" else "wall_s"
    ratio = row.get("ratio_cpu" if row["device"] == "cpu" else "ratio_wall", "ids differ: no ratio")
    about = f" (from {plain['timed_steps']} steps)" if plain["extrapolated"] else ""
    return (
        f"{row['model']:>5} {LOOKBACK}+{row['horizon']} x{row['samples']:<3} plain {plain[seconds]:9.3f} s{about}  "
        f"ours {ours[seconds]:8.3f} s  {ratio}x  peak {plain['peak_nbytes'] >> 20} -> {ours['peak_nbytes'] >> 20} MiB  "
        f"{ours['tokens_per_s']:.0f} tokens/s  {row['compared_ids']} ids equal: {row['identical']}"
    )


def other_words(row: dict[str, Any], way: str, found: dict[str, Any]) -> str:
    seconds = "cpu_s" if row["device"] == "cpu" else "wall_s"
    chance = found["mean_difference_of_half_the_samples"]
    return (
        f"{way}: {found[seconds]:.3f} s, {found['same_ids']:.1%} of the ids (first ten steps "
        f"{found['first_steps_same_ids']:.1%}), mean forecast moved by {found['mean_difference']:.4f} standard deviations"
        + (f" (chance alone, between halves of the samples: {chance:.4f})" if chance is not None else "")
    )


def where(given: argparse.Namespace) -> dict[str, Any]:
    import torch

    return {"torch": torch.__version__, "threads": given.threads, "device": given.device}


if __name__ == "__main__":
    main()
