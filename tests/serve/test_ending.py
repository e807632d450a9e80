"""A process ends when it must, also when nobody reads what it says."""

from __future__ import annotations

import subprocess
import sys

import pytest

FULL = """
import os, sys, time
from types import SimpleNamespace
os.set_blocking(2, False)
try:
    while True: os.write(2, b"x" * 4096)
except BlockingIOError: pass
try:
    while True: os.write(2, b"x")
except BlockingIOError: pass
os.set_blocking(2, True)
from anytorch.serve import ending
pools = SimpleNamespace(unfinished=lambda: ["embeddings"])
app = SimpleNamespace(state=SimpleNamespace(service=SimpleNamespace(pools=pools)))
print("full", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="another end of a pipe is opened by /proc")
@pytest.mark.parametrize(
    ("ending", "status"), [("ending.end_now(app, 3)", 3), ("ending.end_later(0.2); time.sleep(600)", 1)]
)
def test_a_pipe_that_nobody_reads_holds_nobody(ending: str, status: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FULL + ending], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "full\n"
        try:
            assert process.wait(60) == status
        finally:
            process.kill()


def test_last_words_are_said() -> None:
    text = FULL.split("os.set_blocking(2, False)")[0] + "from anytorch" + FULL.split("from anytorch")[1]
    text += "ending.SAYING_S = 50\n"  # on a busy machine, too: they are read here
    done = subprocess.run(
        [sys.executable, "-c", text + "ending.end_now(app, 0)"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0 and "still computed: embeddings" in done.stderr
    done = subprocess.run(
        [sys.executable, "-c", text + "ending.end_later(0.2); time.sleep(600)"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1 and "most recent call first" in done.stderr
