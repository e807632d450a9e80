"""What `make release` refuses, and what it writes beside the files."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """tools/release.py, on a repository of its own with version 1.2.0 and a section for it."""
    spec = importlib.util.spec_from_file_location("anytorch_release", ROOT / "tools" / "release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "src" / "anytorch").mkdir(parents=True)
    (tmp_path / "src" / "anytorch" / "_version.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## Unreleased\n\n## 1.2.0\n\n- Something new.\n\n## 1.1.0\n\n- Old.\n"
    )
    for command in (
        ["init", "--quiet"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_a_clean_commit_with_its_section_may_be_released(release: Any) -> None:
    assert release.version() == "1.2.0" and release.section("1.2.0") == "- Something new."
    assert release.problems("1.2.0", "v1.2.0") == []


def test_what_stops_a_release(release: Any, tmp_path: Path) -> None:
    assert "no section '## 1.3.0'" in release.problems("1.3.0")[0]
    assert "not a release" in release.problems("1.2.0.dev1")[0]
    assert "v1.2.0" in release.problems("1.2.0", "v1.2.1")[0]
    (tmp_path / "new.py").touch()
    assert "not committed" in release.problems("1.2.0")[0] and "new.py" in release.problems("1.2.0")[0]


def fake_wheel(folder: Path, platform: str, *, licences: tuple[str, ...]) -> Path:
    path = folder / f"anytorch-1.2.0-py3-none-{platform}.whl"
    text = "Metadata-Version: 2.4\nName: anytorch\nVersion: 1.2.0\nLicense-Expression: Apache-2.0\n"
    text += "Requires-Dist: rich>=13\nRequires-Dist: torch; extra == 'torch'\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("anytorch-1.2.0.dist-info/METADATA", text)
        for name in licences:
            archive.writestr(f"anytorch-1.2.0.dist-info/licenses/LICENSES/{name}", "text")
        archive.writestr("anytorch/native/built/x/manifest.json", json.dumps({"compiler": "zig 9", "sha256": {}}))
    return path


def test_a_missing_licence_or_another_version_is_found(release: Any, tmp_path: Path) -> None:
    whole = fake_wheel(tmp_path, "win_amd64", licences=tuple(release.LICENCES))
    assert release.wrong_with(whole, "1.2.0") == []
    assert "its version is 1.2.0, not 2.0" in release.wrong_with(whole, "2.0")[0]
    less = fake_wheel(tmp_path, "macosx_11_0_arm64", licences=("LICENSE", "zig.txt"))
    assert "llvm.txt" in release.wrong_with(less, "1.2.0")[0]


def test_the_sbom_names_files_what_is_linked_in_and_what_is_needed(release: Any, tmp_path: Path) -> None:
    files = [fake_wheel(tmp_path, tag, licences=()) for tag in ("win_amd64", "macosx_11_0_arm64")]
    document = release.sbom(files, "1.2.0")
    parts = {one["bom-ref"]: one for one in document["components"]}
    assert document["bomFormat"] == "CycloneDX" and len(parts) == len(document["components"])
    assert parts[files[0].name]["hashes"][0]["content"] == release.digest(files[0])
    assert parts["linked:libc++"]["version"] == "as in zig 9"
    assert parts["requires:rich>=13"]["scope"] == "required"
    assert parts["requires:torch; extra == 'torch'"]["scope"] == "optional"
    depends = {one["ref"]: one["dependsOn"] for one in document["dependencies"]}
    assert "linked:mingw-w64" in depends[files[0].name] and "linked:mingw-w64" not in depends[files[1].name]
    assert {name for names in depends.values() for name in names} <= parts.keys()
    assert release.sbom(files, "1.2.0") == document, "the same files give the same document"


def test_checksums_can_be_signed_and_checked(release: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "dist"
    folder.mkdir()
    fake_wheel(folder, "win_amd64", licences=tuple(release.LICENCES))
    monkeypatch.setattr(
        release, "run", lambda *command: None if "twine" in command else subprocess.run(command, check=True)
    )
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    release.finish(folder, "1.2.0", str(key))
    subprocess.run(["sha256sum", "--check", "--quiet", release.SUMS], cwd=folder, check=True)
    signers = tmp_path / "signers"
    signers.write_text(f"releases {(tmp_path / 'key.pub').read_text()}")
    check = [
        "ssh-keygen",
        "-Y",
        "verify",
        "-f",
        str(signers),
        "-I",
        "releases",
        "-n",
        release.NAMESPACE,
        "-s",
        release.SIGNED,
    ]
    sums = (folder / release.SUMS).read_bytes()
    assert subprocess.run(check, cwd=folder, input=sums, capture_output=True).returncode == 0
    assert subprocess.run(check, cwd=folder, input=sums + b"x", capture_output=True).returncode != 0


def test_the_version_is_in_one_place() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import anytorch; print(anytorch.__version__)"], capture_output=True, text=True
    )
    text = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in text and f'"{found.stdout.strip()}"' not in text
