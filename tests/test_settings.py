"""Where a setting's value comes from, and what happens when it makes no sense."""

from __future__ import annotations

import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from anytorch import settings
from anytorch.errors import ConfigError


def test_a_default_says_so() -> None:
    assert settings.lookup("backend") == settings.Value("auto", "default")


@pytest.mark.parametrize("variable", ["ANYTORCH_BACKEND", "YIRAGE_BACKEND", "KRONOS_DEVICE"])
def test_the_documented_variables_name_the_backend(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "CPU")
    assert settings.lookup("backend") == settings.Value("cpu", variable)


def test_our_own_variable_wins_over_the_older_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YIRAGE_BACKEND", "mps")
    monkeypatch.setenv("ANYTORCH_BACKEND", "cpu")
    assert settings.get("backend") == "cpu"


def test_the_order_is_code_then_environment_then_file(monkeypatch: pytest.MonkeyPatch) -> None:
    settings.write_settings_file({"settings": {"backend": "xpu"}})
    assert settings.lookup("backend") == settings.Value("xpu", "file")
    monkeypatch.setenv("ANYTORCH_BACKEND", "mps")
    assert settings.get("backend") == "mps"
    with settings.use(backend="cpu"):
        assert settings.lookup("backend") == settings.Value("cpu", "code")
    assert settings.get("backend") == "mps"


def test_none_in_use_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYTORCH_BACKEND", "mps")
    monkeypatch.setenv("ANYTORCH_THREADS", "3")
    with settings.use(backend=None, threads=None):
        assert (settings.get("backend"), settings.get("threads")) == ("auto", None)
    assert settings.get("backend") == "mps"


# --- read once --------------------------------------------------------------------------------------------------------


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was parsed of the settings file from here on."""
    seen: list[bytes] = []
    parse = settings._tables_of

    def counting(raw: bytes, path: Path) -> dict[str, Any]:
        seen.append(raw)
        return parse(raw, path)

    monkeypatch.setattr(settings, "_tables_of", counting)
    return seen


def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the settings file had been written some time ago."""
    monkeypatch.setattr(settings, "SETTLED_NS", -1)


def test_the_file_is_parsed_once(parses: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    settled(monkeypatch)
    settings.write_settings_file({"settings": {"threads": 2}})
    assert [settings.get("threads") for _ in range(5)] == [2] * 5
    assert settings.get("strict") is False and settings.stored("tuned") == {}
    assert len(parses) == 1
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("the file was read again"))
    assert settings.get("threads") == 2


def test_a_changed_file_is_read_again(parses: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    settled(monkeypatch)
    path = settings.write_settings_file({"settings": {"threads": 2}})
    assert settings.get("threads") == 2
    settings.write_settings_file({"settings": {"threads": 33}})  # another file in its place
    assert settings.get("threads") == 33
    path.write_text("[settings]\nthreads = 444\n")  # the same file
    assert settings.get("threads") == 444
    path.unlink()
    assert settings.lookup("threads") == settings.Value(None, "default")
    settings.write_settings_file({"settings": {"threads": 2}})
    assert settings.get("threads") == 2


def test_a_young_file_is_compared_by_what_it_holds(parses: list[bytes]) -> None:
    """Two writes within one tick of a coarse clock leave the same time, size and inode."""
    path = settings.write_settings_file({"settings": {"threads": 2}})
    before = path.stat()
    assert settings.get("threads") == settings.get("threads") == 2
    assert len(parses) == 1, "the same bytes are not parsed twice"
    path.write_text(path.read_text().replace("2", "3"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert settings.get("threads") == 3


def test_another_file_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings.write_settings_file({"settings": {"threads": 2}})
    assert settings.get("threads") == 2
    settings.write_settings_file({"settings": {"threads": 5}}, tmp_path / "other.toml")
    monkeypatch.setenv("ANYTORCH_CONFIG", str(tmp_path / "other.toml"))
    assert settings.get("threads") == 5
    monkeypatch.delenv("ANYTORCH_CONFIG")
    for threads, folder in ((6, "a"), (7, "b"), (6, "a")):
        monkeypatch.setenv("XDG_CONFIG_HOME" if sys.platform == "linux" else "HOME", str(tmp_path / folder))
        settings.write_settings_file({"settings": {"threads": threads}})
        assert settings.get("threads") == threads


def test_what_is_read_for_writing_is_ones_own() -> None:
    settings.write_settings_file({"settings": {"threads": 2}})
    data = settings.read_settings_file()
    data["settings"]["threads"] = 9
    assert settings.get("threads") == 2


def test_threads_read_while_another_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    settled(monkeypatch)
    settings.write_settings_file({"settings": {"api_key_file": "k"}})
    seen: list[str] = []
    written = threading.Event()

    def read() -> None:
        while not written.is_set():
            seen.append(settings.get("api_key_file"))

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for length in range(2, 60):  # each file has a size of its own
        settings.write_settings_file({"settings": {"api_key_file": "k" * length}})
        assert settings.get("api_key_file") == "k" * length
    written.set()
    for reader in readers:
        reader.join()
    assert seen and {len(value) for value in seen} <= set(range(1, 60))


def test_use_is_undone_by_an_exception() -> None:
    with pytest.raises(RuntimeError), settings.use(strict=True):
        raise RuntimeError
    assert settings.get("strict") is False


def test_use_is_invisible_to_another_thread() -> None:
    seen = []
    with settings.use(backend="cpu"):
        thread = threading.Thread(target=lambda: seen.append(settings.get("backend")))
        thread.start()
        thread.join()
    assert seen == ["auto"]


def test_a_mistyped_setting_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'backend'"), settings.use(backned="cpu"):
        pass


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ANYTORCH_STRICT", "maybe", "use 1 or 0"),
        ("ANYTORCH_THREADS", "0", "above 0"),
        ("ANYTORCH_THREADS", "many", "use a whole number above 0"),
        ("ANYTORCH_THREADS", "2.5", "use a whole number above 0"),
        ("ANYTORCH_PROBE_TIMEOUT", "nan", "above 0"),
        ("ANYTORCH_PROBE_TIMEOUT", "soon", "use a number of seconds"),
        ("ANYTORCH_WEBGPU_MEMORY", "plenty", "use a size such as 6GiB"),
        ("ANYTORCH_LOG_LEVEL", "LOUD", "use one of"),
        ("ANYTORCH_CPU_DTYPE", "float8", "use one of"),
    ],
)
def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str) -> None:
    name = next(s.name for s in settings.SETTINGS.values() if variable in s.env)
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=words) as caught:
        settings.get(name)
    assert variable in str(caught.value)


