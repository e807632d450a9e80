"""Run the tests as they run on other machines: other CPUs' code paths, threads, languages, time zones, folders and users.

    python tools/other_machines.py                          the numeric tests on every CPU that this one can stand in for
    python tools/other_machines.py --list                   the machines, and what stands for each
    python tools/other_machines.py --only german,far_east   the whole suite there
    python tools/other_machines.py --only haswell -- tests/lite -k sums     these tests there
    eval "$(python tools/other_machines.py --env haswell)"  its variables in this shell, to find out why a test fails

Libraries choose their kernels by the CPU when they are loaded, and each has a switch to choose others. A machine is one
setting of all these switches; with AVX-512 one computer stands in for every x86-64 CPU before it.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Where numbers are computed on the CPU, by us or by the library that we are compared with.
NUMERIC = [
    *(f"tests/text/{part}" for part in ("checkpoints", "embed", "encoders", "packed")),
    *("tests/forecast", "--ignore=tests/forecast/kernels/test_kernels.py", "tests/lite", "tests/quant"),
    "tests/graph/test_kernels.py",
    *(f"tests/memory/test_{part}.py" for part in ("fused", "training", "packed_layers")),
    *(f"tests/webgpu/test_{part}.py" for part in ("reductions", "matmul", "norms", "softmax", "convolution", "models")),
]
# NumPy's groups of instructions, least first, as releases have named them; what a machine lacks is switched off.
NUMPY_GROUPS = {
    "x86-64-v3": {"AVX2", "FMA3", "X86_V3"},
    "x86-64-v4": {"AVX512F", "AVX512CD", "AVX512_SKX", "X86_V4"},
    "newer": {"AVX512_CLX", "AVX512_CNL", "AVX512_ICL", "AVX512_SPR"},
}


@dataclass(frozen=True)
class Machine:
    """`needs` are features of /proc/cpuinfo without which this computer cannot stand in for the machine."""

    about: str
    env: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # of NUMPY_GROUPS
    needs: frozenset[str] = frozenset()
    tests: Sequence[str] = ()  # none: the whole suite
    around: Callable[[], AbstractContextManager[Place]] | None = None


@dataclass(frozen=True)
class Place:
    """Where and as whom the tests run."""

    folder: Path = ROOT
    before: tuple[str, ...] = ()  # the command that the tests' command is put behind
    env: dict[str, str] = field(default_factory=dict)


def cpu(
    about: str,
    *,
    openblas: str,
    aten: str,
    onednn: str,
    mkl: str,
    ours: str,
    lanes: str,
    without: tuple[str, ...],
    needs: str = "",
) -> Machine:
    env = {
        "OPENBLAS_CORETYPE": openblas,
        "ATEN_CPU_CAPABILITY": aten,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_CBWR": mkl,
        "ANYTORCH_SIMD": ours,
        "LP_NATIVE_VECTOR_WIDTH": lanes,  # lavapipe, the Vulkan driver that computes on the CPU
    }
    return Machine(about, env, without, frozenset(needs.split()), NUMERIC)


@contextmanager
def folder_with_umlauts() -> Iterator[Place]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "Ein Ordner mit Ümläuten" / "any torch"
        copy_of_the_tree(folder)
        yield Place(folder)


@contextmanager
def as_nobody() -> Iterator[Place]:
    if os.geteuid() != 0:
        yield Place()  # an ordinary user already
        return
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        folder, home = Path(made) / "anytorch", Path(made) / "home"
        copy_of_the_tree(folder)
        home.mkdir()
        for path in (home, folder, *folder.rglob("*")):
            os.chown(path, 65534, 65534, follow_symlinks=False)
        before = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs")
        if subprocess.run([*before, sys.executable, "-c", "import torch"], check=False, capture_output=True).returncode:
            raise SystemExit(
                f"user 65534 cannot run {sys.executable}: one of its folders is closed to other users.\n"
                f"Open it (chmod o+x {Path.home()}), or make the environment with another Python: make PYTHON=…"
            )
        # A folder of its own for temporary files: pytest's is root's where root ran tests before.
        yield Place(folder, before, {"HOME": str(home), "TMPDIR": str(home), "USER": "nobody", "LOGNAME": "nobody"})


@contextmanager
def beside_busy_processes() -> Iterator[Place]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        yield Place()
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def german_locale() -> Iterator[Place]:
    """Compiled here, so that no locale needs to be installed (Debian's package `locales` has the sources)."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        done = subprocess.run(
            ["localedef", "-i", "de_DE", "-f", "UTF-8", f"{made}/de_DE.UTF-8"],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode not in (0, 1):  # 1: warnings
            raise SystemExit(
                f"de_DE.UTF-8 cannot be compiled: {done.stderr.strip()}\nInstall it: apt-get install locales"
            )
        yield Place(env={"LOCPATH": made})


def copy_of_the_tree(folder: Path) -> None:
    """What git would have in a clone, with what is not committed yet, and beside it the software driver."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    if (ROOT / ".cache" / "mesa").is_dir():
        shutil.copytree(ROOT / ".cache" / "mesa", folder / ".cache" / "mesa")
    if (ROOT.parent / "shared").is_dir() and not (folder.parent / "shared").exists():
        (folder.parent / "shared").symlink_to(ROOT.parent / "shared")


def threads(count: int) -> dict[str, str]:
    return {name: str(count) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


AVX512 = "avx512f avx512bw avx512dq avx512vl"
MACHINES: dict[str, Machine] = {
    "oldest": cpu(
        "x86-64 of 2009: SSE4.2, neither AVX nor fused multiply-add",
        openblas="Nehalem", aten="default", onednn="SSE41", mkl="COMPATIBLE", ours="baseline", lanes="128",
        without=("x86-64-v3", "x86-64-v4", "newer"),
    ),
    "haswell": cpu(
        "Intel of 2013 to 2020: AVX2",
        openblas="Haswell", aten="avx2", onednn="AVX2", mkl="AVX2", ours="avx2", lanes="256",
        without=("x86-64-v4", "newer"), needs="avx2 fma f16c",
    ),
    "zen": cpu(
        "AMD before Zen 4: AVX2, OpenBLAS's kernels for Zen, oneDNN without AVX2's",
        openblas="Zen", aten="avx2", onednn="AVX", mkl="AVX2", ours="avx2", lanes="256",
        without=("x86-64-v4", "newer"), needs="avx2 fma f16c",
    ),
    "skylakex": cpu(
        "Intel servers of 2017: AVX-512 without VNNI and bfloat16",
        openblas="SkylakeX", aten="avx512", onednn="AVX512_CORE", mkl="AVX512", ours="avx512", lanes="512",
        without=("newer",), needs=AVX512,
    ),
    "one_thread": Machine("one thread for every library", threads(1)),
    "four_threads": Machine("four threads, whatever the number of cores", threads(4)),
    "c_locale": Machine("no language and no UTF-8", {"LANG": "C", "LC_ALL": "C"}),
    "german": Machine("decimal commas", {"LANG": "de_DE.UTF-8", "LC_ALL": "de_DE.UTF-8"}, around=german_locale),
    "far_east": Machine("14 hours before UTC", {"TZ": "Pacific/Kiritimati"}),
    "far_west": Machine("9.5 hours after UTC", {"TZ": "Pacific/Marquesas"}),
    "umlauts": Machine("in a folder whose name has spaces and umlauts", around=folder_with_umlauts),
    "nobody": Machine("as an ordinary user without root", around=as_nobody),
    "busy": Machine("beside four busy processes", around=beside_busy_processes),
}  # fmt: skip
CPUS = tuple(name for name, machine in MACHINES.items() if machine.tests)


def features() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    return frozenset(word for line in text.splitlines() if line.startswith("flags") for word in line.split()[2:])


def numpy_features_on() -> set[str]:
    """What NumPy chooses among and this CPU has; it refuses to switch off anything else."""
    ask = """from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
print(*(name for name in __cpu_dispatch__ if __cpu_features__[name]))"""
    env = {name: value for name, value in os.environ.items() if name != "NPY_DISABLE_CPU_FEATURES"}
    return set(
        subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True, text=True, env=env).stdout.split()
    )


def environment(machine: Machine) -> dict[str, str]:
    lacking = set().union(*(NUMPY_GROUPS[group] for group in machine.without))
    off = sorted(lacking & numpy_features_on()) if lacking else []
    return machine.env | ({"NPY_DISABLE_CPU_FEATURES": " ".join(off)} if off else {})


def cannot_stand_in(machine: Machine) -> str | None:
    if machine.tests and platform.machine().lower() not in ("x86_64", "amd64"):
        return f"this is {platform.machine()}, not x86-64"
    lacking = machine.needs - features()
    return f"this CPU lacks {', '.join(sorted(lacking))}" if lacking else None


def run(name: str, tests: Sequence[str], jobs: int) -> bool:
    machine = MACHINES[name]
    with ExitStack() as stack:
        place = stack.enter_context(machine.around()) if machine.around else Place()
        path = os.pathsep.join(str(place.folder / part) for part in ("src", "compat/src"))
        env = os.environ | environment(machine) | place.env | {"PYTHONPATH": path}
        command = [*place.before, sys.executable, "-m", "pytest", "-q"]
        command += ["-n", str(jobs), "--dist", "worksteal", "-m", "not slow and not device", *(tests or machine.tests)]
        print(f"\n=== {name}: {machine.about}", flush=True)
        began = time.monotonic()
        code = subprocess.run(command, cwd=place.folder, env=env, check=False).returncode
        print(
            f"=== {name}: {'passed' if code == 0 else f'FAILED ({code})'}, {time.monotonic() - began:.0f} s", flush=True
        )
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="say what there is and end")
    parser.add_argument(
        "--only", metavar="NAMES", default=",".join(CPUS), help="machines, with commas; default: the CPUs"
    )
    parser.add_argument("--env", metavar="NAME", help="print a machine's variables for the shell and end")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("tests", nargs="*", metavar="TEST", help="what to run there, after --; options of pytest, too")
    options = parser.parse_args()
    names = [options.env] if options.env else options.only.split(",")
    for name in names:
        if name not in MACHINES:
            parser.error(f"unknown machine {name!r}; there are {', '.join(MACHINES)}")
    if options.env:
        print(
            "\n".join(f"export {key}={shlex.quote(value)}" for key, value in environment(MACHINES[options.env]).items())
        )
        return 0
    if options.list:
        for name, machine in MACHINES.items():
            why = cannot_stand_in(machine)
            print(f"{name:14}{machine.about}" + (f" (not here: {why})" if why else ""))
        return 0
    failed = []
    for name in names:
        if why := cannot_stand_in(MACHINES[name]):
            print(f"\n=== {name}: left out, {why}", flush=True)
        elif not run(name, options.tests, options.jobs):
            failed.append(name)
    print(f"\n{len(names) - len(failed)} of {len(names)} machines without failures")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
