"""Building our C++ on first use: once, whole, and with a clear answer when it cannot be done."""

from __future__ import annotations

import errno
import os
import platform
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anytorch import native, settings
from anytorch.errors import CompilerFailed, CompilerMissing, NativeUnavailable, UsageError
from anytorch.native import compiler as compilers
from anytorch.native import library, simd, trust

ADD = 'extern "C" __attribute__((visibility("default"))) int add(int a, int b) { return a + b; }\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    path = tmp_path / "code" / "add.cpp"
    path.write_text(ADD)
    return path


@pytest.fixture(autouse=True)
def needs_a_compiler() -> None:
    compilers.find_compiler()  # CompilerMissing here fails the test: a green run has compiled something


def libraries() -> list[Path]:
    return sorted((settings.cache_folder() / "native").glob(f"*{library.SUFFIX}"))


def fake_compiler(tmp_path: Path, script: str) -> str:
    path = tmp_path / "fake-cxx"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_built_once_and_loaded(source: Path) -> None:
    assert native.load("add", [source]).add(2, 3) == 5
    (built,) = libraries()
    before = built.stat().st_mtime_ns
    assert native.load("add", [source]).add(4, 5) == 9
    assert native.build("add", [source]) == built
    assert built.stat().st_mtime_ns == before


def test_a_library_is_synced_as_windows_wants_it(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, fsync of a file that is open for reading alone fails with EBADF."""
    fcntl = pytest.importorskip("fcntl")
    synced, fsync = [], os.fsync

    def strict(fd: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        synced.append(fd)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", strict)
    built = native.build("add", [source])
    assert libraries() == [built] and synced


def test_a_changed_source_header_flag_or_level_is_another_library(source: Path) -> None:
    native.build("add", [source])
    source.write_text(ADD.replace("a + b", "a - b"))
    assert native.load("add", [source]).add(2, 3) == -1
    (source.parent / "add.h").write_text("// part of the source\n")
    native.build("add", [source])
    native.build("add", [source], flags=["-DX"])
    native.build("add", [source], level="baseline")
    assert len(libraries()) == (5 if len(native.supported()) > 1 else 4)


def test_several_sources_are_linked_together(source: Path) -> None:
    other = source.parent / "twice.cpp"
    other.write_text('extern "C" int add(int, int);\n' + ADD.replace("add", "twice").replace("a + b", "add(a, b) * 2"))
    assert native.load("both", [source, other]).twice(2, 3) == 10


def test_no_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CompilerMissing, match="cannot build 'add': no C\\+\\+ compiler") as caught:
        native.load("add", [source])
    assert isinstance(caught.value, NativeUnavailable)
    assert "apt install" in caught.value.hint


def test_the_named_compiler_is_absent(source: Path) -> None:
    with settings.use(compiler="no-such-compiler"), pytest.raises(CompilerMissing, match="no-such-compiler"):
        native.load("add", [source])


def test_an_earlier_build_serves_when_the_compiler_is_gone(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = native.build("add", [source])
    monkeypatch.setenv("PATH", "")
    assert native.build("add", [source]) == built


def test_a_compiler_that_fails_says_what_it_said(source: Path) -> None:
    source.write_text("this is not C++;\n")
    with pytest.raises(CompilerFailed, match="failed with status 1") as caught:
        native.load("add", [source])
    assert "not C++" in caught.value.output or "this" in caught.value.output
    assert libraries() == []
    assert [p for p in (settings.cache_folder() / "native").iterdir() if p.is_dir()] == []


def test_a_compiler_that_makes_rubbish(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rubbish = fake_compiler(tmp_path, 'for last; do :; done\nwhile [ "$1" != -o ]; do shift; done\necho rubbish > "$2"')
    with settings.use(compiler=rubbish), pytest.raises(CompilerFailed, match="built and cannot be loaded"):
        native.load("add", [source])
    assert "built again" in caplog.text


@pytest.mark.parametrize("kept", [0, 100, 5000, -1])
def test_a_damaged_library_is_built_again(source: Path, caplog: pytest.LogCaptureFixture, kept: int) -> None:
    """Cut off in its data it would be mapped, and end the process with SIGBUS: it is compared before it is loaded."""
    built = native.build("add", [source])
    built.write_bytes(built.read_bytes()[:kept])
    assert native.load("add", [source]).add(1, 1) == 2
    assert "was changed after it was built" in caplog.text and "built again" in caplog.text
    assert not trust.refusal(built)


def test_every_damage_is_found_before_loading(source: Path) -> None:
    built = native.build("add", [source])
    whole, digest = built.read_bytes(), trust.hash_of(built).read_bytes()
    assert not trust.refusal(built)
    for at in range(0, len(whole), 1009):
        built.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        assert trust.refusal(built) == "it was changed after it was built"
    built.write_bytes(whole)
    assert not trust.refusal(built)
    for wrong in (b"", b"\xff" * 64, digest[:-1]):
        trust.hash_of(built).write_bytes(wrong)
        trust._whole.clear()
        assert trust.refusal(built) == "it was changed after it was built"
    trust.hash_of(built).unlink()
    assert trust.refusal(built) == trust.NO_HASH
    assert native.load("add", [source]).add(1, 2) == 3 and not trust.refusal(built), (
        "an earlier version's is built again"
    )


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, 54321, -1)
    else:
        # Somebody else from here on, whose new files are their own, but for those of this process: they are ours elsewhere.
        theirs = path if path.is_dir() else path.parent
        honest = trust._owner_of_new
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        monkeypatch.setattr(trust, "_owner_of_new", lambda folder: os.geteuid() if folder == theirs else honest(folder))


@pytest.mark.skipif(sys.platform == "win32", reason="owners of POSIX")
@pytest.mark.parametrize("what", ["library", "hash", "folder"])
def test_what_is_somebody_elses_is_not_loaded(
    source: Path, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built = native.build("add", [source])
    evil = source.with_name("evil.cpp")
    evil.write_text(ADD.replace("a + b", "666"))
    built.write_bytes(native.build("evil", [evil]).read_bytes())
    trust.seal(built)
    give_away({"library": built, "hash": trust.hash_of(built), "folder": built.parent}[what], monkeypatch)
    loaded = native.load("add", [source])
    assert loaded.add(2, 3) == 5 and "belongs to another user" in caplog.text
    if what == "folder":  # a folder of one's own beside it, for this process and the next
        own = built.parent.with_name(f"native-{os.geteuid()}")
        assert Path(loaded._name).parent == own
        caplog.clear()
        assert native.build("add", [source]).parent == own
        assert not caplog.text, "ours is there: nothing is built again"


@pytest.mark.skipif(sys.platform == "win32", reason="owners of POSIX")
def test_a_file_system_with_its_own_idea_of_us(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NFS with all_squash: all that we make belongs to nobody, and is ours all the same."""
    ours = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: ours + 7)
    if ours == 0:  # root's files are trusted: give ours to somebody
        stat_of, fstat = Path.stat, os.fstat

        def squashed(status: os.stat_result) -> os.stat_result:
            return os.stat_result((*status[:4], 65534, *status[5:]))

        monkeypatch.setattr(Path, "stat", lambda path, **options: squashed(stat_of(path, **options)))
        monkeypatch.setattr(os, "fstat", lambda fd: squashed(fstat(fd)))
    built = native.build("add", [source])
    assert built.parent == settings.cache_folder() / "native" and not trust.refusal(built)
    assert native.build("add", [source]) == built and not caplog.text
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result((0, 0, 0, 0, ours + 7, *[0] * 5)))
    assert trust.refusal(built) == "it belongs to another user", "on an ordinary file system that is somebody else's"


