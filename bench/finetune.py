"""Fine-tuning: our loop beside the loop of the published scripts, over the same modules, windows and steps.

The published loop: a DataLoader whose workers normalise window by window, float32, the training forward without teacher
forcing, gradients clipped at 3. Ours: windows gathered by the batch, the device's fast precision, the same objective
("published") and our own ("generation"). Random weights of published shapes; generated candles. First the answers: one
float32 step of both must give the same loss. Then they take turns, each in float32 and in the device's fast precision (the
published loop under torch.autocast, as anybody would run it): what is compared is of one precision.

Before that, whether training is right on this device: the losses of the first steps beside those of the CPU, in float32 and
in the device's fast precision; a run that is killed (`kill -9`) and goes on, beside one that was not; and a forecast on the
CPU with the weights that were trained here.

    python bench/finetune.py --device auto --output OUT/finetune.json            (H200: about 90 seconds)
    python bench/finetune.py --device cpu --shapes tiny --steps 4 --output /tmp/finetune.json

What the numbers do not show: reading files, several GPUs, evaluation and saving.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from provenance import provenance, write_results

sys.path[:0] = [str(Path(__file__).parents[1] / "src")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

import anytorch  # noqa: E402
from anytorch.devices.memory import synchronize  # noqa: E402
from anytorch.forecast.candles.generate import sample_market  # noqa: E402
from anytorch.forecast.model import PUBLISHED, Kronos, KronosTokenizer  # noqa: E402
from anytorch.forecast.training import finetune_predictor, finetune_tokenizer  # noqa: E402
from anytorch.forecast.training.finetune import PREDICTOR_PLAN, PredictorObjective  # noqa: E402
from anytorch.forecast.training.loop import Run, TrainingPlan  # noqa: E402
from anytorch.forecast.training.store import RunFolder  # noqa: E402
from anytorch.forecast.training.windows import Windows, as_series, split_windows  # noqa: E402
from anytorch.train import World  # noqa: E402

LOOKBACK, HORIZON = 90, 10  # of the published configuration
NO_DROPOUT = {f"{name}_dropout_p": 0.0 for name in ("ffn", "attn", "resid", "token")}  # so that answers can be compared
TINY = {"s1_bits": 8, "s2_bits": 8, "n_layers": 3, "d_model": 96, "n_heads": 4, "ff_dim": 256, "learn_te": True}


class PublishedWindows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """One window at a time, as the published dataset makes them."""

    def __init__(self, windows: Windows, order: Any) -> None:
        self.windows, self.order = windows, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.windows.starts[self.order[place]]
        rows = slice(start, start + self.windows.length)
        x = self.windows.values[rows].astype(np.float32)
        past = x[: self.windows.lookback]
        x = np.clip((x - past.mean(axis=0)) / (past.std(axis=0) + 1e-5), -self.windows.clip, self.windows.clip)
        return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(self.windows.stamps[rows])


def pair(shape: str) -> tuple[KronosTokenizer, Kronos]:
    torch.manual_seed(0)
    if shape == "tiny":
        tokens = {**PUBLISHED["kronos-small"].tokenizer_config, "s1_bits": 8, "s2_bits": 8, "d_model": 64, "n_heads": 4}
        return KronosTokenizer(**tokens), Kronos(**{**TINY, **NO_DROPOUT})
    found = PUBLISHED[shape]
    return KronosTokenizer(**found.tokenizer_config), Kronos(**{**found.config, **NO_DROPOUT})


def published_loop(
    shape: str, windows: Windows, device: torch.device, batch: int, workers: int, mixed: bool
) -> Callable[[int], float]:
    """`steps → seconds` of the published training step; `mixed`: under autocast to bfloat16, which it does not do itself."""
    tokenizer, model = (module.to(device) for module in pair(shape))
    tokenizer.eval()
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-5, betas=(0.9, 0.95), weight_decay=0.1)
    order = np.random.default_rng(0).permutation(len(windows))
    dataset = PublishedWindows(windows, order)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=batch, num_workers=workers, drop_last=True, persistent_workers=workers > 0
    )

    def steps(count: int) -> float:
        began = time.perf_counter()
        source = iter(loader)
        for _ in range(count):
            x, stamp = (part.to(device) for part in next(source))
            with torch.no_grad():
                s1, s2 = tokenizer.encode(x, half=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
                logits = model(s1[:, :-1], s2[:, :-1], stamp[:, :-1])
                loss, _, _ = model.head.compute_loss(*logits, s1[:, 1:], s2[:, 1:])
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 3.0)
            optimiser.step()
            loss.item()
        synchronize(device)
        return time.perf_counter() - began

    return steps


def our_loop(
    shape: str, splits: dict[str, Windows], device: torch.device, batch: int, objective: str, mixed: bool
) -> Callable[[int], float]:
    tokenizer, model = (module.to(device) for module in pair(shape))
    plan: TrainingPlan = replace(
        PREDICTOR_PLAN, lookback=LOOKBACK, horizon=HORIZON, batch_size=batch, mixed_precision=mixed
    )
    run = Run(PredictorObjective(model, tokenizer, objective), splits, plan, World(device), RunFolder("unused"), {})

    def steps(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            run.take_step()
        synchronize(device)
        if run.recorded is not None and run.recorded.failed:
            print(f"{shape}, {objective}: {run.recorded.failed}")
        return time.perf_counter() - began

    return steps


@torch.no_grad()
def same_answer(shape: str, windows: Windows, device: torch.device) -> float:
    """The largest difference of s1 logits between both ways of preparing and computing a batch, in float32."""
    tokenizer, model = (module.to(device).eval() for module in pair(shape))
    values, stamps = (torch.from_numpy(part).to(device) for part in windows.batch(np.arange(8)))
    theirs = [
        torch.stack(part).to(device)
        for part in zip(*(PublishedWindows(windows, np.arange(8))[n] for n in range(8)), strict=True)
    ]
    logits = []
    for x, stamp in ((values, stamps), theirs):
        s1, s2 = tokenizer.encode(x, half=True)
        logits.append(model.decode_s1(s1[:, :-1], s2[:, :-1], stamp[:, :-1])[0])
    return float((logits[0] - logits[1]).abs().median())


# --- is it right? ----------------------------------------------------------------------------------------------------

FIRST_STEPS = 6
KILLED_AT, RUN_STEPS = 14, 24
JOB = {"lookback": 30, "horizon": 6, "batch_size": 16, "epochs": 2, "steps_per_epoch": RUN_STEPS // 2, "save_every": 6}


def first_losses(shape: str, splits: dict[str, Windows], device: torch.device, mixed: bool) -> list[float]:
    tokenizer, model = (module.to(device) for module in pair(shape))
    plan: TrainingPlan = replace(
        PREDICTOR_PLAN, lookback=LOOKBACK, horizon=HORIZON, batch_size=8, mixed_precision=mixed
    )
    run = Run(PredictorObjective(model, tokenizer), splits, plan, World(device), RunFolder("unused"), {})
    return [float(run.take_step()[0]) for _ in range(FIRST_STEPS)]


def job(given: dict[str, Any]) -> None:
    """In a process of its own: train the tokenizer a little, then the model; perhaps die on the way."""
    folder = Path(given["folder"])
    torch.manual_seed(0)
    tokens, config = pair("tiny")
    start: dict[str, Any] = {**JOB, "device": given["device"], "validation_windows": 64}
    market = sample_market(2, 600, seed=4)
    if not given["resume"]:
        finetune_tokenizer(market, output=folder / "tokenizer", tokenizer=tokens, **start)

    def progress(done: int, total: int, what: str) -> None:
        if done == given["kill_at"]:
            os.kill(os.getpid(), signal.SIGKILL)

    done = finetune_predictor(
        market, output=folder / given["name"], tokenizer=folder / "tokenizer" / "best_model", model=config.config,
        progress=progress, **start,
    )  # fmt: skip
    print(json.dumps({"resumed_from": done.resumed_from, "best_loss": done.best_loss, "first_loss": done.first_loss}))


def start_job(**given: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, __file__, "--output", "unused", "--job", json.dumps(given)],
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip


def killed_and_resumed(device: str) -> dict[str, Any]:
    """The same training with and without a kill; and what the CPU makes of its weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        common = {"folder": name, "device": device}
        cut = start_job(**common, name="cut", kill_at=KILLED_AT, resume=False)
        assert cut.returncode == -signal.SIGKILL, cut.returncode
        resumed = start_job(**common, name="cut", kill_at=-1, resume=True)
        whole = start_job(**common, name="whole", kill_at=-1, resume=True)
        assert resumed.returncode == whole.returncode == 0, (resumed.returncode, whole.returncode)
        told = json.loads(resumed.stdout.splitlines()[-1])
        assert 0 < told["resumed_from"] < KILLED_AT, told
        models = [Kronos.from_pretrained(folder / part / "best_model") for part in ("cut", "whole")]
        weights = [torch.cat([value.flatten() for value in model.parameters()]).detach() for model in models]
        tokenizer = KronosTokenizer.from_pretrained(folder / "tokenizer" / "best_model")
        predictor = anytorch.KronosPredictor(models[1], tokenizer, device="cpu", max_context=64)
        forecast = predictor.predict(
            anytorch.sample_candles(60, freq="5min", seed=1), pred_len=6, seed=1, verbose=False, sample_count=2
        )
        assert np.isfinite(forecast.to_numpy()).all()
    return {
        **told,
        "undisturbed_best_loss": json.loads(whole.stdout.splitlines()[-1])["best_loss"],
        "weights_equal": bool(torch.equal(*weights)),
        "weights_apart": float((weights[0] - weights[1]).norm() / weights[1].norm()),
        "forecast_on_the_cpu": [round(float(value), 4) for value in forecast["close"]],
    }


