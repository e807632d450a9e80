"""The files of a run; a kill at any moment loses only the steps since the last save.

DIR/best_model/     config.json, model.safetensors: the published layout; of a model also its tokenizer/ and anytorch.json
DIR/last.pt         all that is needed to go on: weights, optimiser, step, what was best so far
DIR/previous.pt     the same of the save before, for a disk that damaged the last
DIR/damaged.pt      a last.pt that was damaged, put aside
DIR/log.jsonl       one line per logged step or evaluation
DIR/summary.json    the plan, the data and the outcome
DIR/loss.png        the curve
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anytorch import logs
from anytorch.child_process import is_alive
from anytorch.errors import InputError, ModelError, OutputError, UsageError
from anytorch.files import parse_json, replace_file, replacing, sync_folder
from anytorch.pictures import figure_for, write_figure

TRAIN, VALIDATION, BEST = "#56B4E9", "#D55E00", "#000000"  # Okabe and Ito's palette, as in our other pictures


def draw_curve(entries: Sequence[dict[str, Any]], path: str | Path, title: str = "") -> Path:
    """Training and validation loss against steps, to a .png or .svg file. Needs matplotlib."""
    path = Path(path)
    steps = [entry for entry in entries if "loss" in entry]
    checks = [entry for entry in entries if "validation" in entry]
    figure = figure_for(path, (8, 4.5))
    panel = figure.subplots()
    panel.plot([e["step"] for e in steps], [e["loss"] for e in steps], color=TRAIN, lw=1, label="training")
    if checks:
        values = [entry["validation"] for entry in checks]
        panel.plot([e["step"] for e in checks], values, color=VALIDATION, marker="o", ms=3, label="validation")
        best = checks[values.index(min(values))]
        panel.plot([best["step"]], [best["validation"]], "*", color=BEST, ms=11, label=f"best: {min(values):.4f}")
    panel.set(xlabel="step", ylabel="loss", title=title)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    return write_figure(figure, path, dpi=130)


log = logs.logger(__name__)
FORMAT = 1


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context that turns a failed write into an OutputError with the file's name, also one that torch wraps."""
    try:
        yield
    except (OSError, RuntimeError) as exc:
        link: BaseException | None = exc
        while link is not None and not isinstance(link, OSError):
            link = link.__cause__ or link.__context__
        if link is None:
            raise
        raise OutputError(
            f"{path} cannot be written: {link.strerror or link}",
            hint="what was saved before is kept: free some space, then run the same command to resume",
        ) from exc


def plain(value: Any) -> Any:
    """A value for JSON: NumPy's numbers as Python's, anything else as text."""
    return value.item() if isinstance(value, np.generic) else str(value)


DAMAGES = (
    RuntimeError, OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, struct.error,
    zlib.error, zipfile.BadZipFile, pickle.UnpicklingError, NotImplementedError, AssertionError,
)  # fmt: skip


# EINVAL: an archive whose damaged directory leads to a place before the file's start.
DAMAGED_ERRORS = (None, errno.EINVAL, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


def unread(path: Path, exc: OSError) -> UsageError:
    return UsageError(
        f"{path} cannot be read now: {exc.strerror or exc}",
        hint="nothing was changed: run the same command again when its disk answers",
    )


def read_state(path: Path, device: torch.device | str, mmap: bool) -> dict[str, Any]:
    """What a state's file holds. Raises ModelError for a damaged one; with `mmap` its tensors are not looked at.

    Raises UsageError for one that cannot be read now: that is not damage, and may pass; the run must not start over.
    """
    try:
        if not mmap:
            # torch writes a CRC-32 for each record of the archive, and does not look at it again.
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"the checksum of {damaged} is not the one it was written with")
        # weights_only: tensors and plain values, so that a file from elsewhere cannot run code.
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location=device, mmap=mmap)
        if not isinstance(state, dict):
            raise ValueError(f"it holds a {type(state).__name__}")
    except DAMAGES as exc:
        if isinstance(exc, OSError) and exc.errno not in DAMAGED_ERRORS:
            raise unread(path, exc) from exc
        why = (str(exc).splitlines() or [repr(exc)])[0]
        raise ModelError(f"{path} cannot be read: {why}", hint="start over with --restart") from exc
    return state


@contextmanager
def sums_written() -> Iterator[None]:
    """A context in which torch writes checksums, whatever the program around us chose."""
    chosen = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(chosen)


def keep_as(path: Path, other: Path) -> None:
    """Give a file a second name, so that there is one at every moment; where links are not possible, the other name only."""
    link = other.with_name(f".{other.name}.{os.getpid()}")
    try:
        link.unlink(missing_ok=True)
        os.link(path, link)
    except OSError as exc:
        log.debug("%s cannot be linked: %s", path, exc)
        path.replace(other)
        return
    link.replace(other)
    link.unlink(missing_ok=True)  # a rename does nothing where both are names of one file, as a kill may have left them


