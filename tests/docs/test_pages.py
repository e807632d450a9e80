"""What `make docs` does not see: the README's links, pages outside the navigation, and paths named in the text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from anytorch.cli.commands.reset import STORES
from anytorch.cli.parser import COMMANDS, command_parser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
PLACES = r"(?:bench|docs|examples|tests|tools|compat|comfyui|requirements|src)"


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)


def anchor(heading: str) -> str:
    """As mkdocs and GitHub write it, for the headings we use."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\- ]", "", heading.lower()).strip())


def anchors(page: Path) -> set[str]:
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", prose(page), re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith("https://"):
            continue
        file, _, place = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not place or place in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    for name in re.findall(rf"`({PLACES}/[\w./-]+)`", prose(page)):
        assert (ROOT / name).exists() or (ROOT / "compat" / name).exists(), name


def test_named_results_exist() -> None:
    results = {path.name for path in (ROOT / "bench" / "results").glob("*.json")}
    results |= {f"{name}.json" for name in STORES}  # files of the cache, which a page may name too
    for page in PAGES:
        for name in re.findall(r"`([a-z0-9]+-[a-z0-9-]+\.json)`", prose(page)):
            assert name in results, f"{page.name}: {name}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    lost = [page for page in pages if not page.startswith("doctor/") and page not in navigation]
    assert not lost


def test_the_documents_of_all_commands_are_described() -> None:
    described = (DOCS / "reference" / "cli.md").read_text("utf-8").partition("## Commands")[0]
    missing = [name for name in COMMANDS if f"`{name}" not in described.partition("## The JSON documents")[2]]
    assert not missing


# --- commands: what is printed can be typed ------------------------------------------------------------------------------


def printed_commands(page: Path) -> list[str]:
    """Lines of a page's shell blocks and pieces of code in its text, without prompts, comments and line breaks."""
    text = page.read_text("utf-8")
    blocks = re.findall(r"^```(?:sh|console|bash|text)\n(.*?)^```", text, re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([a-z][^`\n]+)`", prose(page))
    found = []
    for line in lines:
        for piece in re.split(r"[|;&] |\$\(", re.sub(r"\s#.*", "", line)):
            found.append(re.sub(r"^\s*\$ |^(\w+=\S+ )+", "", piece.strip()))
    return found


def options_in(words: list[str]) -> set[str]:
    told = (word.strip("[](),.").partition("=")[0] for word in words)
    return {option for word in told for option in word.split("|") if re.fullmatch(r"--[a-z][a-z-]*", option)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_printed_commands_can_be_typed(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    for command in printed_commands(page):
        words = command.split()
        if words[:1] == ["anytorch"] and len(words) > 1 and re.fullmatch(r"[a-z]+", words[1]):
            assert words[1] in COMMANDS, command
            known = {option for action in command_parser(words[1])._actions for option in action.option_strings}
            asked = set() if words[1] == "run" else options_in(words)  # of the program that is run
            assert asked <= known | {"--json", "--verbose", "--help"}, command
        elif words[:1] == ["make"]:
            named = [word for word in words[1:] if re.fullmatch(r"[a-z][a-z-]*", word)]
            assert not named or named[0] in targets, command
        elif len(words) > 1 and re.fullmatch(r"python3?", words[0]) and re.match(PLACES + "/", words[1]):
            script = ROOT / words[1] if (ROOT / words[1]).exists() else ROOT / "compat" / words[1]
            assert script.exists(), command
            source = script.read_text("utf-8")
            lacking = [option for option in options_in(words) if f'"{option}"' not in source]
            assert not lacking or "add_argument" not in source, command  # without: it hands them on
