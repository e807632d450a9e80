"""Everything a release needs but the upload: checks, `make dist`, an SBOM, and checksums that can be signed.

    make release                       checks, dist/, dist/sbom.cdx.json, dist/SHA256SUMS
    make release SIGN=~/.ssh/release   also dist/SHA256SUMS.sig, by ssh-keygen
    python tools/release.py --check    only: may this commit be released?

The version is in src/anytorch/_version.py and nowhere else. docs/guide/publish.md says the rest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import uuid
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
SUMS, SBOM, SIGNED = "SHA256SUMS", "sbom.cdx.json", "SHA256SUMS.sig"
NAMESPACE = "anytorch-release"  # what the signature is for: one made for something else does not verify
LICENCES = {"LICENSE", "third-party.txt", "llvm.txt", "zig.txt", "mingw-w64.txt", "python.txt"}
# What zig links into our compiled C++, and where. third-party.txt says the same to people.
LINKED = (
    ("libc++", "Apache-2.0 WITH LLVM-exception", ""),
    ("libc++abi", "Apache-2.0 WITH LLVM-exception", ""),
    ("libunwind", "Apache-2.0 WITH LLVM-exception", ""),
    ("zig compiler runtime", "MIT", ""),
    ("mingw-w64", "ZPL-2.1", "win_amd64"),
)


def version() -> str:
    """The one place: src/anytorch/_version.py."""
    (found,) = re.findall(r'^__version__ = "([^"]+)"$', (ROOT / "src/anytorch/_version.py").read_text(), re.MULTILINE)
    return str(found)


def problems(number: str, tag: str | None = None) -> list[str]:
    """Why this commit cannot be released, in words; [] if it can."""
    found = []
    if not re.fullmatch(r"\d+(\.\d+)+((a|b|rc)\d+)?", number):
        found.append(f"version {number}: not a release (src/anytorch/_version.py); use 1.2.0, or 1.2.0rc1")
    if not section(number):
        found.append(f"CHANGELOG.md has no section '## {number}': rename 'Unreleased', and say what is new")
    if tag is not None and tag != f"v{number}":
        found.append(f"the tag is {tag} and the version {number}: they must agree (v{number})")
    changed = subprocess.run(
        ["git", "status", "--porcelain"], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout
    if changed:
        found.append(f"the working tree has changes that are not committed:\n{changed.rstrip()}")
    return found


def section(number: str) -> str:
    """What the changelog says of a version; "" if nothing."""
    text = (ROOT / "CHANGELOG.md").read_text()
    found = re.search(rf"^## \[?{re.escape(number)}\]?[^\n]*\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def metadata(file: Path) -> dict[str, Any]:
    """Name, version, licence, requirements and licence files of a distribution."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            text = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    else:
        with tarfile.open(file) as archive:
            names = archive.getnames()
            member = archive.extractfile(next(name for name in names if re.fullmatch(r"[^/]+/PKG-INFO", name)))
            assert member is not None
            text = member.read().decode()
    headers = HeaderParser().parsestr(text)
    return {
        "name": headers["Name"],
        "version": headers["Version"],
        "licence": headers["License-Expression"],
        "requires": headers.get_all("Requires-Dist") or [],
        "licence_files": {name.rpartition("/")[2] for name in names} & LICENCES,
    }


def wrong_with(file: Path, number: str) -> list[str]:
    """What is wrong with a built distribution; [] if nothing."""
    found, told = [], metadata(file)
    if told["version"] != number:
        found.append(f"{file.name}: its version is {told['version']}, not {number}")
    if told["licence_files"] != LICENCES:
        found.append(f"{file.name}: licence files are missing: {', '.join(sorted(LICENCES - told['licence_files']))}")
    return found


