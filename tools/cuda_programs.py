"""Run public programs written for CUDA, unmodified, under `anytorch run`, and as `anytorch port` changes them.

    python tools/cuda_programs.py FOLDER [--python PYTHON] [--only mnist,vae] [--devices cpu,webgpu] [--no-ported]

FOLDER has checkouts of the programs, which are not part of this repository: `examples` (pytorch/examples at commit 55c663f,
of May 2023: later ones say torch.accelerator themselves), `nanoGPT` (karpathy/nanoGPT). PYTHON has torch, torchvision,
transformers, accelerate and lightning beside what anytorch needs. Digits, texts and pictures are made here; nothing is
downloaded.

Each program runs in copies of its own: by `python` with its own switch for the CPU, by `anytorch run` with `--device cpu`
and `--device webgpu`, and after `anytorch port --write` by plain `python`, on the CPU and on webgpu (with `import
anytorch.webgpu` before it, as docs/guide/port.md says). The numbers it prints are compared with the plain run's. Results go
to bench/results/cuda-programs.json; `python docs/tools/benchmark_tables.py` writes the table of the guide from them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
from provenance import commit, provenance, write_results  # noqa: E402

sys.path.pop(0)
RESULTS = ROOT / "bench" / "results" / "cuda-programs.json"
OURS = ROOT / "tests" / "run" / "programs"
NUMBER = re.compile(r"-?\d+\.\d+(?:[eE][-+]?\d+)?")
LIMIT_S = 240
STOPPED_S = 40  # for a program that would go on for hours
CLOSE = 2e-3  # of a printed loss: sums in another order, over some steps of training


@dataclass(frozen=True)
class Program:
    """One program: where it is, how it is started, and which of its printed numbers are compared."""

    name: str
    folder: str  # below FOLDER, or below tests/run/programs for ours
    command: Sequence[str]
    plain: Sequence[str] = ()  # added for the run by `python` on the CPU
    lowered: Sequence[str] = ()  # left out there
    numbers: str = r"[Ll]oss"  # lines with the numbers to compare
    prepare: Callable[[Path], None] = lambda folder: None
    before: Sequence[Sequence[str]] = ()  # commands that come first, by plain python
    draws: bool = False  # random numbers drawn on the device: others there, as on CUDA
    cpu_draws: str = ""  # why not even `--device cpu` prints the plain run's numbers
    why: dict[str, str] = field(default_factory=dict)  # device → why it cannot run there
    env: dict[str, str] = field(default_factory=dict)


def digits(folder: Path) -> None:
    """MNIST's files with made-up digits, where torchvision looks for them."""
    import random

    raw = folder.parent / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for name, count in (("train", 128), ("t10k", 64)):
        labels = bytes(number % 10 for number in range(count))
        pictures = bytearray()
        for label in labels:
            picture = bytearray(min(255, max(0, int(draw.gauss(20, 15)))) for _ in range(28 * 28))
            for row in range(4 + label * 2, 8 + label * 2):
                picture[row * 28 + 4 : row * 28 + 24] = bytes([230]) * 20
            pictures += picture
        (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + pictures)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels)


def words(folder: Path) -> None:
    """Three texts for word_language_model."""
    texts = folder / "data" / "wikitext-2"
    texts.mkdir(parents=True, exist_ok=True)
    line = "the quick brown fox jumps over the lazy dog and runs back to its den before the night falls \n"
    for name, times in (("train", 60), ("valid", 24), ("test", 24)):
        (texts / f"{name}.txt").write_text(line * times)


def characters(folder: Path) -> None:
    """The text that nanoGPT's preparation would download."""
    line = "First Citizen: before we proceed any further, hear me speak. All: speak, speak.\n"
    (folder / "data" / "shakespeare_char" / "input.txt").write_text(line * 200)


def photographs(folder: Path) -> None:
    """Pictures for super_resolution, which would download Berkeley's."""
    from PIL import Image

    for name, count in (("train", 4), ("test", 2)):
        target = folder / "dataset" / "BSDS300" / "images" / name
        target.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            picture = Image.linear_gradient("L").rotate(37 * number).resize((256, 256))
            Image.merge("RGB", (picture, picture.rotate(90), picture.rotate(180))).save(target / f"{number}.png")


def options_of(text: str) -> list[str]:
    return text.split()


