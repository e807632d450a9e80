"""The programs in examples/ run."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"


def run(name: str, *arguments: str, limit: int | None = None) -> Any:
    """Run an example as its text says; `limit` bounds its address space in bytes."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    if limit is not None:
        bounded = "import resource, runpy, sys; import torch; resource.setrlimit(resource.RLIMIT_AS, ({0}, {0})); "
        code = bounded.format(limit) + f"sys.argv = {command[1:]!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
        command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def test_every_example_is_run_here() -> None:
    here = {"choose_device.py", "explain.py", "fit_batch.py", "semantic_search.py"}
    # They train; what they call is tested in tests/train and below.
    too_long = {"train_tiny.py", "finetune_forecast.py", "train_writer.py", "python_texts.py"}
    elsewhere = {"lite_digits.py", "lite_characters.py", "qat.py", "prune.py"}  # in tests/lite and tests/quant
    assert {path.name for path in EXAMPLES.glob("*.py")} - too_long == here | elsewhere


def test_choose_device() -> None:
    done = run("choose_device.py")
    assert done.stdout.startswith("asked for auto, using ") and "output (4, 8)" in done.stdout


def test_choose_device_that_is_missing() -> None:
    done = run("choose_device.py", "npu:0")
    assert "'npu:0' cannot be used" in done.stdout
    assert "using cpu" in done.stdout and done.stderr == ""


@pytest.mark.long
def test_explain() -> None:
    done = run("explain.py")
    assert done.stdout.startswith("you asked for: auto\nchosen: ")
    assert "seen, not tried" in done.stdout


def test_fit_batch() -> None:
    assert "batch 4096 fits on " in run("fit_batch.py").stdout


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the address space is bounded with Linux's RLIMIT_AS")
def test_fit_batch_halves_on_a_real_error() -> None:
    """2**23 rows of 1 KiB need 8 GiB, twice; in 3 GiB of address space the allocator itself refuses."""
    done = run("fit_batch.py", str(2**23), limit=3 << 30)
    assert f"did not fit: {2**23}, {2**22}" in done.stdout
    batch = int(done.stdout.split("batch ")[1].split()[0])
    assert batch < 2**22 and batch & (batch - 1) == 0


@pytest.mark.long
@pytest.mark.usefixtures("minilm")
def test_semantic_search(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "shop.md").write_text(
        "# Shop\n\nRefunds take five working days.\n\nWe ship on Mondays only.\n"
    )
    (tmp_path / "notes" / "pets.txt").write_text("The cat sleeps on the sofa all day long.\n")
    question = "How long until I get my money back?"
    for _ in range(2):  # the second time from the index
        done = run(
            "semantic_search.py", str(tmp_path / "notes"), question, "--k", "2", "--index", str(tmp_path / "i.npz")
        )
        assert "shop.md:3" in done.stdout.splitlines()[0] and "Shop: Refunds take five" in done.stdout
    assert "no text in" in subprocess.run(
        [sys.executable, str(EXAMPLES / "semantic_search.py"), str(EXAMPLES), "x"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}, capture_output=True, text=True, check=False,
    ).stderr  # fmt: skip


def test_the_texts_that_the_small_writer_learns() -> None:
    """Of the Python that runs this: prose, and nothing that looks like code or a table."""
    code = "from python_texts import *; import json; print(json.dumps([(o.kind, o.name, o.text) for o in texts()]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, capture_output=True, text=True, timeout=200)
    found = {name: (kind, text) for kind, name, text in json.loads(done.stdout)}
    assert len(found) > 4000 and {kind for kind, _ in found.values()} == {"topic", "module", "class", "function"}
    kind, text = found["textwrap.dedent"]
    assert kind == "function" and text.startswith("Remove any common leading whitespace from every line in `text`.")
    assert not [name for name, (_, text) in found.items() if ">>>" in text or "::=" in text]


def test_prose_is_paragraphs_without_code() -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        from python_texts import prose  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(EXAMPLES))
    given = """Heading
    =======

    A sentence that goes on
    in the next line.

        code = 1

    >>> code
    1

    The “end” of it…"""
    assert prose(inspect.cleandoc(given)) == 'A sentence that goes on in the next line.\nThe "end" of it...'
