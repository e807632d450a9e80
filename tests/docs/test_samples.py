"""Every Python sample of our own documentation runs, on a machine with nothing but a CPU. (README: test_readme.py.)"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("[!d]*/*.md"))]

# A search compiles two schedules of every kernel instead of forty: its way is the same, and nobody reads what it found.
FEW = "from anytorch.graph import search; search.QUICK = search.FEW = search.MANY = 2\n"


def samples() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S), 1):
            found.append((f"{page.relative_to(ROOT)}-{number}", block))
    return found


def test_there_are_samples() -> None:
    assert len(samples()) >= 8


@pytest.mark.long
@pytest.mark.parametrize("code", [code for _, code in samples()], ids=[name for name, _ in samples()])
def test_sample(code: str, run_python: Callable[..., Any], tmp_path: Path, shared_cache: Callable[[str], Path]) -> None:
    # An explicit "cuda:1" falls back here and says so; a warning is part of what the sample shows.
    # One cache for all samples: what one of them compiles, the next one finds. Little time to measure: nobody reads it.
    env = {"ANYTORCH_CACHE_DIR": str(shared_cache("samples")), "ANYTORCH_MEASURE_S": "0.2"}
    searching = FEW if "superoptimize" in code or "torch.compile" in code else ""
    run_python(f"import os; os.chdir({str(tmp_path)!r})\n{searching}{code}", env=env, warm=True)
