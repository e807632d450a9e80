"""Prose about Python, from the interpreter that runs this: documentation of the language and docstrings of its library.

Nothing is fetched. The texts are under the Python Software Foundation's licence; which ones there are depends on the version
of Python. Code, grammars and tables are left out, and lines are joined to paragraphs.
"""

from __future__ import annotations

import ast
import importlib
import re
import sysconfig
import textwrap
import types
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
SKIPPED |= {"pydoc_data", "encodings", "distutils"}
COMPILED = ("builtins", "math", "cmath", "itertools", "time", "sys", "posix", "_io", "collections", "functools", "gc")
COMPILED += ("_operator", "_thread", "_struct", "_socket", "select", "zlib", "array", "_datetime", "_random", "_json")
SHORTEST, LONGEST = 24, 6000  # letters of a text
LETTERS = re.compile(r"[A-Za-z ,.'\"()_-]")
TYPED = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "…": "...", "–": "-", "—": "-"})
ASKED = {
    "function": ("What does {} do?", "Explain {}.", "What is {} for?"),
    "class": ("What is {}?", "Explain the class {}.", "What is {} for?"),
    "module": ("What is the module {} for?", "Explain the module {}.", "What does the module {} do?"),
    "topic": ("Explain this: {}", "What does the documentation say about {}?", "Tell me about {}."),
}


@dataclass(frozen=True)
class Text:
    """A text about something, and what kind of thing that is: a key of ASKED."""

    kind: str
    name: str
    text: str

    @property
    def question(self) -> str:
        """One of the questions this answers; always the same one."""
        forms = ASKED[self.kind]
        return forms[zlib.crc32(self.name.encode()) % len(forms)].format(self.name)


def texts() -> list[Text]:
    """All texts, in an order that does not depend on the machine; each once."""
    found: dict[str, Text] = {}
    for one in (*topics(), *written(), *compiled()):
        if SHORTEST <= len(one.text) <= LONGEST:
            found.setdefault(one.text, one)
    return list(found.values())


def prose(text: str) -> str:
    """The paragraphs of a text, one in a line; without code, grammars, headings and tables."""
    kept = []
    for block in re.split(r"\n\s*\n", textwrap.dedent(text.translate(TYPED))):
        lines = [line.strip() for line in block.splitlines() if not re.fullmatch(r"\s*([*=~^-])\1+\s*", line)]
        joined = re.sub(r"\s+", " ", " ".join(lines)).strip()
        heading = len(lines) < len(block.splitlines())
        code = (
            ">>>" in joined or "::=" in joined or (len(block) > 4 and all(s[:4] == "    " for s in block.splitlines()))
        )
        if not heading and not code and joined and len(LETTERS.findall(joined)) > 0.92 * len(joined):
            kept.append(joined)
    return "\n".join(kept)


def topics() -> Iterator[Text]:
    """The language reference as `help()` shows it, cut at its headings."""
    from pydoc_data.topics import topics as named

    for name in sorted(named):
        parts = re.split(r"\n?(.+)\n([*=-])\2{3,}\n", named[name])  # before, (heading, mark, body) …
        for place in range(1, len(parts), 3):
            heading = parts[place].strip().translate(TYPED).replace('"', "")
            body = prose(parts[place + 2])
            for piece in pieces(body):
                yield Text("topic", heading[:60], piece)


def pieces(text: str, length: int = 1500) -> Iterator[str]:
    """Whole paragraphs of about this length together."""
    held = ""
    for paragraph in text.split("\n"):
        if held and len(held) + len(paragraph) > length:
            yield held
            held = ""
        held = f"{held}\n{paragraph}" if held else paragraph
    if held:
        yield held


def written() -> Iterator[Text]:
    """Docstrings of the library's modules, classes and functions."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED & set(parts) or any(part.startswith(("config-", "_sysconfigdata")) for part in parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue  # samples of broken files
        yield from docstrings(tree, ".".join(parts).removesuffix(".__init__").lstrip("_"))


def docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[Text]:
    kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
    if text := ast.get_docstring(node):
        yield Text(kind, name, prose(text))
    for child in _within(node):
        if isinstance(node, ast.ClassDef) or not child.name.startswith("__"):
            yield from docstrings(child, f"{name}.{child.name}")


def _within(node: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """What is defined in a module, a class or a function, also where a condition comes before."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
        elif isinstance(child, (ast.If, ast.Try)):
            yield from _within(child)


def compiled() -> Iterator[Text]:
    """Docstrings of what is written in C."""
    for name in COMPILED:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue  # of another system
        shown = name.lstrip("_").replace("posix", "os")
        for key in sorted(vars(module)):
            yield from _of_object(vars(module)[key], key if name == "builtins" else f"{shown}.{key}")


def _of_object(thing: object, name: str) -> Iterator[Text]:
    own = name.rpartition(".")[2]
    if own.startswith("_") or isinstance(thing, types.ModuleType) or not callable(thing):
        return
    yield Text("class" if isinstance(thing, type) else "function", name, prose(_without_signature(thing.__doc__)))
    if isinstance(thing, type):
        for key in sorted(vars(thing)):
            text = getattr(vars(thing)[key], "__doc__", None)
            if not key.startswith("_") and isinstance(text, str):
                yield Text("function", f"{name}.{key}", prose(_without_signature(text)))


def _without_signature(text: str | None) -> str:
    lines = [] if text is None else text.splitlines()
    return "\n".join(line for line in lines if not re.match(r"[\w.]+\(.*\) *(->.*)?$", line))