@pytest.mark.skipif(sys.platform == "win32", reason="modes of POSIX")
def test_a_mount_whose_modes_cannot_be_changed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """drvfs: everything is 0777. What is damaged is refused there, too."""
    built = native.build("add", [source])
    own = built.parent.with_name(f"native-{os.geteuid()}")
    own.mkdir()
    for path in (built.parent, own, built, trust.hash_of(built)):
        path.chmod(0o777)
    monkeypatch.setattr(Path, "chmod", lambda *_: None)
    assert "can be written by others" in trust.refusal(built)
    with pytest.raises(PermissionError, match="can be written by others"):
        trust.own_folder(built.parent.parent, "native")
    monkeypatch.setenv("ANYTORCH_TRUST_CACHE", "1")
    assert native.build("add", [source]) == built and trust.own_folder(built.parent.parent, "native") == built.parent
    built.write_bytes(built.read_bytes()[:-1])
    assert trust.refusal(built) == "it was changed after it was built"
    assert native.load("add", [source]).add(2, 3) == 5 and libraries() == [built] and not trust.refusal(built)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    built.unlink()
    trust.hash_of(built).unlink()
    assert native.build("add", [source]) == built, "a mount that says so costs nothing either"


@pytest.mark.skipif(sys.platform == "win32", reason="modes of POSIX")
def test_a_folder_that_cannot_be_written_is_not_built_in(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An image that root warmed, run by another user: `native` is root's and is read, what is missing goes to our own."""
    cache = settings.cache_folder()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != cache / "native")
    built = native.build("add", [source])
    assert built.parent == cache / f"native-{os.geteuid()}" and "for this process alone" not in caplog.text
    assert native.load("add", [source]).add(2, 3) == 5
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="it cannot be written"):
        trust.own_folder(cache, "native")


