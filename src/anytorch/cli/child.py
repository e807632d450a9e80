"""Check the probe cache before a command tries devices."""

from __future__ import annotations

from anytorch.cache import Store


def check_cache() -> None:
    """Raise CacheError if what was found before cannot be read.

    Said before minutes are spent, since what is found now could not be stored either; the file is left as it was.
    """
    Store("devices").entries()
