"""The page's files: in the package, within the content security policy, and their pure logic tested by Node."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import pytest

WEB = Path(str(files("anytorch.serve"))) / "web"
LOGIC = Path(__file__).parent / "logic"
OLDEST_NODE = (18, 19)  # the first that can be told to read a .js file as a module
UNTOLD_NODE = (20, 19)  # the first that does it without being told


def page_files(*suffixes: str) -> list[Path]:
    return sorted(path for path in WEB.rglob("*") if path.suffix in suffixes)


def test_the_package_holds_the_page() -> None:
    assert (files("anytorch.serve") / "web" / "index.html").is_file()
    assert {path.suffix for path in WEB.rglob("*") if path.is_file()} == {".html", ".js", ".css", ".svg"}


def test_every_file_the_page_names_is_there() -> None:
    named = re.findall(r'(?:href|src)="(web/[^"#]+)', (WEB / "index.html").read_text())
    assert len(named) > 6
    for path in named:
        assert (WEB.parent / path).is_file(), path
    for script in page_files(".js"):
        for target in re.findall(r'from "(\.[^"]+)"', script.read_text()):
            assert (script.parent / target).is_file(), f"{script.name} imports {target}"


def test_every_module_is_asked_for_at_once() -> None:
    named = re.findall(
        r'<(?:link rel="modulepreload" href|script [^>]*src)="web/([^"]+)', (WEB / "index.html").read_text()
    )
    assert sorted(named) == sorted(path.relative_to(WEB).as_posix() for path in page_files(".js"))


def test_every_icon_is_in_the_sprite() -> None:
    sprite = set(re.findall(r'<symbol id="([^"]+)"', (WEB / "icons" / "sprite.svg").read_text()))
    scripts = "\n".join(path.read_text() for path in page_files(".js", ".html"))
    used = set(re.findall(r'sprite\.svg#([a-z-]+)"', scripts)) | set(re.findall(r'\bicon\("([a-z-]+)"\)', scripts))
    used |= set(re.findall(r'emptyState\(\s*"([a-z-]+)"', scripts))
    assert used <= sprite, used - sprite


def test_every_colour_is_defined() -> None:
    defined = set(re.findall(r"^\s*(--[a-z0-9-]+):", (WEB / "styles" / "colours.css").read_text(), re.M))
    local = {"--bar", "--quarter"}  # set by scripts on single elements
    for path in page_files(".css", ".js"):
        used = set(re.findall(r"var\((--[a-z0-9-]+)\)", path.read_text()))
        used |= set(re.findall(r'(?:fill|stroke): "(--[a-z0-9-]+)"', path.read_text()))
        assert used - local <= defined, f"{path.name}: {used - local - defined}"


def test_nothing_the_policy_forbids_and_nothing_from_elsewhere() -> None:
    for path in page_files(".html", ".js", ".css"):
        text = path.read_text()
        assert not re.search(r"""(?:src|href|url\(|from|import\()\s*[=(]?\s*["']?(?:https?:)?//""", text), path.name
        assert not re.search(r"\.innerHTML\b|\binsertAdjacentHTML\b|\beval\(|new Function\(", text), path.name
    page = (WEB / "index.html").read_text()
    assert not re.search(r"\sstyle=|\son[a-z]+=|<style|<script>", page)


@pytest.fixture(scope="module")
def node(missing: Callable[[str, str], NoReturn]) -> list[str]:
    """The command that runs a file of tests."""
    found = shutil.which("node")
    if found is None:
        missing("node", "the page's logic is tested by Node.js")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    numbers = tuple(int(part) for part in version.lstrip("v").split(".")[:2])
    if numbers < OLDEST_NODE:
        missing("node", f"{version} is older than {OLDEST_NODE[0]}.{OLDEST_NODE[1]}")
    return [found, *(["--experimental-default-type=module"] if numbers < UNTOLD_NODE else []), "--test"]


@pytest.mark.parametrize("script", sorted(LOGIC.glob("*.test.mjs")), ids=lambda path: path.name.split(".")[0])
def test_logic(node: list[str], script: Path) -> None:
    result: Any = subprocess.run([*node, str(script)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^# pass [1-9]", result.stdout, re.M), result.stdout
