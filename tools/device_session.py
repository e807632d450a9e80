"""The measurements that want a GPU, by name: one short command on a machine that is lent for minutes.

    python3 tools/device_session.py --list
    python3 tools/device_session.py --commit "$COMMIT" --output "$OUT" tests embed modes

The machine's own Python runs them, with what it lacks from `.carry/` (tools/device-carry.sh; all-MiniLM-L6-v2's folder as
`.carry/minilm`, ComfyUI's tree as `.carry/comfyui`). A step is left out, and says so, when less than its usual time is left
of `--seconds`; one that exceeds its limit is interrupted, and what it has written by then is kept. After every step all
results and logs are packed into OUTPUT/results.tar.gz: a machine that is taken away costs one step. Unpack it
among the results, then `python docs/tools/benchmark_tables.py`.

Exit status: 1 when a step failed, was cut off or left out.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAUSE_S = 15  # from the interrupt to the kill: a bench writes what it has


@dataclass(frozen=True)
class Step:
    """`{}` in the command stands for the results file, whose name is `file`. Seconds with `taken` were measured there."""

    why: str
    command: str
    file: str
    seconds: int
    taken: bool = False


STEPS = {
    "tests": Step("everything on the card against the CPU", "tests/device/run.py", "device-tests-h200", 180),
    "compile": Step(
        "torch.compile on CUDA", "bench/compile.py --device cuda --dtype bfloat16 --output {}", "compile-h200", 150
    ),
    "graphs": Step(
        "kernel graphs on CUDA", "bench/graphs.py --device cuda --seconds 400 --output {}", "graphs-h200", 430
    ),
    "graphs-webgpu": Step(
        "kernel graphs through Vulkan, against our own ops",
        "bench/graphs.py --device webgpu --batches 1,8 --seconds 240 --output {}",
        "graphs-webgpu-h200",
        260,
    ),
    "embed": Step(
        "the page says 'not measured fairly'",
        "bench/embed_gpu.py --model .carry/minilm --output {}",
        "embed-h200",
        200,
    ),
    "modes": Step(
        "no file; 33 MiB over a budget are unexplained",
        "bench/modes.py --device cuda --one-process --layers 12 --width 1024 --rows 8 --tokens 512 --output {}",
        "modes-h200",
        120,
    ),
    "samples": Step(
        "the samples page has reasons that were not kept",
        "tools/run_seed_samples.py --quick --jobs 8 --json {}",
        "seed-samples-h200",
        200,
    ),
    "first-answer": Step(
        "MiniLM's first answer through Vulkan",
        "bench/webgpu_first_answer.py --output {}",
        "webgpu-first-answer-h200",
        20,
    ),
    "webgpu": Step(
        "webgpu beside CUDA, all sections", "bench/webgpu_gpu.py --budget 300 --output {}", "webgpu-h200", 330
    ),
    "webgpu-half": Step(
        "matrix cores in float16, a U-Net, a language model's training: never run",
        "bench/webgpu_gpu.py --only half --budget 200 --output {}",
        "webgpu-h200-half",
        230,
    ),
    "tiles": Step(
        "what holds back float16 products: 188 of the 300 TFLOP/s wanted",
        "bench/webgpu_tiles.py --seconds 90 --output {}",
        "webgpu-tiles-h200",
        100,
    ),
    "stand-in": Step(
        "webgpu beside a CUDA card in one process: never run",
        "bench/stand_in_cuda.py --seconds 150 --output {}",
        "stand-in-h200",
        170,
    ),
    "comfyui": Step(
        "Stable Diffusion 1.5's shape in ComfyUI, seconds per step",
        "bench/comfyui.py .carry/comfyui --size full --ways cuda,webgpu --output {}",
        "comfyui-h200",
        200,
    ),
    "decode": Step(
        "goals in ms per token; transformers as the peer",
        "bench/decode.py --rows 1,16 --compiled --output {}",
        "decode-h200",
        400,
    ),
    "families": Step(
        "recorded steps of other families: never run",
        "bench/decode_families.py --rows 1,4 --output {}",
        "decode-families-h200",
        150,
    ),
    "serving": Step(
        "16 and 64 chats at once: never run", "bench/decode_serving.py --output {}", "decode-serving-h200", 150
    ),
    "finetune": Step("equal precision first", "bench/finetune.py --output {}", "finetune-h200", 90, True),
    "forecast": Step(
        "all ids in a row per model",
        "bench/forecast.py --device cuda --all-ids --models small,base --samples 1,20 --output {}",
        "forecast-h200",
        200,
    ),
    "tiers": Step(
        "few tokens beside resident, and where accelerate wins", "bench/tiers.py gpu --output {}", "tiers-h200", 150
    ),
    "tiers-training": Step(
        "a training step that does not fit", "bench/tiers_training.py --output {}", "tiers-training-h200", 100
    ),
    "backends": Step(
        "an older format of file", "bench/backends.py --duration 30 --output {}", "h200-benchmark", 70, True
    ),
    "quant": Step(
        "an older format of file",
        "bench/quant.py --device cuda --dtype bfloat16 --output {}",
        "quant-h200",
        10,
        True,
    ),
    "quant-cold": Step(
        "an older format of file",
        "bench/quant.py --device cuda --dtype bfloat16 --cold --output {}",
        "quant-h200-cold",
        25,
        True,
    ),
    "lite": Step("an older format of file", "bench/lite_gpu.py --out {}", "lite-gpu-h200", 40),
    "pool": Step(
        "an older format of file",
        "bench/embed_pool.py --devices cuda:0,cuda:0 --model .carry/minilm --output {}",
        "embed-pool-h200",
        45,
        True,
    ),
}


def run(name: str, folder: Path, variables: dict[str, str], limit_s: float) -> str:
    """One step: "" if it ended well, otherwise how it ended."""
    step, log = STEPS[name], folder / f"{name}.log"
    result = str(folder / f"{step.file}.json")
    command = [sys.executable, *step.command.replace("{}", result).split()]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**variables, "OUTPUT": result}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(PAUSE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return f"cut off after {limit_s:.0f} s"
    return f"ended with status {status}" if status else ""


def pack(folder: Path, archive: Path) -> None:
    partial = archive.with_suffix(".partial")
    with tarfile.open(partial, "w:gz") as packed:
        for path in sorted(folder.iterdir()):
            packed.add(path, path.name)
    partial.replace(archive)


def listed() -> str:
    lines = [
        f"{name:15}{step.seconds:4} s {'' if step.taken else '?'}\t{step.why}\n{'':22}{step.command}"
        for name, step in STEPS.items()
    ]
    return "\n".join([*lines, "(?: guessed)"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="by name, in the order to run")
    parser.add_argument("--list", action="store_true", help="all steps, why they are wanted and how long they take")
    parser.add_argument("--commit", default=os.environ.get("ANYTORCH_COMMIT"), help="what the results are of")
    parser.add_argument("--output", type=Path, help="the folder for results.tar.gz")
    parser.add_argument("--seconds", type=float, default=570, help="for all steps (default: 570)")
    options = parser.parse_args()
    if options.list:
        print(listed())
        return 0
    if not options.steps or options.output is None or not options.commit:
        parser.error("name steps (--list shows them), --output and --commit")
    if unknown := [name for name in options.steps if name not in STEPS]:
        parser.error(f"there is no step {', '.join(unknown)}: --list shows them")
    end = time.monotonic() + options.seconds
    sys.path[:0] = [str(ROOT / "tests" / "device")]
    from run import environment

    options.output.mkdir(parents=True, exist_ok=True)
    failures = 0
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as made:
        variables = environment(Path(scratch)) | {"ANYTORCH_COMMIT": options.commit, "PYTHONUNBUFFERED": "1"}
        # Set for tests that run at once; a bench alone may use all cores.
        variables.pop("OMP_NUM_THREADS", None)
        for name in options.steps:
            left, began = end - time.monotonic(), time.monotonic()
            if left < STEPS[name].seconds:
                how = f"left out: {left:.0f} s are left, it takes {STEPS[name].seconds}"
            else:
                how = run(name, Path(made), variables, min(left - PAUSE_S, 2 * STEPS[name].seconds))
                pack(Path(made), options.output / "results.tar.gz")
            print(f"{name:15}{time.monotonic() - began:6.0f} s  {how or 'done'}", flush=True)
            log = Path(made) / f"{name}.log"
            if how:
                failures += 1
                tail = log.read_text("utf-8", "replace").splitlines()[-12:] if log.exists() else []
                print(*(f"    {line[:300]}" for line in tail), sep="\n", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