def remove_left_overs(path: Path) -> None:
    """Remove the hidden files beside `path` that killed writers of it left: each may be as large as the state."""
    for file in path.parent.glob(f".{path.name}.*"):
        owner = file.name.removeprefix(f".{path.name}.").partition("-")[0]
        if owner.isdecimal() and (int(owner) == os.getpid() or not is_alive(int(owner))):
            log.debug("removing %s: the process that wrote it has ended", file)
            file.unlink(missing_ok=True)


class RunFolder:
    """The files of one run. Only the first process writes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.best = self.folder / "best_model"
        self.state, self.previous = self.folder / "last.pt", self.folder / "previous.pt"
        self.damaged = self.folder / "damaged.pt"
        self.log = self.folder / "log.jsonl"
        self.summary = self.folder / "summary.json"

    # --- the state -------------------------------------------------------------------------------------------------

    def save(self, state: dict[str, Any]) -> None:
        """Replace the last state whole; the one before it stays as `previous`. A full disk leaves both as they were."""
        following = self.folder / "next.pt"
        with writing(self.state):
            try:
                for path in (following, self.previous):
                    remove_left_overs(path)
                with replacing(following) as file, sums_written():  # streamed: it may be gigabytes
                    torch.save({"format": FORMAT, **state}, file)
                if self.state.exists():
                    keep_as(self.state, self.previous)
                following.replace(self.state)
            except BaseException:
                following.unlink(missing_ok=True)
                raise
            sync_folder(self.folder)

    def load(self, fingerprint: str, device: torch.device | str, mmap: bool = False) -> dict[str, Any] | None:
        """The last state, or the one before it where the last is damaged (with a warning), or None where there is none.

        All its bytes are compared with their checksums before any is used. Raises ModelError where every state is damaged,
        and InputError for one that belongs to another plan or other data. With `mmap` the tensors, which may be gigabytes,
        are neither read nor compared.
        """
        wrong: ModelError | None = None
        for path in (self.state, self.previous):
            if not path.is_file():
                continue
            try:
                state = read_state(path, device, mmap)
            except ModelError as exc:
                wrong = wrong or exc
                continue
            if state.get("format") != FORMAT or state.get("fingerprint") != fingerprint:
                raise InputError(
                    f"{self.folder} holds a run with another plan, other data or another model",
                    hint="repeat the options of that run, name another --output, or start over with --restart",
                )
            if wrong is not None:
                log.warning("%s; going back to %s, of step %s", wrong.message, path, state.get("step"))
                self._put_aside()
            return state
        if wrong is not None:
            raise wrong
        return None

    def _put_aside(self) -> None:
        """Take its name from a damaged last state: the next save would make it the previous one, over the good one."""
        try:
            self.state.replace(self.damaged)
        except FileNotFoundError:  # another process of the run was faster
            pass
        except OSError as exc:
            raise OutputError(
                f"the damaged {self.state} cannot be put aside as {self.damaged.name}: {exc.strerror or exc}",
                hint="make the folder writable, or remove that file: the state before it is intact",
            ) from exc

    def forget(self) -> None:
        """Remove the files that a new run would otherwise resume from."""
        for path in (self.state, self.previous, self.damaged, self.log, self.summary):
            with writing(path):
                path.unlink(missing_ok=True)

    # --- the log ---------------------------------------------------------------------------------------------------

    def keep_log_until(self, step: int) -> None:
        """Drop what was logged after the saved step: those steps are about to be repeated."""
        if not self.log.is_file():
            return
        kept = [entry for entry in self.entries() if entry.get("step", 0) <= step]
        with writing(self.log):
            replace_file(self.log, "".join(json.dumps(entry) + "\n" for entry in kept).encode())

    def note(self, **entry: Any) -> None:
        with writing(self.log):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def entries(self) -> list[dict[str, Any]]:
        """What was logged. A last line that a kill cut short is left out."""
        if not self.log.is_file():
            return []
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError as exc:
            raise unread(self.log, exc) from exc
        found = []
        for line in text.splitlines():
            try:
                entry = parse_json(line)
            except ValueError:
                entry = None
            if isinstance(entry, dict) and isinstance(entry.get("step", 0), (int, float)):
                found.append(entry)
            else:
                log.info("%s: an incomplete line is ignored: %r", self.log, line[:80])
        return found

    def write_summary(self, summary: dict[str, Any]) -> None:
        with writing(self.summary):
            replace_file(self.summary, (json.dumps(summary, indent=2, default=plain) + "\n").encode())
