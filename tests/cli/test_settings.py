"""What the command line says about a settings file as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anytorch.cli.settings import check_settings_file
from anytorch.errors import ConfigError


@pytest.mark.parametrize(
    ("data", "said", "hint"),
    [
        ({"settings": {"bakend": "cpu"}}, "unknown setting 'bakend'", "'backend'"),
        ({"setings": {}}, "unknown table 'setings'", "'settings'"),
        ({"backend": "cpu"}, "unknown table 'backend'", "'settings.backend'"),
        ({"settings": {"cache_dir": "/x"}}, "'cache_dir' cannot be set in a file", "cache"),
    ],
)
def test_a_line_nobody_reads_is_named_with_the_nearest_match(data: dict[str, Any], said: str, hint: str) -> None:
    path = Path("/somewhere/config.toml")
    with pytest.raises(ConfigError) as caught:
        check_settings_file(data, path)
    assert str(path) in caught.value.message and said in caught.value.message and hint in caught.value.hint
    check_settings_file({"settings": {"backend": "cpu"}, "tuned": {"cpu": {"anything": 1}}}, path)
