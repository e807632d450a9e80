"""The command line in this process (`cli`) and in one of its own (`process`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from anytorch.cli.main import main

SOURCES = Path(__file__).parents[2] / "src"


class Answer(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output as one JSON document and nothing else."""
        return json.loads(self.out)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    def call(*arguments: str) -> Answer:
        capsys.readouterr()
        status = main(list(arguments))
        out, err = capsys.readouterr()
        return Answer(status, out, err)

    return call


@pytest.fixture
def process() -> Callable[..., Answer]:
    def call(*arguments: str, env: Mapping[str, str | None] | None = None, timeout_s: float = 300) -> Answer:
        variables: dict[str, str | None] = {**os.environ, "PYTHONPATH": str(SOURCES), **(env or {})}
        done = subprocess.run(
            [sys.executable, "-m", "anytorch", *arguments],
            env={name: value for name, value in variables.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture
def settings_file() -> Path:
    """The one this test may write: the isolation fixture names it."""
    return Path(os.environ["ANYTORCH_CONFIG"])


@pytest.fixture
def cache_file() -> Path:
    path = Path(os.environ["ANYTORCH_CACHE_DIR"]) / "devices.json"
    path.parent.mkdir(parents=True)
    return path
