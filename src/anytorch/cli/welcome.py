"""`anytorch` alone: what was found on this machine, and the three commands to go on with."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from anytorch._version import __version__
from anytorch.cli.commands.info import describe, machine_rows
from anytorch.cli.output import Output
from anytorch.cli.settings import tolerated

ROWS = ("CPU", "memory", "GPUs", "torch", "would use")


def run(output: Output) -> int:
    problems: list[str] = []
    with tolerated(problems) as values:
        document = describe(problems, values, probing=False, refresh=False, why=False)
    commands = next_commands(document)
    if output.json:
        told = {name: document[name] for name in ("anytorch", "cpu", "memory", "gpus", "torch", "expected", "problems")}
        output.data({**told, "next": [{"command": command, "what": what} for command, what in commands]})
        return 0
    output.text(f"anytorch {__version__}: write PyTorch once, run it on whatever hardware is there")
    if document["machine"] is not None:
        output.heading("found (read from files; nothing was tried)")
        output.pairs([row for row in machine_rows(document) if row[0] in ROWS])
    for problem in problems:
        output.warn(problem)
    output.heading("next")
    output.pairs(commands)
    output.text("\n`anytorch --help` lists all commands.")
    return 0


def next_commands(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Three commands and what they do; an installation for what is missing comes before what needs it."""
    torch = document["torch"] is not None
    found = [
        (
            "anytorch doctor",
            "what is wrong, and the command that fixes it" if torch else "the torch command for this machine",
        )
    ]
    if torch:
        found.append(("anytorch demo", "the devices, a search by meaning, a forecast and a sentence, within 20 s"))
    elif has("tokenizers", "numpy"):
        found.append(("anytorch embed FILE --search QUESTION", "the lines of a text file that are nearest in meaning"))
    else:
        found.append(("pip install 'anytorch[embed,minilm]'", "embeddings, a search by meaning"))
    if has("fastapi", "uvicorn"):
        found.append(("anytorch serve", "the service and its page in the browser"))
    else:
        found.append(("pip install 'anytorch[serve]'", "the service and its page in the browser"))
    return found


def has(*names: str) -> bool:
    """Whether these packages are installed; none is imported."""
    return all(find_spec(name) is not None for name in names)
