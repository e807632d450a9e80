"""Every test has a cache folder of its own; the compiled encoder, found by the hash of its source, may be shared."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def shared_builds(isolation: None, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = request.config.cache.mkdir("anytorch-native")
    (tmp_path / "anytorch-cache").mkdir(exist_ok=True)
    (tmp_path / "anytorch-cache" / "native").symlink_to(folder, target_is_directory=True)
