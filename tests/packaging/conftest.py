"""A wheel as it is published, built here, in an environment that has neither a compiler nor the network."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from anytorch.native import simd
from anytorch.native.compiler import only_builder

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / ".cache" / "test-wheels"
# Nothing but this machine itself can be reached: what a test needs has to be in the wheel, or in what it asks pip for.
NO_NETWORK = """\
import socket
_connect = socket.socket.connect
def connect(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
        raise OSError(101, f"no network in this test: {address}")
    return _connect(self, address)
socket.socket.connect = connect
"""


@dataclass(frozen=True)
class Installed:
    """An environment with anytorch from the wheel, and a cache folder that nothing was ever compiled into."""

    folder: Path
    cache: Path

    @property
    def environment(self) -> dict[str, str]:
        dropped = ("PYTHON", "ANYTORCH_", "CXX", "CC", "VIRTUAL_ENV", "COV_", "COVERAGE_", "PYTEST_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        return {
            **kept,
            "PATH": str(self.folder / "bin"),
            "ANYTORCH_CACHE_DIR": str(self.cache),
            "ANYTORCH_CONFIG": str(self.cache / "config.toml"),
            "HF_HUB_OFFLINE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """`anytorch …` in this environment; its status must be 0."""
        return self.call(str(self.folder / "bin" / "anytorch"), *arguments, **options)

    def call(self, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, cwd=self.folder, timeout=300, **options
        )
        assert done.returncode == 0, f"{command}: status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def compiled(self) -> list[str]:
        """What was compiled on this machine: nothing, as long as the wheel carries it."""
        return sorted(path.name for path in self.cache.rglob("*.so"))


def sources() -> str:
    """A digest of everything that a wheel is made from."""
    found = hashlib.sha256(sys.version.encode())
    files = [ROOT / name for name in ("pyproject.toml", "README.md", "tools/carried_kernels.py", "tools/wheel_hook.py")]
    for path in [*files, *sorted((ROOT / "src").rglob("*")), *sorted((ROOT / "LICENSES").iterdir())]:
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


@pytest.fixture(scope="session")
def wheel(missing: Any) -> Path:
    """The wheel for Linux on x86-64, with kernels for this processor's SIMD level: all levels would take a minute."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        missing("zig", "the wheel that is tried is for Linux on x86-64")
    if not (ROOT / ".cache" / "zig" / "ziglang" / "zig").is_file() and "ANYTORCH_ZIG" not in os.environ:
        missing("zig", "run `make zig`")
    KEPT.mkdir(parents=True, exist_ok=True)
    level = simd.supported()[-1]
    folder = KEPT / f"{sources()}-{level}"
    with only_builder(KEPT / "lock"):  # the other process of this run waits, and finds it
        if not list(folder.glob("*.whl")):
            variables = {
                "ANYTORCH_WHEEL": "linux-x86_64",
                "ANYTORCH_WHEEL_LEVELS": level,
                "ANYTORCH_CARRIED": str(KEPT / "carried"),
                "JOBS": "2",
            }
            command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
            done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel, installed with no index at all.

    What it depends on is lent by the environment of the tests, through a .pth file: a folder of all those wheels would be
    gigabytes. The tests' own, editable anytorch is not among it, for .pth files there are not read.
    """
    folder = tmp_path_factory.mktemp("empty") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    lent = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "lent.pth").write_text("\n".join(lent))
    (site / "sitecustomize.py").write_text(NO_NETWORK)
    install = ["--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check", "--quiet", str(wheel)]
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    subprocess.run([*pip, "install", *install], check=True)
    return Installed(folder, tmp_path_factory.mktemp("empty-cache"))
