"""Write docs/doctor/: one page per diagnosis and the index, from the registry in anytorch.devices.doctor.

python docs/tools/doctor_index.py            writes what differs
python docs/tools/doctor_index.py --check    changes nothing; exits with 1 and names what differs
"""

from __future__ import annotations

import sys
from pathlib import Path

from anytorch.devices.doctor import DIAGNOSES, DIAGNOSIS_FAILED, Diagnosis, page

FOLDER = Path(__file__).parents[1] / "doctor"
FOOTER = "\n---\n[All diagnoses](index.md) · `anytorch doctor` makes them all; `anytorch doctor --json` for programs.\n"
HEAD = """# The doctor's diagnoses

`anytorch doctor` makes every diagnosis below and prints what it finds with the command that fixes it; `anytorch doctor CODE`
prints one of these pages. An *error* keeps a device, or torch, from working; a *warning* is slow, fragile or surprising; a
*note* is good to know. *files*: the machine's files alone can tell; *child*: torch was tried in a process of its own.

| Code | Level | Needs | What is wrong |
| --- | --- | --- | --- |
"""
LEVELS = {"error": "Error", "warning": "Warning", "note": "Note"}


def row(known: Diagnosis) -> str:
    needs = "files" if known.needs == "files" else "child"
    return f"| [`{known.code}`]({known.code}.md) | {LEVELS[known.level.value]} | {needs} | {known.title} |"


def index() -> str:
    rows = "\n".join(row(known) for known in (*DIAGNOSES, DIAGNOSIS_FAILED))
    return f"{HEAD}{rows}\n"


def pages() -> dict[Path, str]:
    """Every file of the folder with the text it should have."""
    found = {FOLDER / f"{known.code}.md": page(known) + FOOTER for known in (*DIAGNOSES, DIAGNOSIS_FAILED)}
    return {**found, FOLDER / "index.md": index()}


def stale() -> list[Path]:
    """Files that are missing, differ, or belong to no diagnosis."""
    wanted = pages()
    differing = [path for path, text in wanted.items() if not path.is_file() or path.read_text("utf-8") != text]
    return sorted(differing + [path for path in FOLDER.glob("*.md") if path not in wanted])


def main(arguments: list[str]) -> int:
    wanted, differing = pages(), stale()
    for path in differing:
        sys.stderr.write(f"{'stale' if '--check' in arguments else 'writing'}: {path.relative_to(FOLDER.parent)}\n")
        if "--check" not in arguments:
            if path in wanted:
                path.write_text(wanted[path], "utf-8")
            else:
                path.unlink()
    return 1 if differing and "--check" in arguments else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