def test_an_empty_variable_is_unset_but_an_empty_list_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYTORCH_BACKEND", "")
    monkeypatch.setenv("ANYTORCH_PLUGINS", "")
    assert settings.get("backend") == "auto"
    assert settings.get("plugins") == ()


@pytest.mark.parametrize(
    "content",
    [b"settings = 3\n", b"[settings\n", b"\xff\xfe\x00", b"[settings]\nthreads = -1\n", b"[" * 100_000],
)
def test_a_corrupt_file_is_named_and_left_as_it_was(content: bytes) -> None:
    path = settings.settings_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        settings.get("threads")
    assert str(path) in str(caught.value)
    assert path.read_bytes() == content


def test_an_unreadable_file_is_an_error_of_ours() -> None:
    settings.settings_file().mkdir(parents=True)  # a folder in its place: unreadable for root too
    with pytest.raises(ConfigError, match="cannot read"):
        settings.get("backend")


def test_a_failed_write_leaves_the_old_file_and_no_litter(monkeypatch: pytest.MonkeyPatch) -> None:
    settings.write_settings_file({"settings": {"backend": "cpu"}})
    path = settings.settings_file()
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        settings.write_settings_file({"settings": {"backend": "xpu"}})
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("platform", "env", "folder"),
    [
        ("linux", {"HOME": "/h"}, "/h/.config/anytorch"),
        ("linux", {"HOME": "/h", "XDG_CONFIG_HOME": "/x"}, "/x/anytorch"),
        ("darwin", {"HOME": "/h"}, "/h/Library/Application Support/anytorch"),
        ("win32", {"LOCALAPPDATA": "/l", "USERPROFILE": "/u"}, "/l/anytorch/config"),
    ],
)
def test_the_users_folder(platform: str, env: dict[str, str], folder: str) -> None:
    assert settings.user_folder("config", env, platform) == Path(folder)


@pytest.mark.parametrize("value", ["3", "true", "['cuda']"])
def test_a_back_end_is_text(value: str) -> None:
    settings.settings_file().write_text(f"[settings]\nbackend = {value}\n")
    with pytest.raises(ConfigError, match='use text such as "cuda"') as caught:
        settings.get("backend")
    assert str(settings.settings_file()) in str(caught.value)


def test_every_variable_of_ours_in_the_source_is_documented() -> None:
    root = Path(__file__).parents[1]
    page = (root / "docs/reference/settings.md").read_text()
    source = "\n".join(path.read_text(encoding="utf-8") for path in (root / "src").rglob("*.py"))
    named = set(re.findall(r"\bANYTORCH_[A-Z_]+[A-Z]\b", source))
    assert "ANYTORCH_NVML_LIBRARY" in named
    named -= {"ANYTORCH_DEVICE", "ANYTORCH_WEIGHTS"}  # kinds of sockets in ComfyUI, not variables
    assert not {name for name in named if f"`{name}`" not in page}


def test_every_setting_and_variable_is_documented() -> None:
    page = (Path(__file__).parents[1] / "docs/reference/settings.md").read_text()
    for setting in settings.SETTINGS.values():
        assert f"`{setting.name}`" in page
        for variable in setting.env:
            assert f"`{variable}`" in page


def test_a_linked_settings_file_stays_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, link = tmp_path / "dotfiles.toml", tmp_path / "linked.toml"
    target.write_text("")
    link.symlink_to(target)
    monkeypatch.setenv("ANYTORCH_CONFIG", str(link))
    settings.write_settings_file({"settings": {"backend": "cpu"}})
    assert link.is_symlink() and "cpu" in target.read_text()
