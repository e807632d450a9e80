"""Plug-ins as pip would lay them out: the example, installed for real, and broken ones written by hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def installed_example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH into which pip has installed examples/plugin-backend."""
    target = tmp_path_factory.mktemp("installed")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)),
            str(REPOSITORY / "examples" / "plugin-backend"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`plugin(name, code, attribute="Backend")` → a folder with an installed distribution that offers that back end."""

    def write(name: str, code: str, attribute: str = "Backend") -> Path:
        folder = tmp_path_factory.mktemp(f"plugin-{name}")
        information = folder / f"{name}_plugin-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text(f"[anytorch.backends]\n{name} = {name}_plugin:{attribute}\n")
        (folder / f"{name}_plugin.py").write_text(code)
        return folder

    return write
