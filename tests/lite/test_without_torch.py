"""It works where torch cannot be installed: here, in a process that is kept from it; and in WebAssembly, under Pyodide."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROGRAM = HERE / "standalone.py"


def test_it_runs_without_torch(run_python: Callable[..., Any], tmp_path: Path) -> None:
    done = run_python(f"import os; os.chdir({str(tmp_path)!r})\n{PROGRAM.read_text()}")
    assert done.stdout.strip() == "done"


def test_it_runs_in_webassembly(missing: Callable[[str, str], Any]) -> None:
    """`ANYTORCH_PYODIDE` is a folder with node_modules/pyodide and, in numpy/, NumPy 2 built for it: docs/guide/lite.md."""
    folder = os.environ.get("ANYTORCH_PYODIDE")
    if folder is None or shutil.which("node") is None:
        missing("pyodide", "ANYTORCH_PYODIDE is not set, or there is no node")
    source = HERE.parents[1] / "src"
    command = ["node", str(HERE / "pyodide.mjs"), folder, str(source), str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip().endswith("done"), (done.stdout + done.stderr)[-3000:]