def checks(shape: str, splits: dict[str, Windows], device: torch.device, name: str) -> dict[str, Any]:
    host = first_losses(shape, splits, torch.device("cpu"), mixed=False)
    here = first_losses(shape, splits, device, mixed=False)
    fast = first_losses(shape, splits, device, mixed=True)
    apart = max(abs(a - b) for a, b in zip(host, here, strict=True))
    assert apart < 0.02, f"the first losses differ from the CPU's by {apart}: {here} {host}"
    found = {"shape": shape, "cpu": host, "device": here, "device_fast": fast, "apart": apart}
    print(f"first losses: CPU {host[0]:.4f} … {host[-1]:.4f}, here {here[-1]:.4f}, fast precision {fast[-1]:.4f}")
    resumed = killed_and_resumed(name)
    print(f"killed and resumed: weights equal {resumed['weights_equal']}, apart {resumed['weights_apart']:.2g}")
    return {"first_losses": found, "killed_and_resumed": resumed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shapes", nargs="+", default=["kronos-small", "kronos-base"])
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no shape after this long")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=("checks", "speed"), help="one half; the other is read from the output file")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(json.loads(options.job))
        return
    found = anytorch.resolve(options.device)
    splits = split_windows(as_series(sample_market(8, 3000, seed=1)), lookback=LOOKBACK, horizon=HORIZON)
    report: dict[str, Any] = {
        **provenance(),
        "device": found.name,
        "torch": torch.__version__,
        "batch": options.batch,
        "rows": LOOKBACK + HORIZON + 1,
        "results": [],
    }
    if options.only == "speed":
        report["checks"] = json.loads(options.output.read_text())["checks"] if options.output.is_file() else None
    else:
        report["checks"] = checks(options.shapes[0], splits, found.device, options.device)
        write_results(options.output, report)
    if options.only == "checks":
        return
    began = time.perf_counter()
    for shape in options.shapes:
        if time.perf_counter() - began > options.seconds:
            print(f"{shape} is left out: {options.seconds:.0f} s are over")
            continue
        difference = same_answer(shape, splits["train"], found.device)
        assert difference < 1e-3, f"{shape}: both ways must compute the same; they differ by {difference}"
        loops = {
            name: published_loop(shape, splits["train"], found.device, options.batch, options.workers, mixed)
            for name, mixed in (("published, float32", False), ("published, bfloat16 autocast", True))
        }
        for name, objective, mixed in (
            ("ours, float32, published objective", "published", False),
            ("ours, float32", "generation", False),
            ("ours, fast precision", "generation", True),
        ):
            loops[name] = our_loop(shape, splits, found.device, options.batch, objective, mixed)
        times: dict[str, list[float]] = {name: [] for name in loops}
        for loop in loops.values():
            loop(6)  # warm up; ours records its fourth step
        for _ in range(options.rounds):
            for name, loop in loops.items():
                times[name].append(loop(options.steps) / options.steps)
        for name, taken in times.items():
            peer = "published, bfloat16 autocast" if "fast" in name or "bfloat16" in name else "published, float32"
            base = statistics.median(times[peer])
            median = statistics.median(taken)
            row = {"shape": shape, "loop": name, "step_s": median, "windows_per_s": options.batch / median}
            report["results"].append(
                {**row, "beside": peer, "speed": base / median, "spread_s": max(taken) - min(taken)}
            )
            print(
                f"{shape:14} {name:36} {median * 1e3:9.2f} ms {options.batch / median:9.1f} windows/s {base / median:5.2f}×"
            )
        write_results(options.output, report)


if __name__ == "__main__":
    main()
