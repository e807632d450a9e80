"""The README's Python as printed, each piece in a fresh process, and its commands as argparse reads them.

`test_samples.py` runs the blocks of all pages in processes that may have imported torch and more already: a name that only
works because something else was imported before passes there.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anytorch.cli.parser import COMMANDS, command_parser

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
LAVAPIPE = ROOT / ".cache" / "mesa" / "lvp.json"
FEW = "from anytorch.graph import search; search.QUICK = search.FEW = search.MANY = 1\n"

# What the words around a piece of code in the text name, and nothing of anytorch but the import itself.
GIVEN = "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(64, 64))\nx = torch.randn(2, 64)\nimport anytorch\n"


def inline() -> list[str]:
    """The code of each line of the README's text that has some, such as `import anytorch.webgpu`, then `model.to(…)`."""
    text = re.sub(r"^```.*?^```", "", README, flags=re.M | re.S)
    found = []
    for line in text.splitlines():
        spans = re.findall(r"`((?:import anytorch|anytorch\.|model\.)[^`]*)`", line)
        if spans:
            found.append("\n".join(spans))
    return found


BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)


def test_there_is_python_in_the_readme() -> None:
    assert len(BLOCKS) >= 1 and len(inline()) >= 5


@pytest.mark.long
@pytest.mark.parametrize("code", [*BLOCKS, *(GIVEN + code for code in inline())])
def test_python_as_printed(code: str, run_python: Callable[..., Any], shared_cache: Callable[[str], Path]) -> None:
    env = {"ANYTORCH_CACHE_DIR": str(shared_cache("samples")), "ANYTORCH_MEASURE_S": "0.2"}
    if LAVAPIPE.exists() and "VK_ICD_FILENAMES" not in os.environ:
        env["VK_ICD_FILENAMES"] = str(LAVAPIPE)
    few = FEW if "superoptimize" in code else ""  # a search of one schedule is the same as one of forty, and shorter
    run_python(few + code, env=env)


def commands() -> list[str]:
    shown = re.findall(r"^\$ (anytorch [^#\n]*)", README, re.M)
    return [*shown, *re.findall(r"`(anytorch [^`]*)`", README)]


@pytest.mark.parametrize("line", commands())
def test_commands_are_ones(line: str) -> None:
    _, name, *words = shlex.split(line)
    assert name in COMMANDS
    parser = command_parser(name)
    needed = [action for action in parser._actions if not action.option_strings and action.nargs is None]
    if words or not needed:  # `anytorch finetune` alone names the command, it does not show a call
        parser.parse_args(words)