GPT = options_of(
    "--dataset=shakespeare_char --device=cuda --eval_iters=2 --log_interval=1 --block_size=32 --batch_size=4 --n_layer=2 "
    "--n_head=2 --n_embd=32 --max_iters=4 --eval_interval=4 --gradient_accumulation_steps=2 --dropout=0.0 --dtype=float32"
)
MNIST = options_of("--epochs 1 --batch-size 64 --log-interval 2")
LANGUAGE = options_of("--epochs 1 --emsize 16 --nhid 16 --batch_size 4 --bptt 10 --log-interval 5")
IMAGENET = options_of("--dummy -a resnet18 -b 2 -j 0 --epochs 1 -p 1 --seed 1 --gpu 0")
DCGAN = options_of(
    "--dataset fake --imageSize 64 --batchSize 4 --ngf 8 --ndf 8 --niter 1 --dry-run --manualSeed 1 --cuda"
)
PHOTOGRAPHS = options_of("--upscale_factor 2 --batchSize 2 --testBatchSize 2 --nEpochs 1 --threads 0 --cuda")
PROGRAMS = (
    Program(
        "mnist",
        "examples/mnist",
        ["main.py", *MNIST],
        ["--no-cuda"],
        prepare=digits,
        draws=True,
        cpu_draws="it shuffles only where it has CUDA",
    ),
    Program("mnist_rnn", "examples/mnist_rnn", ["main.py", *MNIST], ["--no-cuda"], prepare=digits, draws=True),
    Program(
        "mnist_forward_forward",
        "examples/mnist_forward_forward",
        ["main.py", "--epochs", "2", "--train_size", "64", "--test_size", "32", "--log-interval", "1"],
        ["--no_cuda"],
        numbers=r"Loss|error",
        prepare=digits,
    ),
    Program(
        "mnist_hogwild",
        "examples/mnist_hogwild",
        ["main.py", "--epochs", "1", "--num-processes", "1", "--cuda"],
        lowered=["--cuda"],
        prepare=digits,
        draws=True,
        cpu_draws="its loader has a worker only where it has CUDA",
        why={"webgpu": "processes share the model's memory, which a WebGPU device cannot"},
    ),
    Program(
        "vae",
        "examples/vae",
        ["main.py", "--epochs", "1", "--batch-size", "32"],
        ["--no-cuda"],
        prepare=digits,
        draws=True,
    ),
    Program(
        "siamese_network",
        "examples/siamese_network",
        ["main.py", "--epochs", "1", "--batch-size", "4", "--test-batch-size", "4", "--dry-run"],
        ["--no-cuda"],
        prepare=digits,
        cpu_draws="it shuffles only where it has CUDA",
        why={"webgpu": "slow: a ResNet-18 over a test set of 10,000, by a software adapter"},
    ),
    Program(
        "dcgan, fake data",
        "examples/dcgan",
        ["main.py", *DCGAN],
        lowered=["--cuda"],
        draws=True,
    ),
    Program(
        "super_resolution, made-up pictures",
        "examples/super_resolution",
        ["main.py", *PHOTOGRAPHS],
        lowered=["--cuda"],
        numbers=r"Loss|PSNR",
        prepare=photographs,
    ),
    Program(
        "word_language_model, LSTM",
        "examples/word_language_model",
        ["main.py", *LANGUAGE, "--dropout", "0", "--cuda"],
        lowered=["--cuda"],
        prepare=words,
        env={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
    ),
    Program(
        "word_language_model, Transformer",
        "examples/word_language_model",
        ["main.py", *LANGUAGE, "--dropout", "0", "--model", "Transformer", "--lr", "0.5", "--cuda"],
        lowered=["--cuda"],
        prepare=words,
        env={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
    ),
    Program(
        "word_language_model, generate.py",
        "examples/word_language_model",
        ["generate.py", "--words", "20", "--cuda"],
        lowered=["--cuda"],
        numbers=r"Generated",
        prepare=words,
        before=[["main.py", *LANGUAGE, "--dropout", "0"]],
        env={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
    ),
    Program(
        "imagenet --dummy, ResNet-18",
        "examples/imagenet",
        ["main.py", *IMAGENET],
        lowered=["--gpu", "0"],
        why={dev: f"1.3 million made-up pictures: stopped after {STOPPED_S} s" for dev in ("plain", "cpu", "webgpu")},
    ),
    Program(
        "time_sequence_prediction",
        "examples/time_sequence_prediction",
        ["train.py", "--steps", "1"],
        before=[["generate_sine_wave.py"]],
        numbers=r"loss",
        why={"webgpu": "names no CUDA device: it stays on the CPU"},
    ),
    Program(
        "ddp-tutorial-series, single_gpu.py",
        "examples/distributed/ddp-tutorial-series",
        ["single_gpu.py", "1", "1"],
        numbers=r"Epoch",
        cpu_draws="it has no switch for the CPU",
    ),
    Program(
        "ddp-tutorial-series, multigpu.py",
        "examples/distributed/ddp-tutorial-series",
        ["multigpu.py", "1", "1"],
        numbers=r"Epoch",
        cpu_draws="it has no switch for the CPU",
    ),
    Program(
        "nanoGPT train.py",
        "nanoGPT",
        ["train.py", *GPT, "--compile=False"],
        ["--device=cpu"],
        prepare=characters,
        before=[["data/shakespeare_char/prepare.py"]],
    ),
    Program(
        "nanoGPT train.py, compiled",
        "nanoGPT",
        ["train.py", *GPT, "--compile=True"],
        ["--device=cpu"],
        prepare=characters,
        before=[["data/shakespeare_char/prepare.py"]],
    ),
    Program(
        "nanoGPT sample.py",
        "nanoGPT",
        ["sample.py", "--num_samples=1", "--max_new_tokens=20", "--dtype=float32"],
        ["--device=cpu"],
        numbers=r"number of parameters",
        prepare=characters,
        before=[["data/shakespeare_char/prepare.py"], ["train.py", *GPT, "--device=cpu", "--compile=False"]],
    ),
    Program("transformers Trainer, a small GPT-2 (ours)", "", ["hf_trainer.py"], numbers="^="),
    Program("accelerate (ours)", "", ["accelerated.py"], numbers="^="),
    Program("Lightning, accelerator=gpu (ours)", "", ["lightning_gpu.py"], numbers="^="),
)


def lines_of_cuda(folder: Path, command: Sequence[str]) -> int:
    """Lines that say cuda, in the program's own file."""
    text = (folder / command[0]).read_text(encoding="utf-8")
    return sum("cuda" in line.lower() for line in text.splitlines())


def numbers_in(output: str, pattern: str) -> list[float]:
    """What the lines that match print as decimals, but for times."""
    found: list[float] = []
    for line in output.splitlines():
        if re.search(pattern, line):
            line = re.sub(r"(time|ms/batch):?\s*\d+\.\d+\s*(ms|s)?|\d+\.\d+ms|mfu -?\d+\.\d+%", "", line)
            found += [float(text) for text in NUMBER.findall(line)]
    return found


def compared(expected: list[float], found: list[float]) -> str:
    """ "same", "within 1e-4", or "apart"."""
    if not expected or len(expected) != len(found):
        return "apart"
    if expected == found:
        return "same"
    most = max(abs(a - b) / max(abs(a), 1e-2) for a, b in zip(expected, found, strict=True))
    return f"within {most:.0e}" if most <= CLOSE else "apart"


def run(line: Sequence[str], folder: Path, env: dict[str, str], limit: float = LIMIT_S) -> tuple[int, str, float]:
    """Exit status, everything that was printed, and seconds. A program that takes too long has status 124."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(line, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT, text=True)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = 124
        output.seek(0)
        return status, output.read(), time.monotonic() - began


def try_out(
    program: Program, source: Path, python: str, devices: Sequence[str], *, ported: bool = True
) -> dict[str, Any]:
    """Run one program in copies of its folder: plainly, on each device, and ported."""
    result: dict[str, Any] = {
        "commit": commit()[0],  # of this program's runs: a later run of others leaves them in the file
        "cuda_lines": lines_of_cuda(source, program.command),
        "draws": program.draws,
        "cpu_draws": program.cpu_draws,
        "why": program.why,
    }
    env = {
        **os.environ,
        **program.env,
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT / "src"), str(ROOT / "compat" / "src"), os.environ.get("PYTHONPATH", "")]
        ).rstrip(os.pathsep),
        "ANYTORCH_WEBGPU_FALLBACK": "silent",
        "HYDRA_FULL_ERROR": "1",
    }
    plain_command = [word for word in program.command if word not in program.lowered] + list(program.plain)
    limit = STOPPED_S if "plain" in program.why else LIMIT_S
    tried = [device for device in devices if device not in program.why or "plain" in program.why]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "of" / source.name
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".git", "images"))
        program.prepare(folder)
        for command in program.before:
            status, output, _ = run([python, *command], folder, env)
            if status:
                return {**result, "problem": output[-600:]}
        changed = Path(scratch) / "ported" / source.name
        if ported:
            shutil.copytree(folder.parent, changed.parent)
            result["port"] = port(program, changed, python, env)
        status, output, seconds = run([python, *plain_command], folder, env, limit)
        expected = numbers_in(output, program.numbers)
        result["plain"] = {"status": status, "numbers": expected[:20], "seconds": round(seconds, 1)}
        for device in tried:
            line = [python, "-m", "anytorch", "run", "--device", device, "--report", *program.command]
            result[device] = outcome(run(line, folder, env, limit), program, expected)
            if ported:
                words = [
                    word for word in program.command if word != "--device=cuda"
                ]  # the ported default is the device
                line = [python, "-c", STARTER.format(webgpu=device == "webgpu"), *words]
                result["port"][device] = outcome(run(line, changed, env, limit), program, expected)
    return result


def port(program: Program, folder: Path, python: str, env: dict[str, str]) -> dict[str, Any]:
    """Rewrite the program, and look whether a second run changes anything. Of ours, only its own file."""
    what = folder if program.folder else folder / program.command[0]
    lines: list[dict[str, int]] = []
    for _ in range(2):
        _, told, _ = run([python, "-m", "anytorch", "port", "--json", "--write", str(what)], folder, env)
        files = json.loads(told[told.index("{") :])["files"]
        kinds = ("changes", "left")
        lines.append({kind: sum(len(file[kind]) for file in files) for kind in kinds})
        lines[-1]["files"] = sum(file["changed"] for file in files)
    return {**lines[0], "second_run_changes": lines[1]["files"]}


def outcome(ran: tuple[int, str, float], program: Program, expected: list[float]) -> dict[str, Any]:
    """What a run printed, beside what the plain one did."""
    status, output, seconds = ran
    found = numbers_in(output, program.numbers)
    count = min(len(found), len(expected)) if status == 124 else None
    return {
        "status": status,
        "numbers": found[:20],
        "losses": compared(expected[:count], found[:count]),
        "seconds": round(seconds, 1),
        "on_cpu": on_cpu(output),
        "end": "" if status == 0 else output[-400:],
    }


# Starts a ported program: by plain torch, with our device registered where it is to be the accelerator.
STARTER = """
import runpy, sys
if {webgpu}:
    import anytorch.webgpu
sys.argv = sys.argv[1:]
sys.path.insert(0, "")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def on_cpu(output: str) -> dict[str, int]:
    """What the report lists as computed by the CPU."""
    _, _, after = output.partition("computed by the CPU, because the device has no kernel:\n")
    found: dict[str, int] = {}
    for line in after.splitlines():
        match = re.match(r"\s+(\d+)  (\S+)$", line)
        if match is None:
            break
        found[match[2]] = int(match[1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", default="")
    parser.add_argument("--devices", default="cpu,webgpu")
    parser.add_argument("--no-ported", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="programs at once")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    results: dict[str, Any] = {"programs": {}}
    if options.output.exists():
        results = json.loads(options.output.read_text())
    results["torch"] = subprocess.check_output(
        [options.python, "-c", "import torch; print(torch.__version__)"], text=True
    ).strip()
    results |= provenance()  # of this run; programs that an earlier one tried keep what it found
    kept = results["programs"]
    wanted = [name for name in options.only.split(",") if name]
    exact = {program.name for program in PROGRAMS} & set(wanted)
    chosen = [
        program
        for program in PROGRAMS
        if not wanted or program.name in exact or any(name in program.name for name in set(wanted) - exact)
    ]

    def one(program: Program) -> tuple[Program, dict[str, Any]]:
        source = options.folder / program.folder if program.folder else OURS
        devices = options.devices.split(",")
        return program, try_out(program, source, options.python, devices, ported=not options.no_ported)

    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(one, program) for program in chosen]):
            program, found = done.result()
            kept[program.name] = {**kept.get(program.name, {}), **found}
            short = {key: found[key] for key in ("plain", "cpu", "webgpu", "port", "problem") if key in found}
            print(program.name, json.dumps(short)[:1800], flush=True)
            write_results(options.output, results)


if __name__ == "__main__":
    main()
