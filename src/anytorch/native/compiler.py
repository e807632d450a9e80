"""The machine's C++ compiler: finding it, and running it on a few sources."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from anytorch import logs, settings
from anytorch.errors import CompilerFailed, CompilerMissing

log = logs.logger(__name__)

NAMES = ("g++", "clang++", "c++")
TIMEOUT_S = 300.0

# No -ffast-math: a text's vector must be the same bits alone and in a batch, so sums keep the order they are written
# in. Contraction to fused multiply-add is the same for every instance of an expression and is wanted.
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
    "-w",  # what a compiler of some other year warns about is no news to a user
)
SHARED = Path(__file__).parent / "code"  # headers that every library may include
HINT = (
    "install a C++ compiler (Debian: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install; "
    "without administrator's rights: pip install 'anytorch[compiler]')"
)
ZIG = "ziglang"  # the package of the extra `compiler`: clang, with the headers and C++ library that it needs
ZIG_BASELINE = "-mcpu=baseline"  # else it would use all that this processor has, whatever level is asked for


_ARM_MARCH = "-march=armv8.2-a"


def zig_flags(flags: Sequence[str]) -> list[str]:
    """A level's flags as zig takes them: it knows processors by -mcpu alone, where others take -march."""
    return [ZIG_BASELINE + flag[len(_ARM_MARCH) :] if flag.startswith(_ARM_MARCH) else flag for flag in flags]


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]  # the program, and arguments that came with its name ("ccache g++")
    identity: str  # changes when the compiler does; cheap to find out, so that a warm start runs no process
    is_zig: bool = False
    is_packaged: bool = False  # came by `pip install 'anytorch[compiler]'`


def find_compiler() -> Compiler:
    """The compiler the setting `compiler` names, else the first of g++, clang++, c++, else the package ziglang's.

    Raises CompilerMissing.
    """
    named = settings.get("compiler")
    if named:
        # The path of a program as it is, spaces included; otherwise words, as in a shell ("ccache g++").
        command = [named] if shutil.which(named) else shlex.split(named)
        program = shutil.which(command[0]) if command else None
        if program is None:
            raise CompilerMissing(
                f"the C++ compiler {named!r} (setting `compiler`, ANYTORCH_CXX or CXX) is not on this machine",
                hint=HINT,
            )
        if Path(program).stem == "zig" or ZIG in command:  # python -m ziglang c++
            return Compiler((program, *command[1:], ZIG_BASELINE), _identity(program, *command[1:]), is_zig=True)
        return Compiler((program, *command[1:]), _identity(program, *command[1:]))
    for name in NAMES:
        program = shutil.which(name)
        if program is not None:
            return Compiler((program,), _identity(program))
    if (zig := packaged_zig()) is not None:
        return Compiler((str(zig), "c++", ZIG_BASELINE), _identity(str(zig)), is_zig=True, is_packaged=True)
    looked_for = f"{', '.join(NAMES)} and the package {ZIG}"
    raise CompilerMissing(f"no C++ compiler on this machine (looked for {looked_for})", hint=HINT)


def packaged_zig() -> Path | None:
    """The program of the package ziglang, which `pip install 'anytorch[compiler]'` brings; None if it is not installed."""
    from importlib.util import find_spec

    found = find_spec(ZIG)
    if found is None or found.origin is None:
        return None
    program = Path(found.origin).parent / ("zig.exe" if sys.platform == "win32" else "zig")
    return program if program.is_file() else None


def _identity(program: str, *arguments: str) -> str:
    path = Path(program).resolve()
    status = path.stat()
    return " ".join([str(path), str(status.st_size), str(status.st_mtime_ns), *arguments])


@contextlib.contextmanager
def only_builder(lock: Path) -> Iterator[None]:
    """Keep other processes from building the same thing until this one is done. The system frees a dead holder's lock."""
    with lock.open("ab") as file:
        if sys.platform != "win32":  # there both compile, and the second rename wins: slower, not wrong
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file frees the lock; the file stays, because removing it would let two holders in


