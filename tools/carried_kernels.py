"""Compile the C++ libraries that a wheel carries, for one platform, with zig: a PyPI package that compiles for all of them.

    python tools/carried_kernels.py linux-x86_64 --output .cache/carried

makes .cache/carried/linux-x86_64/ with a library for each SIMD level and manifest.json with their hashes. What was compiled
from the same sources by the same zig is kept there and not compiled again. docs/design/0010-wheels.md says why zig.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))  # the package as it lies here, without anything that it needs to run

from anytorch.native import carried, simd  # noqa: E402
from anytorch.native.compiler import FLAGS, SHARED, ZIG_BASELINE, zig_flags  # noqa: E402

ZIG = "ziglang==0.17.0"  # the wheel's compiler: another version makes other code, so it changes here and nowhere else


@dataclass(frozen=True)
class Platform:
    """`tag` is the wheel's, `target` zig's; `system` and `machine` are what Python says there."""

    tag: str
    target: str
    system: str
    machine: str
    suffix: str

    @property
    def name(self) -> str:
        return carried.folder_of(self.system, self.machine)

    @property
    def levels(self) -> tuple[str, ...]:
        """Those that `simd.supported` can name there."""
        return simd.levels_of(self.machine)


# glibc 2.17 and macOS 11 are the oldest that the libraries need nothing newer than.
PLATFORMS = {
    one.name: one
    for one in (
        Platform("manylinux_2_17_x86_64.manylinux2014_x86_64", "x86_64-linux-gnu.2.17", "linux", "x86_64", ".so"),
        Platform("manylinux_2_17_aarch64.manylinux2014_aarch64", "aarch64-linux-gnu.2.17", "linux", "aarch64", ".so"),
        Platform("macosx_11_0_arm64", "aarch64-macos.11.0", "darwin", "arm64", ".so"),
        Platform("win_amd64", "x86_64-windows-gnu", "win32", "AMD64", ".dll"),
    )
}


@dataclass(frozen=True)
class Job:
    """One library to make: its file's name without the suffix, its sources, and what the caller compiles it with."""

    stem: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...]


def jobs(platform: Platform, levels: Sequence[str] | None = None) -> Iterator[Job]:
    """The libraries of a platform; of these levels alone, if they are given."""
    for library in carried.LIBRARIES:
        for level in library.levels or platform.levels:
            if levels is not None and level not in levels and library.levels is None:
                continue
            flags = (*simd.LEVELS[level].flags, *library.flags)
            digest = carried.digest(library.paths(), flags, system=platform.system, machine=platform.machine)
            yield Job(f"{library.name}-{level}-{digest}", library.paths(), flags)


def find_zig() -> Path:
    """The zig of ANYTORCH_ZIG, of the package ziglang, or of `make zig`. Raises FileNotFoundError."""
    if named := os.environ.get("ANYTORCH_ZIG"):
        return Path(named)
    name = "zig.exe" if sys.platform == "win32" else "zig"
    found = importlib.util.find_spec("ziglang")
    folders = [Path(found.origin).parent] if found is not None and found.origin else []
    for folder in [*folders, ROOT / ".cache" / "zig" / "ziglang"]:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"no zig to compile for other machines with: run `make zig`, or pip install {ZIG}")


def build(platform: Platform, output: Path, *, levels: Sequence[str] | None = None, workers: int = 1) -> Path:
    """Compile what the folder of `output` for this platform does not have. Returns the folder, with its manifest."""
    zig = find_zig()
    version = subprocess.run([zig, "version"], capture_output=True, text=True, check=True).stdout.strip()
    if version != ZIG.partition("==")[2]:
        raise SystemExit(f"zig {version} was found ({zig}), and the wheel's libraries are compiled by {ZIG}")
    folder = output / platform.name
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {f"{job.stem}{platform.suffix}": job for job in jobs(platform, levels)}
    recipe = f"{version} {arguments(platform, 'name')}"  # how they are compiled, beyond what a digest tells
    if not (folder / "recipe").exists() or (folder / "recipe").read_text() != recipe:
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "recipe").write_text(recipe)
    missing = [(job, folder / name) for name, job in wanted.items() if not (folder / name).exists()]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda one: compile_one(zig, platform, *one), missing))
    hashes = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in sorted(wanted)}
    document = {"compiler": f"zig {version}", "target": platform.target, "sha256": hashes}
    (folder / carried.MANIFEST).write_text(json.dumps(document, indent=1) + "\n")
    return folder


def carried_files(folder: Path) -> list[Path]:
    """What belongs into the wheel: the manifest and the libraries it names."""
    manifest = folder / carried.MANIFEST
    return [manifest, *(folder / name for name in json.loads(manifest.read_text())["sha256"])]


def arguments(platform: Platform, name: str) -> tuple[list[str], list[str]]:
    """zig's arguments to compile for a platform and to link the library `name`, without the files and the job's flags."""
    base = ["c++", "-target", platform.target, ZIG_BASELINE]
    flags = [flag for flag in FLAGS if not (flag == "-fPIC" and platform.system == "win32")]  # all code is, there
    small = ["-ffunction-sections", "-fdata-sections", "-g0", f"-ffile-prefix-map={ROOT}=."]
    link = ["-shared", "-s"]
    if platform.system == "linux":
        link.append("-Wl,--gc-sections")
    if platform.system == "darwin":
        link.append(f"-Wl,-install_name,@rpath/{name}")  # else it would be the path on this machine
    return [*base, *flags, *small], [*base, *link]


def compile_one(zig: Path, platform: Platform, job: Job, target: Path) -> None:
    """Compile one library. Raises RuntimeError with the compiler's words."""
    compiling, linking = arguments(platform, target.name)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        made = Path(temporary) / target.name
        objects = []
        for number, source in enumerate(job.sources):
            objects.append(f"{temporary}/{number}.o")
            _run([str(zig), *compiling, *zig_flags(job.flags), f"-I{SHARED}", "-c", str(source), "-o", objects[-1]])
        _run([str(zig), *linking, *objects, "-o", str(made)])
        made.chmod(0o755)
        made.replace(target)


def _run(command: Sequence[str]) -> None:
    # zig's own C++ library, compiled for each platform: a minute of work that is worth keeping.
    environment = {"ZIG_GLOBAL_CACHE_DIR": str(ROOT / ".cache" / "zig-cache"), **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stderr[-4000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platform", nargs="?", choices=[*PLATFORMS, "all"])
    parser.add_argument("--zig", action="store_true", help="print which zig compiles the wheels, for pip to install")
    parser.add_argument("--warm", action="store_true", help="let zig compile its C++ library now: a minute, once")
    parser.add_argument("--output", type=Path, default=ROOT / ".cache" / "carried")
    parser.add_argument("--level", action="append", help="only these SIMD levels, for a quick build")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    if options.zig:
        print(ZIG)
        return
    if options.platform is None:
        parser.error("name a platform")
    if options.warm:
        library = carried.Fixed("graph-pool", ("graph/emit/code/pool.cpp",))
        with tempfile.TemporaryDirectory() as folder:
            job = Job(library.name, library.paths(), library.flags)
            compile_one(find_zig(), PLATFORMS[options.platform], job, Path(folder) / "warm")
        return
    for name in PLATFORMS if options.platform == "all" else [options.platform]:
        folder = build(PLATFORMS[name], options.output, levels=options.level, workers=options.jobs)
        sizes = [path.stat().st_size for path in folder.iterdir()]
        print(f"{folder}: {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