@pytest.mark.skipif(sys.platform == "win32", reason="modes of POSIX")
@pytest.mark.parametrize("what", ["library", "hash"])
def test_what_others_can_write_is_not_loaded(source: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    built = native.build("add", [source])
    path = {"library": built, "hash": trust.hash_of(built)}[what]
    path.chmod(path.stat().st_mode | 0o002)
    assert native.load("add", [source]).add(2, 3) == 5
    assert "can be written by others" in caplog.text and not trust.refusal(built)


@pytest.mark.skipif(sys.platform == "win32", reason="modes of POSIX")
def test_what_our_group_can_write_is_loaded(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kubernetes' fsGroup makes it at each mount, here without a compiler to build it again."""
    built = native.build("add", [source])
    for path in (built, trust.hash_of(built), built.parent):
        path.chmod(path.stat().st_mode | 0o020)
    monkeypatch.setenv("PATH", "")
    assert native.load("add", [source]).add(2, 3) == 5


@pytest.mark.skipif(sys.platform == "win32", reason="modes of POSIX")
@pytest.mark.parametrize(
    ("mode", "group", "refused"),
    [(0o775, 0, False), (0o775, 7, False), (0o775, 8, False), (0o775, 9, True), (0o757, 0, True), (0o755, 9, False)],
)
def test_whose_group_may_write(monkeypatch: pytest.MonkeyPatch, mode: int, group: int, refused: bool) -> None:
    monkeypatch.setattr(os, "getegid", lambda: 7)
    monkeypatch.setattr(os, "getgroups", lambda: [8])
    for kind in (stat.S_IFREG, stat.S_IFDIR):
        status = os.stat_result((kind | mode, 1, 1, 1, os.geteuid(), group, 0, 0, 0, 0))
        assert ("it can be written by others" in trust._not_ours(status, "it", Path("/nowhere"))) is refused


@pytest.mark.skipif(sys.platform == "win32", reason="modes of POSIX")
def test_a_umask_that_lets_the_group_write_costs_nothing(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As Fedora and Ubuntu have it: what we build is ours all the same, and a folder made so before is closed."""
    folder = settings.cache_folder() / "native"
    before = os.umask(0o002)
    try:
        folder.mkdir(parents=True)
        assert folder.stat().st_mode & 0o020
        built = native.build("add", [source])
    finally:
        os.umask(before)
    assert built.parent == folder and not folder.stat().st_mode & 0o022 and not built.stat().st_mode & 0o022
    assert not trust.refusal(built) and "built again" not in caplog.text


def test_without_a_compiler_only_a_whole_library_serves(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built = native.build("add", [source])
    built.write_bytes(built.read_bytes()[:-1])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CompilerMissing):
        native.load("add", [source])


def test_a_cache_that_cannot_be_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")  # root may write a read-only folder, nobody may write below a file
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    library = native.load("add", [source])
    assert library.add(1, 2) == 3
    assert "for this process alone" in caplog.text
    assert native.load("add", [source]) is library and caplog.text.count("for this process alone") == 1, "compiled once"


CHILD = """
import sys
from pathlib import Path
from anytorch import native
print(native.load("add", [Path(sys.argv[1])]).add(20, 3))
"""


def start(source: Path, compiler: str = "") -> subprocess.Popen[str]:
    env = {**os.environ, **({"ANYTORCH_CXX": compiler} if compiler else {})}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(source)],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="file locks of POSIX")
def test_two_processes_compile_once(source: Path, tmp_path: Path) -> None:
    real = " ".join(compilers.find_compiler().command)
    slow = fake_compiler(tmp_path, f'echo run >> "{tmp_path}/runs"\nsleep 0.3\nexec {real} "$@"')
    children = [start(source, slow) for _ in range(2)]
    answers = [child.communicate(timeout=300) for child in children]
    assert [out.strip() for out, _ in answers] == ["23", "23"], answers
    assert (tmp_path / "runs").read_text().split() == ["run", "run"]  # one compile, one link
    assert len(libraries()) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9")
def test_killed_while_building(source: Path, tmp_path: Path) -> None:
    hanging = fake_compiler(tmp_path, f'touch "{tmp_path}/started"\nexec sleep 60')
    child = start(source, hanging)
    deadline = time.monotonic() + 120
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    folder = settings.cache_folder() / "native"
    assert libraries() == []
    assert len([p for p in folder.iterdir() if p.is_dir()]) == 1  # what the killed one left
    fake_compiler(tmp_path, f'exec {" ".join(compilers.find_compiler().command)} "$@"')
    os.utime(hanging, ns=(0, 0))
    with settings.use(compiler=hanging):
        assert native.load("add", [source]).add(20, 3) == 23


def test_left_overs_are_removed_by_the_next_builder(source: Path) -> None:
    path = native.build("add", [source])
    path.unlink()
    left = path.parent / f".{path.stem}.killed"
    left.mkdir()
    native.build("add", [source])
    assert path.exists() and not left.exists()


def test_levels_by_features() -> None:
    avx2 = frozenset({"avx2", "fma", "f16c"})
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    assert simd.supported(frozenset(), "x86_64") == ("baseline",)
    assert simd.supported(avx2, "AMD64") == ("baseline", "avx2")
    assert simd.supported(avx2 | {"avx_vnni"}, "x86_64") == ("baseline", "avx2", "avx2vnni")
    assert simd.supported(avx512 | {"avx512_vnni"}, "x86_64")[-1] == "avx512vnni"
    assert simd.supported(avx512 | {"avx512_vnni"}, "aarch64") == ("baseline",)
    assert simd.supported(frozenset({"asimd", "asimddp"}), "arm64") == ("baseline", "dotprod")
    assert simd.supported(frozenset({"asimddp", "i8mm"}), "aarch64") == ("baseline", "dotprod", "i8mm")
    assert simd.supported(avx2 | {"asimddp"}, "riscv64") == ("baseline",)


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="compared with /proc/cpuinfo")
def test_the_processor_itself_says_what_linux_says() -> None:
    """Windows has no /proc/cpuinfo; there the same library is asked."""
    assert simd.asked() == simd.features() & set(simd.ASKED)


def test_windows_takes_the_level_that_the_processor_names(monkeypatch: pytest.MonkeyPatch) -> None:
    avx2 = frozenset({"avx2", "fma", "f16c"})
    monkeypatch.setattr(simd.platform, "system", lambda: "Windows")
    monkeypatch.setattr(simd.platform, "machine", lambda: "AMD64")
    monkeypatch.setattr(simd, "asked", lambda: avx2)
    assert simd.level().name == "avx2"
    monkeypatch.setattr(simd.platform, "machine", lambda: "ARM64")
    assert simd.level().name == "baseline"


def test_without_a_compiler_nobody_knows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simd.platform, "system", lambda: "Windows")
    simd.asked.cache_clear()
    try:
        with settings.use(compiler="/no/compiler", carried_kernels=False):
            assert simd.level().name == "baseline"
    finally:
        simd.asked.cache_clear()


def test_a_level_this_processor_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simd, "features", frozenset)
    monkeypatch.setattr(simd.platform, "machine", lambda: "x86_64")
    assert simd.level().name == "baseline"
    with pytest.raises(UsageError, match="cannot run code of SIMD level 'avx2'"):
        simd.level("avx2")
    with pytest.raises(UsageError, match="unknown SIMD level"):
        simd.level("sse9")
    with settings.use(simd="avx512"), pytest.raises(UsageError, match="ANYTORCH_SIMD"):
        simd.level()


def test_a_compiler_in_a_folder_with_spaces(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "Program Files"
    folder.mkdir()
    program = fake_compiler(folder, f'exec {" ".join(compilers.find_compiler().command)} "$@"')
    monkeypatch.setenv("ANYTORCH_CXX", program)
    assert compilers.find_compiler().command == (program,)
    assert native.load("add", [source]).add(2, 3) == 5
    monkeypatch.setenv("ANYTORCH_CXX", f"'{program}' -O1")
    assert compilers.find_compiler().command == (program, "-O1")
