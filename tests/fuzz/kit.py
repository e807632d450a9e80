"""What a fuzz target is: bytes in, and either a result or one of the errors it promises. Its kept corpus. No atheris here.

A target's corpus is one text file: an input on each line, as a Python bytes literal, so that a diff can be read and a crash
becomes a test by one more line.
"""

from __future__ import annotations

import ast
import atexit
import hashlib
import json
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from anytorch.errors import AnytorchError

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
LONGEST_KEPT = 1_000  # bytes of an input there
SOURCES = str(HERE.parents[1] / "src")


@dataclass(frozen=True)
class Target:
    """`form` says how its inputs are mutated (mutate.py): "bytes", "text", "json", "folder" or "tensors"."""

    name: str
    run: Callable[[bytes], object]
    form: str = "bytes"
    errors: tuple[type[BaseException], ...] = (AnytorchError,)
    words: tuple[str, ...] = ()  # what a text is likely to be read for
    longest: int = 8192  # bytes of an input
    kept_nbytes: int = 6_000  # of its corpus in the repository


TARGETS: dict[str, Target] = {}


def target(
    name: str, form: str = "bytes", **options: object
) -> Callable[[Callable[[bytes], object]], Callable[[bytes], object]]:
    """Register a function as a target."""

    def registered(run: Callable[[bytes], object]) -> Callable[[bytes], object]:
        TARGETS[name] = Target(name, run, form, **options)  # type: ignore[arg-type]
        return run

    return registered


def finding(one: Target, data: bytes) -> BaseException | None:
    """Run one input: None if the target kept its promise, else the exception that broke it."""
    try:
        one.run(data)
    except one.errors as exc:
        str(exc)  # an error whose message cannot be made is none
        return None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as exc:  # noqa: BLE001  (pyo3's PanicException is no Exception)
        return exc
    return None


def place_of(exc: BaseException) -> str:
    """Kind and place of an exception, by which two findings are the same: the last line of ours that it passed."""
    frames = traceback.extract_tb(exc.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(SOURCES)] or frames
    where = f"{Path(ours[-1].filename).name}:{ours[-1].name}:{ours[-1].lineno}" if ours else "?"
    return f"{type(exc).__name__} at {where}"


# --- the kept corpus --------------------------------------------------------------------------------------------------


def kept(name: str) -> list[bytes]:
    """The inputs of a target's file in the corpus; none where there is no file."""
    path = CORPUS / f"{name}.txt"
    lines = path.read_text(encoding="ascii").splitlines() if path.is_file() else []
    return [ast.literal_eval(line) for line in lines if line and not line.startswith("#")]


def keep(name: str, inputs: Iterable[bytes], most: int) -> int:
    """Write a target's file: what was kept for a reason (above the empty line) stays, then a sample of the inputs.

    Every one of them reached a new place when it was found. How many the file has then.
    """
    path = CORPUS / f"{name}.txt"
    before = path.read_text(encoding="ascii").split("\n\n")[0].splitlines() if path.is_file() else []
    drawn = sorted(set(inputs), key=lambda data: hashlib.sha1(data).digest())  # the same sample from the same corpus
    chosen: list[str] = []
    for line in (ascii(data) for data in drawn if len(data) <= LONGEST_KEPT):
        if line not in before and sum(map(len, chosen)) + len(line) <= most:
            chosen.append(line)
    path.write_text("\n".join([*before, "", *sorted(chosen, key=len)]) + "\n", encoding="ascii")
    return len(before) + len(chosen)


# --- a folder of the target's own -------------------------------------------------------------------------------------


class Scratch:
    """A folder that is empty before each input."""

    @cached_property
    def path(self) -> Path:
        memory = Path("/dev/shm")
        made = Path(tempfile.mkdtemp(prefix="anytorch-fuzz-", dir=memory if memory.is_dir() else None))
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        return made

    def empty(self) -> Path:
        for one in self.path.iterdir():
            shutil.rmtree(one) if one.is_dir() else one.unlink()
        return self.path

    def file(self, name: str, data: bytes) -> Path:
        path = self.empty() / name
        path.write_bytes(data)
        return path

    def folder(self, data: bytes, names: Iterable[str]) -> Path:
        """A folder from a JSON object of names and contents; a content that is no text is written as JSON.

        Only the given names are written; what is no such object becomes the first of them.
        """
        path, allowed = self.empty(), list(names)
        try:
            parts = json.loads(data)
            assert isinstance(parts, dict) and any(name in parts for name in allowed)
        except (ValueError, RecursionError, AssertionError):
            (path / allowed[0]).parent.mkdir(parents=True, exist_ok=True)
            (path / allowed[0]).write_bytes(data)
            return path
        for name in allowed:
            if name in parts:
                content = parts[name]
                text = content if isinstance(content, str) else json.dumps(content)
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_bytes(text.encode("utf-8", "surrogatepass"))
        return path


scratch = Scratch()
