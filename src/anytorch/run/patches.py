"""Putting things in place of others, and putting everything back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """Changes that can be undone, last one first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self.replaced: list[tuple[Any, Any]] = []  # what is there now, and what was there before

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or class. One that the owner only inherited is deleted again at the end."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        if before is _ABSENT:
            self._undo.append(lambda: delattr(owner, name))
        else:
            self._undo.append(lambda: setattr(owner, name, before))
            self.replaced.append((value, before))

    def remove(self, owner: Any, name: str) -> None:
        """Take an attribute away from a module, whose `__getattr__` then answers for it."""
        before = vars(owner)[name]
        delattr(owner, name)
        self._undo.append(lambda: setattr(owner, name, before))

    def set_item(self, owner: Any, key: Any, value: Any) -> None:
        """Set an item of a dictionary."""
        before = owner.get(key, _ABSENT)
        owner[key] = value
        if before is _ABSENT:
            self._undo.append(lambda: owner.pop(key, None))
        else:
            self._undo.append(lambda: owner.__setitem__(key, before))

    def at_the_end(self, undo: Callable[[], None]) -> None:
        """Call this, too, when everything is put back."""
        self._undo.append(undo)

    def undo(self) -> None:
        self.replaced.clear()
        while self._undo:
            self._undo.pop()()
