"""Build the native targets: a driver, the sources it drives, sanitizers, and libFuzzer, which atheris brings along.

Debian's clang would bring libFuzzer, too, and is half a gigabyte; the atheris wheel carries the same library, and g++ is
here anyway. What g++ lacks is clang's counters: it calls `__sanitizer_cov_trace_pc` at every edge instead, and main.cpp
counts those calls for libFuzzer. Comparisons (`trace-cmp`) are the same calls in both.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from anytorch.native import simd
from anytorch.native.compiler import SHARED, find_compiler

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "src" / "anytorch"
ASAN = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
TSAN = ("-fsanitize=thread",)
COVERAGE = ("-fsanitize-coverage=trace-pc,trace-cmp",)
# The package's own flags, but for what would hide a mistake; -O1 keeps the sanitizers' reports readable and the build short.
FLAGS = (
    "-O1",
    "-g",
    "-std=c++17",
    "-fno-omit-frame-pointer",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-w",
    "-pthread",
)
# A sanitizer's report ends the process; memory that libFuzzer's own limit does not see is bounded, too.
OPTIONS = {
    "ASAN_OPTIONS": "abort_on_error=0:detect_leaks=1:allocator_may_return_null=1:max_allocation_size_mb=2048",
    "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


@dataclass(frozen=True)
class Native:
    """`driver` includes the first of `sources`, which are ours, below src/anytorch; the others are linked to it."""

    name: str
    sources: tuple[str, ...]
    sanitizers: tuple[str, ...] = ASAN
    flags: tuple[str, ...] = ()
    longest: int = 512
    folder: Path = HERE  # of the driver

    @property
    def driver(self) -> Path:
        return self.folder / f"{self.name}.cpp"


KEPT_NBYTES = 6_000  # of a target's corpus in the repository
POOLS = ("text/encoders/wordpiece/wordpiece.cpp", "graph/emit/code/pool.cpp", "memory/code/adam.cpp")
MOVES = (
    *("recorded/moves/moves.cpp", "gpu/code/tape.cpp", "forecast/decoding/uniform.cpp"),
    "native/code/processor.cpp",
)
SETS = {
    one.name: one
    for one in (
        Native("native_wordpiece", ("text/encoders/wordpiece/wordpiece.cpp",)),
        Native("native_encoder", ("text/packed/code/encoder.cpp",)),
        Native("native_attention", ("text/packed/code/graph.cpp",)),
        Native("native_linear", ("quant/cpp/linear.cpp",)),
        Native("native_decode", ("text/persistent/code/decode.cpp",)),
        Native("native_rows", ("text/persistent/code/decode.cpp",)),
        Native("native_draw", ("text/persistent/code/draw.h",)),
        Native("native_panels", ("text/persistent/code/decode.cpp",)),
        Native("native_crc32", ("native/code/crc32.cpp",), longest=2048),
        Native("native_adam", ("memory/code/adam.cpp",), flags=("-ffp-contract=off",)),
        Native("native_moves", MOVES),
        Native("native_layer", ("gpu/code/vulkan_layer.cpp",)),
        Native("native_launcher", ("gpu/code/launcher/launcher.cpp",)),
        Native("native_pools", ("text/packed/code/encoder.cpp", *POOLS), TSAN, longest=64),
        Native("native_workers", ("text/persistent/code/decode.cpp",), TSAN, longest=64),
        Native("native_openmp", ("quant/cpp/linear.cpp",), TSAN, longest=64),
        Native("native_returned", ("gpu/code/launcher/launcher.cpp",), TSAN, longest=128),
    )
}


def fuzzer() -> Path:
    """libFuzzer's archive in the atheris package. Raises ModuleNotFoundError where that is not installed."""
    found = importlib.util.find_spec("atheris")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("atheris is not installed: pip install --group fuzz", name="atheris")
    return Path(found.origin).parents[1] / "libclang_rt.fuzzer_no_main.a"


def built(one: Native, folder: Path) -> Path:
    """The target's program, built unless the folder has it. Raises CalledProcessError with the compiler's words."""
    compiler = find_compiler()
    flags = [*FLAGS, *one.flags, *simd.level().flags, *one.sanitizers, f"-I{SHARED}", f"-I{SOURCE}", f"-I{HERE}"]
    sources = [SOURCE / name for name in one.sources]
    read = [one.driver, HERE / "main.cpp", *sorted(HERE.glob("*.h")), Path(__file__), *sources]
    read += [
        header for place in sorted({SHARED, *(path.parent for path in sources)}) for header in sorted(place.glob("*.h"))
    ]
    digest = hashlib.sha256(" ".join([compiler.identity, *flags]).encode())
    for path in read:
        digest.update(path.read_bytes())
    target = folder / f"{one.name}-{digest.hexdigest()[:16]}"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        # The driver includes the first source, whose types it needs; main.cpp must not count its own edges.
        parts = [(one.driver, COVERAGE), *((path, COVERAGE) for path in sources[1:]), (HERE / "main.cpp", ())]
        objects = []
        for number, (path, coverage) in enumerate(parts):
            objects.append(f"{work}/{number}.o")
            run([*compiler.command, *flags, *coverage, "-c", str(path), "-o", objects[-1]])
        made = f"{work}/{one.name}"
        link = ["-pthread", *one.sanitizers, "-Wl,--wrap=__sanitizer_cov_trace_pc", *objects, str(fuzzer()), "-o", made]
        run([*compiler.command, *link])
        Path(made).replace(target)
    return target


def run(command: list[str]) -> None:
    """Run the compiler, and let what it says be in the error."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr[-4000:])