def _spelled(compiler: Compiler, flags: Sequence[str]) -> list[str]:
    """The flags as this compiler takes them."""
    if compiler.is_zig:
        return zig_flags(flags)
    # GCC for Windows aligns the stack to 16 bytes and stores wider vectors there as if it were aligned to their size (its
    # bug 54412): the assembler is told to take the instructions that do not mind.
    wide = sys.platform == "win32" and any(flag.startswith("-mavx") for flag in flags)
    is_gcc = "clang" not in Path(compiler.command[0]).stem
    return [*flags, *(["-Wa,-muse-unaligned-vector-move"] if wide and is_gcc else [])]


def compile_header(compiler: Compiler, header: Path, flags: Sequence[str], target: Path) -> None:
    """Precompile a header for sources that are compiled with the same flags. Raises CompilerFailed."""
    flags = _spelled(compiler, flags)
    command = [*compiler.command, *FLAGS, *flags, f"-I{SHARED}", "-x", "c++-header", str(header), "-o", str(target)]
    _run_all([command], _environment(compiler))


def compile_library(compiler: Compiler, sources: Sequence[Path], flags: Sequence[str], target: Path) -> None:
    """Compile the sources side by side and link them to the shared library `target`. Raises CompilerFailed."""
    flags = _spelled(compiler, flags)
    objects = [target.parent / f"{number}-{source.stem}.o" for number, source in enumerate(sources)]
    commands = [
        [*compiler.command, *FLAGS, *flags, f"-I{SHARED}", "-c", str(source), "-o", str(one)]
        for source, one in zip(sources, objects, strict=True)
    ]
    link = [*compiler.command, "-shared", *(["-pthread"] if sys.platform != "win32" else []), "-o", str(target)]
    _run_all(commands, _environment(compiler))
    if compiler.is_zig and sys.platform == "linux":
        # zig compiles its C++ library, for a minute or two, before it links with it for the first time. A generated kernel
        # needs nothing of it, and what it needs of the C library is in this process: whether that is enough, loading tells.
        _run_all([[*link, "-nostdlib", *map(str, objects)]], _environment(compiler))
        try:
            ctypes.CDLL(str(target))
            return
        except OSError as exc:
            log.info("linking with the C++ library of zig, which is compiled first if this is the first time: %s", exc)
    _run_all([[*link, *map(str, objects)]], _environment(compiler))


def _environment(compiler: Compiler) -> dict[str, str] | None:
    """The variables to run a compiler with; None: our own."""
    if not compiler.is_zig or "ZIG_GLOBAL_CACHE_DIR" in os.environ:
        return None
    # zig compiles its C++ library once and keeps it: beside ours, where there may be no home folder to write to.
    return {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(settings.cache_folder() / "zig")}


def _run_all(commands: Sequence[Sequence[str]], environment: dict[str, str] | None) -> None:
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            running.append(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    text=True,
                    env=environment,
                )
            )
        for command, process in zip(commands, running, strict=True):
            output, _ = process.communicate(timeout=TIMEOUT_S)
            if process.returncode != 0:
                raise CompilerFailed(
                    f"{shlex.join(command)} failed with status {process.returncode}:\n{_end(output)}",
                    hint="name another compiler with ANYTORCH_CXX",
                    output=output,
                )
    except OSError as exc:
        raise CompilerFailed(f"cannot run {commands[0][0]}: {exc.strerror}", hint=HINT) from exc
    except subprocess.TimeoutExpired as exc:
        raise CompilerFailed(f"{commands[0][0]} was not done after {TIMEOUT_S:.0f} s", hint=HINT) from exc
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _end(output: str, limit: int = 4000) -> str:
    text = output.strip()
    return text if len(text) <= limit else f"…{text[-limit:]}"
