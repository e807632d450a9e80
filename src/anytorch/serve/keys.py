"""API keys: read from a file, compared in constant time, never logged."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

from anytorch.errors import UsageError
from anytorch.files import replace_file

SHORTEST = 16  # characters: less can be guessed


class Keys:
    """The keys of a file: one per line, `name:key` or a key alone; empty lines and lines with # are skipped.

    A key is looked for by its hash, and every key is compared whatever the result, so that neither the place nor the
    first wrong character shows in the time it takes.
    """

    def __init__(self, named: dict[str, str]) -> None:
        self._hashes = [(name, _hash(key.encode())) for name, key in named.items()]
        self._first = next(iter(named.values()), "")

    def name_of(self, given: bytes) -> str | None:
        """The name of the key's owner; None if the key is unknown."""
        found = None
        digest = _hash(given)
        for name, known in self._hashes:
            if hmac.compare_digest(known, digest):
                found = name
        return found

    @property
    def one(self) -> str:
        """One of the keys, for the service's own first request."""
        return self._first


def read_keys(path: Path) -> Keys:
    """Read the keys of a file. Raises UsageError if it is unreadable, empty, or has a key that is too short."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"--api-key-file {path}: cannot be read: {exc}") from exc
    named: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, colon, key = text.partition(":")
        name, key = (name.strip(), key.strip()) if colon else (f"key {number}", text)
        if len(key) < SHORTEST or not key.isascii() or any(c.isspace() for c in key):
            raise UsageError(
                f"{path}, line {number}: a key has at least {SHORTEST} ASCII characters and no spaces",
                hint=f"make one: anytorch serve --new-key {path}",
            )
        if name in named:
            raise UsageError(f"{path}, line {number}: the name {name!r} is used twice")
        named[name] = key
    if not named:
        raise UsageError(f"--api-key-file {path}: holds no key", hint=f"make one: anytorch serve --new-key {path}")
    return Keys(named)


def add_key(path: Path, name: str = "") -> str:
    """Make a key, append it to the file (which only its owner may read), and return it."""
    key = secrets.token_urlsafe(32)
    before = path.read_bytes() if path.exists() else b""
    if before and not before.endswith(b"\n"):
        before += b"\n"
    line = f"{name}:{key}\n" if name else f"{key}\n"
    try:
        replace_file(path, before + line.encode(), private=True)
    except OSError as exc:
        raise UsageError(f"cannot write {path}: {exc.strerror}") from exc
    return key


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
