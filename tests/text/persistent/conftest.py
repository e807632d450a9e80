"""Every test has a cache folder of its own; the compiled encoder, found by the hash of its source, may be shared."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def shared_builds(shared_libraries: object) -> None:
    """Compiling it takes half a minute."""