def sbom(files: list[Path], number: str) -> dict[str, Any]:
    """A CycloneDX 1.6 document: our files, what is linked into them, and what pip is asked for."""
    told = metadata(next(file for file in files if file.suffix == ".whl"))
    components: list[dict[str, Any]] = [
        {
            "type": "file",
            "bom-ref": file.name,
            "name": file.name,
            "hashes": [{"alg": "SHA-256", "content": digest(file)}],
            "licenses": [{"expression": told["licence"]}],
        }
        for file in files
    ]
    zig = compiler_of(files)
    for name, licence, only in LINKED:
        if any(only in file.name for file in files):
            component = {"type": "library", "bom-ref": f"linked:{name}", "name": name, "version": f"as in {zig}"}
            components.append({**component, "scope": "required", "licenses": [{"expression": licence}]})
    for line in told["requires"]:
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        name = re.match(r"[\w.-]+", requirement)
        assert name is not None
        needed = {"type": "library", "bom-ref": f"requires:{line}", "name": name[0], "description": line}
        components.append(
            {
                **needed,
                "scope": "optional" if "extra ==" in marker else "required",
                "purl": f"pkg:pypi/{name[0].lower()}",
            }
        )
    root = {
        "type": "library",
        "bom-ref": "anytorch",
        "name": "anytorch",
        "version": number,
        "purl": f"pkg:pypi/anytorch@{number}",
    }
    linked = [one["bom-ref"] for one in components if one["bom-ref"].startswith("linked:")]
    serial = uuid.uuid5(uuid.NAMESPACE_URL, " ".join(digest(file) for file in files))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": {**root, "licenses": [{"expression": told["licence"]}]}},
        "components": components,
        "dependencies": [
            {"ref": "anytorch", "dependsOn": [one["bom-ref"] for one in components if one["bom-ref"] not in linked]},
            *({"ref": file.name, "dependsOn": linked_into(file)} for file in files),
        ],
    }


def linked_into(file: Path) -> list[str]:
    if "-none-any" in file.name or file.suffix != ".whl":
        return []
    return [f"linked:{name}" for name, _, only in LINKED if only in file.name]


def compiler_of(files: list[Path]) -> str:
    """What compiled the libraries in the wheels, as their manifests say."""
    found = set()
    for file in files:
        if file.suffix == ".whl":
            with zipfile.ZipFile(file) as archive:
                for name in archive.namelist():
                    if name.endswith("/manifest.json") and "/native/built/" in name:
                        found.add(json.loads(archive.read(name))["compiler"])
    if len(found) != 1:
        raise SystemExit(f"the wheels were compiled by {found or 'nothing'}: there must be one compiler")
    return str(found.pop())


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def finish(folder: Path, number: str, sign: str) -> None:
    """Check the files of a folder, and write the SBOM, the checksums and, with a key, their signature."""
    files = sorted(path for path in folder.iterdir() if path.name.endswith((".whl", ".tar.gz")))
    wrong = [line for file in files for line in wrong_with(file, number)]
    if wrong or not files:
        raise SystemExit("\n".join(wrong) or f"{folder} has no distribution: run `make dist`")
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, files))
    (folder / SBOM).write_text(json.dumps(sbom(files, number), indent=1) + "\n")
    lines = [f"{digest(file)}  {file.name}\n" for file in (*files, folder / SBOM)]
    (folder / SUMS).write_text("".join(lines))
    (folder / SIGNED).unlink(missing_ok=True)
    if sign:
        run("ssh-keygen", "-Y", "sign", "-f", str(Path(sign).expanduser()), "-n", NAMESPACE, str(folder / SUMS))


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {done.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check; build nothing")
    parser.add_argument("--tag", help="the tag that is released: v and the version")
    parser.add_argument("--sign", default="", metavar="KEY", help="a private SSH key to sign the checksums with")
    parser.add_argument("--finish", action="store_true", help="dist/ is built: check it, write SBOM and checksums")
    options = parser.parse_args()
    number = version()
    if not options.finish:
        if found := problems(number, options.tag):
            raise SystemExit("\n".join(["not released:", *found]))
        print(f"anytorch {number} may be released")
        if options.check:
            return
        run(sys.executable, "tools/dist.py")
    finish(DIST, number, options.sign)
    made = ", ".join(sorted(path.name for path in DIST.iterdir()))
    print(f"dist/ is ready: {made}\nto upload: twine upload dist/*.whl dist/*.tar.gz")


if __name__ == "__main__":
    main()
