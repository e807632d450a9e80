"""`tools/run_seed_samples.py`: it knows every command line of the documents, and its page is what it found."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEEDS = ROOT.parent / "shared" / "seeds"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("anytorch_run_seed_samples", ROOT / "tools" / "run_seed_samples.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def command_lines(document: Path) -> list[tuple[int, str]]:
    """(block, line) of the ```bash blocks; lines that end in a backslash joined, comments cut off."""
    found = []
    blocks = re.findall(r"^[ ]*```bash\n(.*?)^[ ]*```", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for number, block in enumerate(blocks):
        for line in block.replace("\\\n", " ").splitlines():
            words = " ".join(re.sub(r"(^|\s)#.*", "", line).split())
            if words:
                found.append((number, words))
    return found


# Lines that only bring the next one into place, or repeat one with the output it gives.
PLACING = re.compile(
    r"^(cd |export (KRONOS_DEVICE|ENABLE_VIRTUAL_BLACKWELL|VB_MODE)=|\$ cd |=====|Testing Device|✓|python main\.py)"
)


def test_no_command_line_is_forgotten(tool: Any) -> None:
    if not SEEDS.is_dir():
        pytest.skip(f"the documents are not at {SEEDS}")
    for path in sorted(SEEDS.glob("[1-5]*.md")):
        document = path.name[0]
        known = {command.line for command in tool.COMMANDS if command.document == document}
        unknown = [line for _, line in command_lines(path) if line not in known and not PLACING.match(line)]
        assert not unknown, f"{path.name}: {unknown}"


def test_every_command_line_stands_in_its_document(tool: Any) -> None:
    if not SEEDS.is_dir():
        pytest.skip(f"the documents are not at {SEEDS}")
    for path in sorted(SEEDS.glob("[1-5]*.md")):
        known = set(command_lines(path))
        text = path.read_text(encoding="utf-8")
        for command in tool.COMMANDS:
            if command.document == path.name[0] and "sudo apt" not in command.line:
                assert (command.block, command.line) in known or command.line in text, command


def test_the_page_is_what_was_found(tool: Any) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "run tools/run_seed_samples.py --page"
    failed = [line for line in tool.page().splitlines() if "| failed |" in line]
    # Two processes on a machine with one card: each wants a card of its own.
    assert [line.split("`")[1] for line in failed] == [
        "torchrun --nproc_per_node=2 gitSource/finetune/train_tokenizer.py"
    ]
