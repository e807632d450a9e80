"""The one store of verdicts: a file per question in the cache folder, so that processes never overwrite each other's.

An invalid file counts as missing and is replaced by the next measurement. Beyond `MOST` files the oldest
go. What this process has seen is kept in memory, by the folder it came from.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from anytorch import logs, settings
from anytorch.files import replace_file
from anytorch.measured.verdict import Question, Verdict

log = logs.logger(__name__)

FOLDER = "measured"
MOST = 4096  # files

_seen: dict[Path, Verdict] = {}
_lock = threading.Lock()


def folder() -> Path:
    return settings.cache_folder() / FOLDER


def recall(
    question: Question, *, budget_s: float | None = None, names: Collection[str] | None = None
) -> Verdict | None:
    """What was measured before for this very question; None if nothing was, or nothing that helps.

    A verdict that ran out of time holds for callers that have no more time than it had (`budget_s`, by default the setting
    `measure_s`). With `names`, what was chosen must be among them.
    """
    path = folder() / f"{question.key}.json"
    with _lock:
        found = _seen.get(path)
    if found is None:
        found = _read(path)
        if found is None or found.question.key != question.key:
            return None
        _keep(path, found)
    if found.cut_short and found.budget_s < (settings.get("measure_s") if budget_s is None else budget_s):
        return None
    return found if found.chosen and (names is None or found.chosen in names) else None


def remember(verdict: Verdict) -> Verdict:
    """Keep a verdict for this process and, unless it is a passing one, on disk; returns it."""
    path = folder() / f"{verdict.question.key}.json"
    _keep(path, replace(verdict, remembered=True))
    if verdict.passing or not verdict.chosen:
        return verdict
    try:
        replace_file(path, json.dumps(verdict.as_json(), indent=1, default=str, allow_nan=False).encode())
        _bound(path.parent)
    except OSError as exc:
        log.warning("the measurements cannot be stored in %s: %s", path.parent, exc.strerror)
    return verdict


def stored(key: str) -> Verdict | None:
    """The verdict on disk whose question has this key."""
    found = _read(folder() / f"{key}.json") if key.isalnum() else None
    return found if found is not None and found.question.key == key else None


def verdicts() -> Iterator[Verdict]:
    """Everything stored that can be understood, the newest first."""
    for path in sorted(folder().glob("*.json"), key=_age):
        found = _read(path)
        if found is not None:
            yield found


def drop(keys: Iterable[str]) -> int:
    """Forget the verdicts with these keys, here and on disk; how many files are gone. Raises OSError."""
    count = 0
    for path in [folder() / f"{key}.json" for key in keys]:
        with _lock:
            _seen.pop(path, None)
        try:
            path.unlink()
            count += 1
        except FileNotFoundError:
            pass  # a passing one, or another process was here first
    return count


def clear() -> Path | None:
    """Forget everything, here and on disk; the folder that was removed, None if there was none. Raises OSError."""
    where = folder()
    forget()
    if not where.exists():
        return None
    for path in [*where.glob("*.json"), *where.glob(".*.json.*")]:
        path.unlink(missing_ok=True)
    where.rmdir()
    return where


def forget() -> None:
    """Forget what this process has seen; the files stay."""
    with _lock:
        _seen.clear()


def _keep(path: Path, verdict: Verdict) -> None:
    with _lock:
        while len(_seen) >= MOST:
            del _seen[next(iter(_seen))]
        _seen[path] = verdict


def _read(path: Path) -> Verdict | None:
    try:
        return Verdict.from_json(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        log.warning("%s cannot be read and is measured again: %s", path, exc)
        return None


def _age(path: Path) -> float:
    """Seconds since 1970 until it was written, negative: the newest sorts first. 0 for a file that has gone."""
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0


def _bound(where: Path) -> None:
    paths = list(where.glob("*.json"))
    if len(paths) > MOST:
        for path in sorted(paths, key=_age)[MOST - MOST // 8 :]:
            path.unlink(missing_ok=True)
