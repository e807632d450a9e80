"""Generated text against stored text, for every emitter: a change of one shows here first, and no device is needed.

`python -m tests.graph.stored` writes the files anew; the commit then shows what changed.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from typing import NoReturn

import pytest

from anytorch.errors import CompilerMissing
from anytorch.native.compiler import FLAGS, SHARED, find_compiler
from anytorch.native.simd import LEVELS, levels_of
from tests.graph import stored

TEXTS = stored.texts()


@pytest.mark.parametrize("file", TEXTS)
def test_the_text_is_the_stored_one(file: str) -> None:
    assert TEXTS[file] == (stored.FOLDER / file).read_text()


def test_every_stored_text_is_of_a_kernel() -> None:
    assert {path.name for path in stored.FOLDER.iterdir()} == set(TEXTS)


@pytest.mark.parametrize(("level", "stored_as"), [("baseline", "neon"), ("avx2", "avx2"), ("avx512", "avx512")])
def test_stored_text_is_for_its_instruction_set(
    level: str, stored_as: str, missing: Callable[[str, str], NoReturn]
) -> None:
    """A compiler takes it with the flags of that set, whatever the processor of this machine has."""
    if level not in levels_of(platform.machine()):
        pytest.skip(f"{level} is not a set of instructions of {platform.machine()}")
    try:
        compiler = find_compiler()
    except CompilerMissing as exc:
        missing("compiler", exc.message)
    source = stored.FOLDER / f"attention-0.{stored_as}.cpp"
    flags = [*FLAGS, *LEVELS[level].flags, f"-I{SHARED}", "-fsyntax-only"]
    done = subprocess.run([*compiler.command, *flags, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
