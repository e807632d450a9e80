"""Draws docs/assets/similarity.png: how alike twelve sentences are, by the default model.

python docs/tools/similarity_picture.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

import anytorch

SENTENCES = [
    "The cat sleeps on the sofa.",
    "A kitten is napping on the couch.",
    "My cat curled up for a nap.",
    "The recipe needs two cups of flour.",
    "Knead the dough with more flour.",
    "Bake the bread for forty minutes.",
    "The GPU ran out of memory.",
    "Use a smaller batch: the graphics card is full.",
    "My graphics card is not detected.",
    "The train to Vienna leaves at nine.",
    "When does the express to Vienna depart?",
    "Our train was an hour late.",
]


def main() -> None:
    target = Path(__file__).parents[1] / "assets" / "similarity.png"
    with anytorch.ArrowEngine(device="cpu") as engine:
        matrix = engine.similarity(SENTENCES)
    figure, axes = plt.subplots(figsize=(9, 5.6), dpi=80, layout="constrained")
    image = axes.imshow(matrix, cmap="YlGnBu", vmin=0, vmax=1)
    axes.set_xticks(range(len(SENTENCES)), [str(n + 1) for n in range(len(SENTENCES))])
    axes.set_yticks(range(len(SENTENCES)), [f"{text}  {n + 1}" for n, text in enumerate(SENTENCES)])
    for row in range(len(SENTENCES)):
        for column in range(len(SENTENCES)):
            value = matrix[row, column]
            shade = "white" if value > 0.5 else "black"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=shade, fontsize=7)
    axes.set_title("Cosine similarity, all-MiniLM-L6-v2")
    figure.colorbar(image, shrink=0.8)
    figure.savefig(target, bbox_inches="tight")


if __name__ == "__main__":
    main()
