"""Build what is published, into dist/: the source distribution, a wheel without compiled code, and one for each platform.

    python tools/dist.py [--only linux-x86_64]

Every compiled library is then inspected: made for that platform, with the functions our Python calls, asking the system for
nothing but its C library, and for none newer than the wheel's tag says. What could not be run here has at least this.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import carried_kernels
from carried_kernels import PLATFORMS, ROOT, Platform

MOST_MB = 15.0
# What a library may ask of the system: its C library, and nothing that somebody would have to install.
MAY_NEED = {
    "linux": {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1",
              "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"},
    "darwin": {"/usr/lib/libSystem.B.dylib"},
    "win32": {"KERNEL32.dll", "ntdll.dll", "api-ms-win-crt-*"},
}  # fmt: skip
SYSTEM_FORMAT = {"linux": "ELF", "darwin": "MACHO", "win32": "PE"}
MACHINES = {"x86_64": "X86_64", "AMD64": "AMD64", "aarch64": "AARCH64", "arm64": "ARM64"}


def build(output: Path, *arguments: str, **variables: str) -> Path:
    """Run `python -m build` and return the file it made."""
    with tempfile.TemporaryDirectory(dir=output) as temporary:
        command = [sys.executable, "-m", "build", "--no-isolation", *arguments, "--outdir", temporary, str(ROOT)]
        done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
        (made,) = Path(temporary).iterdir()
        return Path(shutil.move(made, output / made.name))


def inspect(wheel: Path, platform: Platform) -> list[str]:
    """What is wrong with a platform's wheel; [] if nothing."""
    import lief

    lief.logging.disable()  # it looks for parts that a stripped library does not have, and says so
    wrong = []
    folder = f"anytorch/native/built/{platform.name}/"
    with zipfile.ZipFile(wheel) as archive:
        manifest = json.loads(archive.read(f"{folder}{carried_kernels.carried.MANIFEST}"))
        for name in manifest["sha256"]:
            binary = lief.parse(archive.read(f"{folder}{name}"))
            found = f"{name}: "
            if binary is None or binary.format.name != SYSTEM_FORMAT[platform.system]:
                wrong.append(f"{found}not a {SYSTEM_FORMAT[platform.system]} file")
                continue
            if machine_of(binary) != MACHINES[platform.machine]:
                wrong.append(f"{found}for {machine_of(binary)}, not {MACHINES[platform.machine]}")
            if missing := functions_of(name) - {one.name.removeprefix("_") for one in binary.exported_functions}:
                wrong.append(f"{found}does not export {', '.join(sorted(missing))}")
            own = f"@rpath/{name}"  # macOS: what it is called itself
            if more := [one for one in libraries_of(binary) if one != own and not allowed(one, platform)]:
                wrong.append(f"{found}needs {', '.join(sorted(more))}")
    if (size := wheel.stat().st_size / 1e6) > MOST_MB:
        wrong.append(f"{wheel.name} is {size:.1f} MB; at most {MOST_MB:.0f}")
    return wrong


def machine_of(binary: object) -> str:
    header = binary.header  # type: ignore[attr-defined]
    kind = getattr(header, "machine_type", None) or getattr(header, "cpu_type", None) or header.machine
    return str(kind.name)


def libraries_of(binary: object) -> list[str]:
    """The names of the libraries that the system must have."""
    return [str(getattr(one, "name", one)) for one in binary.libraries]  # type: ignore[attr-defined]


def allowed(library: str, platform: Platform) -> bool:
    from fnmatch import fnmatch

    return any(fnmatch(library.lower(), one.lower()) for one in MAY_NEED[platform.system])


def functions_of(file: str) -> set[str]:
    """The functions that a library's sources mark for export, by the name of its file."""
    import re

    stem = file.rsplit("-", 2)[0]
    (library,) = (one for one in carried_kernels.carried.LIBRARIES if one.name == stem)
    names = set()
    for path in library.paths():
        text = path.read_text()
        names |= set(re.findall(r"^(?:EXPORT|API)\s[^;{=()]*?(\w+)\s*\(", text, re.MULTILINE))
        visible = r'^extern "C" __attribute__\(\(visibility\("default"\)\)\)[^;{=()]*?(\w+)\('
        names |= set(re.findall(visible, text, re.MULTILINE))
    if not names:
        raise SystemExit(
            f"no exported function was found in {', '.join(library.sources)}: tools/dist.py reads them wrongly"
        )
    return names


def audit(wheel: Path) -> str:
    """What auditwheel says of a Linux wheel; raises SystemExit if it needs a newer system than its tag says."""
    done = subprocess.run([sys.executable, "-m", "auditwheel", "show", str(wheel)], capture_output=True, text=True)
    told = " ".join((done.stdout + done.stderr).split())
    consistent = [
        word.strip('".') for word in told.split() if word.strip('".').startswith(("manylinux_", "manylinux2"))
    ]
    tags = wheel.stem.split("-")[-1].split(".")
    if done.returncode or not set(consistent) & set(tags):
        raise SystemExit(f"auditwheel does not agree with the tag of {wheel.name}:\n{told}")
    return f"auditwheel: {', '.join(sorted(set(consistent) & set(tags)))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(PLATFORMS), action="append", help="these platforms alone, and no sdist")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    if not options.only:
        shutil.rmtree(options.output, ignore_errors=True)
    options.output.mkdir(parents=True, exist_ok=True)
    if not options.only:
        for kind in ("--sdist", "--wheel"):
            made = build(options.output, kind, ANYTORCH_WHEEL="")
            print(f"{made.name}: {made.stat().st_size / 1e6:.1f} MB")
    for name in options.only or PLATFORMS:
        made = build(options.output, "--wheel", ANYTORCH_WHEEL=name)
        if wrong := inspect(made, PLATFORMS[name]):
            raise SystemExit("\n".join([f"{made.name} must not be published:", *wrong]))
        told = audit(made) if PLATFORMS[name].system == "linux" else "built and inspected, not run"
        print(f"{made.name}: {made.stat().st_size / 1e6:.1f} MB; {told}")


if __name__ == "__main__":
    main()
