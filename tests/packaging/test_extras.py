"""No extra replaces a build of torch that somebody has chosen: CUDA's, ROCm's, Intel's, or an old one.

pip decides with the real requirements of every package we name, read from the installed ones, over an index of empty wheels.
On that index lies a newer torch, which an upgrade would take.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
NEWER = "2.99.0"
BUILDS = ["2.11.0+cu130", "2.9.1+rocm6.4", "2.6.0+xpu"]  # the last is older than what we are written for


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def extras() -> dict[str, list[str]]:
    """Our extras and their requirements, as pyproject.toml has them."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    found: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    return found


def fake_wheel(folder: Path, name: str, number: str, lines: list[str]) -> None:
    """An empty distribution with these requirements."""
    stem = f"{plain(name).replace('-', '_')}-{number}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n" + "".join(f"{line}\n" for line in lines)
    tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        records = []
        for file, text in ((f"{stem}.dist-info/METADATA", metadata), (f"{stem}.dist-info/WHEEL", tag)):
            archive.writestr(file, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            records.append(f"{file},sha256={digest},{len(text)}")
        archive.writestr(f"{stem}.dist-info/RECORD", "\n".join([*records, f"{stem}.dist-info/RECORD,,", ""]))


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an empty wheel of everything that an extra leads to."""
    folder = tmp_path_factory.mktemp("index")
    ours = extras()
    lines = [f"Provides-Extra: {extra}" for extra in ours]
    for extra, wanted in ours.items():
        for one in wanted:
            requirement, _, marker = one.partition(";")
            condition = f"({marker.strip()}) and extra == '{extra}'" if marker else f"extra == '{extra}'"
            lines.append(f"Requires-Dist: {requirement.strip()} ; {condition}")
    fake_wheel(folder, "anytorch", "1.0", lines)
    waiting = [(Requirement(one.partition(";")[0]), "") for wanted in ours.values() for one in wanted]
    done: set[str] = set()
    while waiting:
        asked, _ = waiting.pop()
        if (name := plain(asked.name)) in done | {"anytorch"}:
            continue
        done.add(name)
        needs = [] if name == "torch" else requirements_of(asked)
        waiting += [(Requirement(one), name) for one in needs]
        extra_lines = sorted({f"Provides-Extra: {extra}" for extra in asked.extras})
        number = NEWER if name == "torch" else number_of(asked)
        fake_wheel(folder, asked.name, number, [*extra_lines, *(f"Requires-Dist: {one}" for one in needs)])
    return folder


def number_of(asked: Requirement) -> str:
    try:
        return version(asked.name).partition("+")[0]
    except PackageNotFoundError:  # not here, for the tests do without it: the oldest that is asked for
        return next((one.version for one in asked.specifier if one.operator in (">=", "==")), "1.0")


def requirements_of(asked: Requirement) -> list[str]:
    """What the installed distribution needs here, with the extras that are asked for."""
    try:
        lines = requires(asked.name) or []
    except PackageNotFoundError:
        return []
    environment = default_environment()
    found = []
    for line in lines:
        one = Requirement(line)
        if one.marker is None or any(
            one.marker.evaluate({**environment, "extra": extra}) for extra in ("", *asked.extras)
        ):
            one.marker = None
            found.append(str(one))
    return found


def test_the_index_has_what_the_extras_lead_to(index: Path) -> None:
    """Otherwise the next test would see nothing: the requirements that ask for torch are really there."""
    asking = {
        path.name.partition("-")[0]
        for path in index.iterdir()
        if re.search(r"^Requires-Dist: torch\b", zipfile.ZipFile(path).read(metadata_name(path)).decode(), re.MULTILINE)
    }
    assert {"anytorch", "sentence_transformers"} <= asking


def metadata_name(path: Path) -> str:
    return "-".join(path.name.split("-")[:2]) + ".dist-info/METADATA"


@pytest.mark.parametrize("build", BUILDS)
def test_every_extra_keeps_the_torch_that_is_there(index: Path, build: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    folder = tmp_path / "torch"
    folder.mkdir()
    fake_wheel(folder, "torch", build, [])
    with zipfile.ZipFile(next(folder.iterdir())) as archive:
        archive.extractall(site)
    planned = plan(tmp_path / "env", index, f"anytorch[{','.join(extras())}]")
    assert "anytorch" in planned and "transformers" in planned, "it plans to install something"
    assert "torch" not in planned


def test_where_there_is_no_torch_one_is_installed(index: Path, tmp_path: Path) -> None:
    """The same plan for an empty environment has a torch in it: the test above could fail."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    assert plan(tmp_path / "env", index, "anytorch[generate]")["torch"] == NEWER


def plan(environment: Path, index: Path, what: str) -> dict[str, str]:
    """The distributions that pip would install, with their versions."""
    command = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "--isolated", "install"]
    options = ["--dry-run", "--quiet", "--no-index", "--find-links", str(index), "--report", "-"]
    done = subprocess.run([*command, *options, *what.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {plain(one["metadata"]["name"]): one["metadata"]["version"] for one in json.loads(done.stdout)["install"]}


# --- requirements/*.txt: what `pip install -r` brings into an empty environment ------------------------------------------

NVIDIA = ["nvidia-cublas", "nvidia-cudnn-cu13", "triton"]  # of those that torch's CUDA builds ask for


@pytest.mark.parametrize(("name", "build"), [("requirements.txt", "cpu"), ("requirements-cuda.txt", "cu130")])
def test_the_requirements_of_kronos_bring_what_loading_it_needs(name: str, build: str, tmp_path: Path) -> None:
    """`pip install -r gitSource/requirements.txt` into an empty environment brings what loading Kronos needs.

    pip itself reads the files and the constraints and makes the plan; the wheels, gigabytes of them, are empty ones.
    """
    path = ROOT / "compat" / "gitSource" / name
    house, environment = tmp_path / "house", tmp_path / "env"
    house.mkdir()
    constraints = [Requirement(line.partition(" #")[0]) for line in requirement_lines(ROOT / "constraints.txt")]
    pinned = {
        plain(one.name): next(iter(one.specifier)).version
        for one in constraints
        if one.specifier and (one.marker is None or one.marker.evaluate())
    }
    listed = [Requirement(line) for line in requirement_lines(path)]
    fake_wheel(
        house, "torch", f"{pinned['torch']}+{build}", [f"Requires-Dist: {one}" for one in NVIDIA if build != "cpu"]
    )
    for one in NVIDIA:
        fake_wheel(house, one, pinned.get(one, "1.0"), [])
    waiting, done = [one for one in listed if plain(one.name) != "torch"], {"torch"}
    while waiting:
        asked = waiting.pop()
        if plain(asked.name) not in done:
            done.add(plain(asked.name))
            needs = [one for one in requirements_of(asked) if plain(Requirement(one).name) != "torch"]
            waiting += [Requirement(one) for one in needs]
            number = pinned.get(plain(asked.name)) or number_of(asked)
            fake_wheel(house, asked.name, number, [f"Requires-Dist: {one}" for one in needs])
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    planned = plan(environment, house, f"-r {path}")
    assert planned["torch"] == f"{pinned['torch']}+{build}"
    assert ("triton" in planned) == (build == "cu130") == any(one.startswith("nvidia-") for one in planned)
    # What `from_pretrained` and a forecast import, and what downloads a published name.
    assert {"torch", "numpy", "pandas", "safetensors", "huggingface-hub"} <= set(planned)


def requirement_lines(path: Path) -> list[str]:
    lines: list[str] = []
    for line in path.read_text().splitlines():
        if line.startswith("-r "):
            lines += requirement_lines(path.parent / line.removeprefix("-r "))
        elif line and not line.startswith(("#", "-")):
            lines.append(line)
    return lines
