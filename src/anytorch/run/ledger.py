"""What the stand-in did for a program: how often, and the line of the program that asked first."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

# Packages with kernels for several devices, which choose by the device they see: they see the real one.
CHOOSES_KERNELS = frozenset({"bitsandbytes", "torchao", "triton", "deepspeed"})
# Frames of these packages are never "the program": torch's own code works with the real device, and so does ours.
# Nor is what starts threads and processes.
INSIDE = (
    "torch.",
    "anytorch.",
    "importlib.",
    "multiprocessing.",
    "runpy",
    *(f"{name}." for name in sorted(CHOOSES_KERNELS)),
)
NAMES_INSIDE = frozenset({"torch", "anytorch", "contextlib", "functools", "threading"}) | CHOOSES_KERNELS


@dataclass
class Entry:
    """One kind of call: how often it came, and "file:line" of the first."""

    count: int
    first: str


@dataclass
class Ledger:
    """Calls by name, in three lists: done by another device, without effect, and refused."""

    redirected: dict[str, Entry] = field(default_factory=dict)
    ignored: dict[str, Entry] = field(default_factory=dict)
    refused: dict[str, Entry] = field(default_factory=dict)

    def clear(self) -> None:
        for entries in (self.redirected, self.ignored, self.refused):
            entries.clear()

    def redirect(self, what: str) -> None:
        entry = self.redirected.get(what)
        if entry is None:
            self.redirected[what] = Entry(1, program_line())
        else:
            entry.count += 1

    def ignore(self, what: str) -> None:
        entry = self.ignored.get(what)
        if entry is None:
            self.ignored[what] = Entry(1, program_line())
        else:
            entry.count += 1

    def refuse(self, what: str) -> str:
        """Note a refusal and return the line that asked for it."""
        line = program_line()
        self.refused.setdefault(what, Entry(0, line)).count += 1
        return line


ledger = Ledger()  # of this process


def is_inside(name: str) -> bool:
    """True for the name of a module of torch's or ours."""
    return name in NAMES_INSIDE or name.startswith(INSIDE)


def program_line() -> str:
    """ "file:line" of the innermost frame that is the program's or a library's, "" if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not is_inside(name) and not frame.f_code.co_filename.startswith("<frozen"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""
