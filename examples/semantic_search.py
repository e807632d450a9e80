"""Search the text files of a folder by meaning, not by words. Nothing leaves this machine, and no torch is needed.

python examples/semantic_search.py docs "my GPU is not used"
python examples/semantic_search.py ~/notes "recipes with lentils" --k 3 --index notes.npz
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import anytorch

SUFFIXES = {".md", ".txt", ".rst", ".org", ".tex"}


def paragraphs(folder: Path) -> Iterator[tuple[str, int, str]]:
    """File, line and text of every paragraph of at least five words, each under the heading it stands below."""
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file()):
        heading, block = "", []
        for number, line in enumerate([*path.read_text(encoding="utf-8", errors="replace").splitlines(), ""], 1):
            if line.strip() and not line.startswith("#"):
                block.append(line.strip())
                continue
            if len(" ".join(block).split()) >= 5:
                yield str(path), number - len(block), f"{heading}: {' '.join(block)}" if heading else " ".join(block)
            block = []
            if line.startswith("#"):
                heading = line.strip("# ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("question")
    parser.add_argument("--k", type=int, default=5, help="how many answers")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--index", type=Path, help="keep the vectors in this .npz file and use them the next time")
    options = parser.parse_args()

    found = list(paragraphs(options.folder))
    if not found:
        sys.exit(f"no text in {options.folder}: looked for files that end in {', '.join(sorted(SUFFIXES))}")
    texts = [text for _, _, text in found]
    with anytorch.ArrowEngine(device=options.device) as engine:
        vectors = None
        if options.index is not None and options.index.exists():
            kept = np.load(options.index)
            if kept["texts"].tolist() == texts:  # the files are as they were
                vectors = kept["vectors"]
        if vectors is None:
            vectors = engine.encode(texts, prompt="passage", progress=True)
            if options.index is not None:
                np.savez(options.index, texts=np.array(texts), vectors=vectors)
        for hit in engine.search(options.question, vectors, options.k):
            path, line, text = found[hit.index]
            print(f"{hit.score:.2f}  {path}:{line}\n      {text[:110]}{'…' if len(text) > 110 else ''}")


if __name__ == "__main__":
    main()
