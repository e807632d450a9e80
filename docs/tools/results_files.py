"""What stands in bench/results/, and how its numbers are written on a page. Standard library only."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
PARTS: dict[str, Callable[[], str]] = {}


def part(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    def registered(make: Callable[[], str]) -> Callable[[], str]:
        PARTS[name] = make
        return make

    return registered


@cache
def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


# --- words for numbers ---------------------------------------------------------------------------------------------------


def few(value: float, digits: int = 3) -> str:
    """With this many significant digits, thousands apart, no exponent: 0.0523, 8.53, 432,000."""
    if not value:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    return f"{rounded:,.{max(0, places)}f}"


def times(value: float) -> str:
    return few(value, 2 if value < 10 else 3 if value >= 100 else 2)


def percent(value: float) -> str:
    return f"{100 * value:.0f} %" if value >= 0.01 else f"{100 * value:.1f} %"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def there(name: str) -> bool:
    return (RESULTS / f"{name}.json").exists()


def origin(name: str) -> str:
    """Date, commit and machine of a file, as far as it says; older files say less."""
    found = read(name)
    about = {**(found["machine"] if isinstance(found.get("machine"), dict) else {}), **found}
    parts = [str(about.get("date", ""))[:10]]
    commit = about.get("commit")
    if commit and commit != "unknown":
        dirty = " with changes" if about.get("dirty") or str(commit).endswith("-dirty") else ""
        parts.append(f"commit {str(commit)[:7]}{dirty}")
    return ", ".join(filter(None, parts))


def features(machine: dict[str, Any]) -> str:
    """The CPU, and what its integer kernels can use."""
    known = machine.get("features") or []
    best = "AVX-512 with VNNI" if "avx512_vnni" in known else "AVX-512" if "avx512f" in known else "AVX2"
    return f"{machine['cpu']}, {best}" if known else str(machine.get("cpu"))
