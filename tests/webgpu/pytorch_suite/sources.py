"""PyTorch's own tests, from Debian's source package of PyTorch: fetched, unpacked into .cache, never committed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
CACHE = REPOSITORY / ".cache" / "pytorch-tests"
MIRROR = "http://deb.debian.org/debian"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
SUITES = ("sid", "forky", "trixie")


class NoSources(Exception):
    """No suite's package could be had."""


def find(torch_version: str) -> Path:
    """The folder test/ of a PyTorch source tree: ANYTORCH_PYTORCH_TESTS, else one unpacked earlier, else a fetched one."""
    named = os.environ.get("ANYTORCH_PYTORCH_TESTS")
    if named:
        return Path(named)
    unpacked = sorted(CACHE.glob("*/test"), key=lambda folder: _distance(folder.parent.name, torch_version))
    return unpacked[0] if unpacked else fetch(torch_version)


def _distance(version: str, wanted: str) -> int:
    """How many minor releases apart."""
    numbers = [re.match(r"(\d+)\.(\d+)", text) for text in (version, wanted)]
    if None in numbers:
        return 1_000_000
    (a, b), (c, d) = [(int(found[1]), int(found[2])) for found in numbers if found is not None]
    return abs((a * 1000 + b) - (c * 1000 + d))


def fetch(torch_version: str) -> Path:
    """Download the package of the suite whose version is nearest to `torch_version` and can be had, and unpack its tests."""
    if shutil.which("apt-get") is None:
        raise NoSources("PyTorch's tests are fetched with apt-get; name a folder with them in ANYTORCH_PYTORCH_TESTS")
    troubles = []
    with tempfile.TemporaryDirectory() as folder:
        offered = []
        for suite in SUITES:
            apt = _Apt(Path(folder) / suite, suite)
            version = apt.version()
            if version:
                offered.append((_distance(version, torch_version), suite, version, apt))
        for _, suite, version, apt in sorted(offered, key=lambda each: (each[0], SUITES.index(each[1]))):
            archive = apt.download()
            if archive is None:
                troubles.append(f"{suite}'s {version} is listed and cannot be downloaded")
                continue
            return _unpack(archive, CACHE / version.split("+")[0])
    raise NoSources("; ".join(troubles) or f"no suite of {', '.join(SUITES)} lists a source package of PyTorch")


class _Apt:
    """apt with one suite's source packages and nothing of the system's."""

    def __init__(self, folder: Path, suite: str) -> None:
        self.folder = folder
        (folder / "lists" / "partial").mkdir(parents=True)
        lines = ("Types: deb-src", f"URIs: {MIRROR}", f"Suites: {suite}", "Components: main", f"Signed-By: {KEYS}")
        (folder / "debian.sources").write_text("\n".join(lines) + "\n", "utf-8")
        self.options = [
            *("-o", f"Dir::Etc::SourceList={folder / 'debian.sources'}", "-o", "Dir::Etc::SourceParts=-"),
            *("-o", f"Dir::State::Lists={folder / 'lists'}", "-o", f"Dir::Cache={folder}"),
            *("-o", "APT::Sandbox::User=root"),
        ]

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [command[0], *self.options, *command[1:]], cwd=self.folder, capture_output=True, text=True, check=False
        )

    def version(self) -> str:
        """The version this suite lists; "" where there is none, or no such suite."""
        if self._run("apt-get", "update", "-qq").returncode:
            return ""
        found = re.search(r"^Version: (?:\d+:)?(\S+)$", self._run("apt-cache", "showsrc", "pytorch").stdout, re.M)
        return found[1] if found else ""

    def download(self) -> Path | None:
        done = self._run("apt-get", "source", "-qq", "--download-only", "pytorch")
        found = sorted(self.folder.glob("*.orig.tar.*"))
        return found[0] if done.returncode == 0 and found else None


def _unpack(archive: Path, into: Path) -> Path:
    """Only test/: the whole tree is a gigabyte."""
    part = into.with_name(into.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            _, _, path = member.name.partition("/")
            if path.startswith("test/") and member.isfile() and ".." not in path:
                member.name = path
                tar.extract(member, part, filter="data")
    shutil.rmtree(into, ignore_errors=True)
    part.rename(into)
    return into / "test"
