"""Does training on the webgpu device learn what the CPU learns?

    python bench/webgpu_training.py [--steps 60] [--device webgpu] [--plot docs/assets/webgpu-training.png] [--output F.json]

Two small models with the same weights, data and order on both devices: a CNN on scikit-learn's digits, and a two-layer
transformer that predicts the next letter of our own documentation. Prints how far the loss curves are apart; exits with 1 if
they part.
What it does not show: speed, dropout (its random numbers differ between devices), long runs.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write_results
from torch import nn

import anytorch.webgpu  # noqa: F401  (registers the device)
from anytorch.gpu.runtime import open_runtime

ROOT = Path(__file__).parents[1]


def digits_cnn() -> tuple[nn.Module, Any]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.arange(step * 64, step * 64 + 64) % len(labels)
        return images[at], labels[at]

    return model, batch


class LetterModel(nn.Module):
    def __init__(self, letters: int, width: int = 64) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(letters, width), nn.Embedding(64, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, letters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        h = self.embed(x) + self.place(torch.arange(length, device=x.device))
        return self.head(self.blocks(h, mask=mask, is_causal=True)).flatten(0, 1)


def letters_transformer() -> tuple[nn.Module, Any]:
    text = "".join(page.read_text() for page in sorted((ROOT / "docs/guide").glob("*.md")))
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(letter) for letter in text])

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = (torch.arange(16) * 997 + step * 311) % (len(data) - 49)
        rows = torch.stack([data[s : s + 49] for s in starts])
        return rows[:, :-1], rows[:, 1:].flatten()

    return LetterModel(len(alphabet)), batch


def train(model: nn.Module, batch: Any, device: str, steps: int) -> list[float]:
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        x, y = batch(step)
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu().tolist()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="webgpu")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    curves: dict[str, dict[str, list[float]]] = {}
    worst = 0.0
    for name, make in (("CNN on digits", digits_cnn), ("transformer on letters", letters_transformer)):
        torch.manual_seed(0)
        model, batch = make()
        runs = {device: train(copy.deepcopy(model), batch, device, options.steps) for device in ("cpu", options.device)}
        apart = max(abs(a - b) for a, b in zip(runs["cpu"], runs[options.device], strict=True))
        worst = max(worst, apart)
        curves[name] = runs
        print(
            f"{name}: loss {runs['cpu'][0]:.3f} → {runs['cpu'][-1]:.3f} on the CPU, "
            f"{runs[options.device][-1]:.3f} on {options.device}; at most {apart:.1e} apart"
        )
    fallbacks = torch.webgpu.fallback_stats()
    adapter = open_runtime().adapter
    print(f"adapter: {adapter.name}; ops that ran on the CPU: {fallbacks or 'none'}")
    if options.plot:
        plot(curves, options.plot, f"{adapter.name} ({adapter.api})")
    if options.output:
        about = {**provenance(), "torch": torch.__version__}
        found = {"adapter": adapter.name, "fallbacks": fallbacks, "most_apart": worst, "losses": curves}
        write_results(options.output, {**about, **found})
    return 0 if worst < 0.05 else 1


def plot(curves: dict[str, dict[str, list[float]]], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(10, 3.6), layout="constrained")
    for axis, (name, runs) in zip(axes, curves.items(), strict=True):
        for (device, losses), style in zip(runs.items(), ("-", "--"), strict=True):
            width, colour = (3, "#99aabb") if style == "-" else (1.5, "#d35400")
            axis.plot(losses, style, label=device, linewidth=width, color=colour)
        axis.set(title=name, xlabel="step", ylabel="cross-entropy")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.suptitle(f"The same training on the CPU and on webgpu: {title}")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
