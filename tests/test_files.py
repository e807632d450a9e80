"""Files that are replaced whole."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from anytorch.files import replace_file, replacing, sync_folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_replaced_or_stays(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    replace_file(path, b"old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"half of the ne")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    replace_file(path, b"new")
    assert path.read_bytes() == b"new" and list(path.parent.iterdir()) == [path]


def test_what_a_killed_process_left_is_no_obstacle(tmp_path: Path) -> None:
    from anytorch import files

    following = int(repr(files._numbers).strip("count()"))
    for number in range(following, following + 3):
        (tmp_path / f".file.{os.getpid()}-{number}").touch()
    replace_file(tmp_path / "file", b"x")
    assert (tmp_path / "file").read_bytes() == b"x"


@pytest.mark.skipif(os.name != "posix", reason="other systems have other rights")
@pytest.mark.parametrize("there", [True, False], ids=["to a file", "to nothing yet"])
def test_through_a_link_it_stays_a_link(tmp_path: Path, there: bool) -> None:
    target, link = tmp_path / "dotfiles" / "config.toml", tmp_path / "config.toml"
    target.parent.mkdir()
    if there:
        target.write_bytes(b"old")
    link.symlink_to(Path("dotfiles", "config.toml"))
    replace_file(link, b"new", through_links=True)
    assert link.is_symlink() and target.read_bytes() == b"new"
    assert list(target.parent.iterdir()) == [target]


def test_what_a_link_leads_to_may_be_others(tmp_path: Path) -> None:
    """A model cache keeps one file for many folders of links."""
    blob, link = tmp_path / "blob", tmp_path / "model.safetensors"
    blob.write_bytes(b"shared")
    link.symlink_to(blob)
    replace_file(link, b"mine")
    assert blob.read_bytes() == b"shared" and not link.is_symlink() and link.read_bytes() == b"mine"


@pytest.mark.skipif(os.name != "posix", reason="other systems have other rights")
def test_who_may_read_it(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from anytorch.files import replace_file\n"
        "os.umask(0o027)\n"
        "replace_file(Path(sys.argv[1]), b'x')\n"
        "replace_file(Path(sys.argv[2]), b'x', private=True)\n"
        "replace_file(Path(sys.argv[3]), b'y')\n"
    )
    paths = [tmp_path / name for name in ("shared", "secret", "given")]
    paths[2].write_bytes(b"x")
    paths[2].chmod(0o604)
    subprocess.run([sys.executable, "-c", code, *map(str, paths)], check=True)
    assert [mode(path) for path in paths] == [0o640, 0o600, 0o604]


@pytest.mark.skipif(os.name == "nt", reason="folders are not synced there")
@pytest.mark.parametrize("call", ["open", "fsync"])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EIO, errno.ENOSPC])
def test_a_file_system_that_does_not_sync_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    asked = []

    def refuse(*given: object) -> None:
        asked.append(given)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, refuse)
    if code in (errno.EIO, errno.ENOSPC):  # the names are not on the disk, and they should be
        with pytest.raises(OSError, match=os.strerror(code)):
            sync_folder(tmp_path)
    else:
        sync_folder(tmp_path)
    assert len(asked) == 1
