"""What is worth remembering of a geometry until the device is closed: plans of launches, and what torch said of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MOST_PLANS = 16_384


class Recent(dict[Any, Any]):
    """A dictionary of the entries used last, at most `most`. `recent[key]` is None for an unknown key; ask in no other way.

    Two generations make it least-recently-used at the price of a dictionary: when the younger one is half of `most`, it
    becomes the older one, whose entries are dropped unless they are asked for before that happens again.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self._older: dict[Any, Any] = {}
        self.also_cleared: list[Callable[[], object]] = []  # what is derived from the entries

    def __missing__(self, key: Any) -> Any:
        found = self._older.pop(key, None)
        if found is not None:
            self[key] = found
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        if super().__len__() >= max(self.most // 2, 1):
            self._older = dict(self)
            super().clear()
        super().__setitem__(key, value)

    def __len__(self) -> int:
        return super().__len__() + len(self._older)

    def clear(self) -> None:
        super().clear()
        self._older.clear()
        for forget in self.also_cleared:
            forget()


# The one cache of everything that belongs to the open device, for all families of kernels: a key begins with what tells
# its family from every other. `runtime.close_runtime` empties it.
plans = Recent(MOST_PLANS)
