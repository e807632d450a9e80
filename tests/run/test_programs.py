"""Whole programs of the kinds that people publish, unmodified: the numbers that `python` prints on the CPU, on each device.

They are in programs/, a file for each kind. Lines that begin with "= " are compared. Some need CUDA and have no plain run:
these assert what they do.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "programs"
NEED_CUDA = {"streams", "graphs", "devices", "optional_packages", "fsdp"}  # and say so
DISTRIBUTED = {"ddp", "ddp_unused", "fsdp"}
PACKAGES = {"hf_trainer": "transformers", "accelerated": "accelerate", "lightning_gpu": "lightning"}
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py"))
NUMBER = re.compile(r"-?\d+\.?\d*(?:[eE][-+]?\d+)?")


def run(name: str, *start: str) -> list[tuple[str, list[float]]]:
    """The compared lines of a program: their words, and their numbers."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"] if name in DISTRIBUTED else []
    done = subprocess.run(
        [sys.executable, *start, *torchrun, str(PROGRAMS / f"{name}.py")],
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY / "src"),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    lines = [line for line in done.stdout.splitlines() if line.startswith("= ")]
    assert lines, done.stdout
    return [(NUMBER.sub("#", line), [float(number) for number in NUMBER.findall(line)]) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_prints_what_it_prints_on_the_cpu(name: str, device: str, cpu_wheel: None) -> None:
    package = PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if (name, device) == ("fsdp", "webgpu"):
        pytest.skip("refused: sharding needs streams, which the device lacks (test_parallel.py)")
    found = run(name, "-m", "anytorch", "run", "--device", device)
    if name in NEED_CUDA:
        return
    expected = run(name)
    assert [words for words, _ in found] == [words for words, _ in expected]
    for (words, got), (_, wanted) in zip(found, expected, strict=True):
        assert got == pytest.approx(wanted, rel=5e-3, abs=2e-3), words
