"""Real English texts for benchmarks, the same on every machine with the same Python: no download, no random words.

The sources, in this order and each in alphabetical order: the language reference that `help()` prints
(`pydoc_data/topics.py`), the docstrings of the standard library, and, when more is asked for than these give, the
docstrings of the packages named in `PACKAGES` that are installed. Docstrings are read from the source files and nothing is
imported. Texts that occur twice are taken once. The choice among all of them is a shuffle with a fixed seed, so that a
smaller corpus is a prefix of a larger one as long as no further package is needed.

- `sentences(n)`: single sentences of natural length, 4 to 60 words;
- `passages(n)`: running text of 200 to 400 tokens from one topic or one source file, by the tokenizer that is
  given, or by a count of words and signs (MiniLM's vocabulary needs 1.12 tokens for each of those in these texts).

python bench/corpus.py            how many there are, how long they are, and the checksum
"""

from __future__ import annotations

import ast
import hashlib
import random
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

SEED = 20261115
PACKAGES = (
    "numpy",
    "torch",
    "pyarrow",
    "transformers",
    "sentence_transformers",
    "pandas",
    "polars",
    "sympy",
    "networkx",
    "sklearn",
    "diffusers",
    "accelerate",
    "huggingface_hub",
    "torchao",
)
SKIPPED = {"test", "tests", "idlelib", "turtledemo", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
PIECE = re.compile(r"\w+|[^\w\s]")
TOKENS_PER_PIECE = 1.12  # measured with the tokenizer of all-MiniLM-L6-v2 on the passages themselves
Counter = Callable[[str], int]


def estimate_tokens(text: str) -> int:
    return round(TOKENS_PER_PIECE * len(PIECE.findall(text))) + 2  # the two marks at the ends


def sentences(count: int = 2000) -> list[str]:
    return _take(_all_sentences, count, "sentences")


def passages(
    count: int = 200, tokens: tuple[int, int] = (200, 400), count_tokens: Counter = estimate_tokens
) -> list[str]:
    return _take(lambda packages: tuple(_passages(_documents(packages), tokens, count_tokens)), count, "passages")


def checksum(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:16]


def _take(collect: Callable[[int], tuple[str, ...]], count: int, what: str) -> list[str]:
    """From as few sources as give `count` texts: a package more or less must not change the small corpora."""
    found: tuple[str, ...] = ()
    for packages in range(len(PACKAGES) + 1):
        found = collect(packages)
        if len(found) >= count:
            chosen = list(found)
            random.Random(SEED).shuffle(chosen)
            return chosen[:count]
    raise SystemExit(f"this Python's documentation has only {len(found)} {what}; {count} were asked for")


# --- documents: lists of paragraphs of prose -----------------------------------------------------------------------


@cache
def _documents(packages: int) -> tuple[tuple[str, ...], ...]:
    found = [*_language_reference(), *_standard_library()]
    for package in PACKAGES[:packages]:
        found += _package(package)
    return tuple(found)


@cache
def _language_reference() -> tuple[tuple[str, ...], ...]:
    source = Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"
    topics: dict[str, str] = {}
    if source.exists():
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign):
                topics = ast.literal_eval(node.value)
    return tuple(document for name in sorted(topics) if (document := _paragraphs(topics[name])))


@cache
def _standard_library() -> tuple[tuple[str, ...], ...]:
    return tuple(_docstrings(Path(sysconfig.get_path("stdlib"))))


@cache
def _package(name: str) -> tuple[tuple[str, ...], ...]:
    folder = Path(sysconfig.get_path("purelib")) / name
    return tuple(_docstrings(folder)) if folder.is_dir() else ()


def _docstrings(folder: Path) -> Iterator[tuple[str, ...]]:
    for source in sorted(folder.rglob("*.py")):
        if SKIPPED.isdisjoint(source.relative_to(folder).parts):
            try:
                tree = ast.parse(source.read_bytes())
            except (SyntaxError, ValueError):
                continue  # templates and samples of broken code that packages carry
            documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)]
            document = _paragraphs("\n\n".join(texts))
            if document:
                yield document


def _paragraphs(text: str) -> tuple[str, ...]:
    """The paragraphs that are prose: code, tables, headings and lists of names are left out."""
    return tuple(
        flat
        for block in re.split(r"\n\s*\n", text)
        if ">>>" not in block and _is_prose(flat := " ".join(block.split()))
    )


def _is_prose(text: str) -> bool:
    words = text.split()
    if len(words) < 4 or not text[0].isupper() or not text.endswith((".", "!", "?")) or "::=" in text:
        return False
    plain = sum(word.strip(",.;:!?()'\"").isalpha() for word in words)
    return plain >= 0.8 * len(words) and "|" not in text and "====" not in text


# --- what is made of them ------------------------------------------------------------------------------------------


@cache
def _all_sentences(packages: int) -> tuple[str, ...]:
    seen: dict[str, None] = {}
    for document in _documents(packages):
        for paragraph in document:
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", paragraph):
                if 4 <= len(sentence.split()) <= 60 and sentence.endswith((".", "!", "?")) and sentence[0].isupper():
                    seen.setdefault(sentence)
    return tuple(seen)


def _passages(documents: Iterable[tuple[str, ...]], tokens: tuple[int, int], count_tokens: Counter) -> Iterator[str]:
    """Paragraphs that follow one another in a document, up to a length drawn anew for each passage."""
    fewest, most = tokens
    lengths = random.Random(SEED)
    seen: set[str] = set()
    for document in documents:
        gathered, wanted = "", lengths.randint(fewest, most)
        for paragraph in document:
            if paragraph in seen:
                continue  # a docstring that a subclass repeats
            seen.add(paragraph)
            longer = f"{gathered} {paragraph}".strip()
            if count_tokens(longer) <= wanted:
                gathered = longer
                continue
            if fewest <= count_tokens(gathered) <= most:
                yield gathered
            gathered, wanted = paragraph, lengths.randint(fewest, most)


def main() -> None:
    for name, texts in (("sentences", sentences()), ("passages", passages())):
        lengths = sorted(estimate_tokens(text) for text in texts)
        spread = ", ".join(
            f"{share} % {lengths[min(len(lengths) - 1, len(lengths) * share // 100)]}" for share in (5, 50, 95)
        )
        print(f"{len(texts)} {name}: about {sum(lengths) / len(lengths):.0f} tokens each ({spread}); {checksum(texts)}")
        print(f"  for example: {texts[0][:200]}")
    print(f"the standard library alone has {len(_all_sentences(0))} sentences")


if __name__ == "__main__":
    main()
