"""Two bits are too few for a trained network, and enough for one that was trained with them: QAT on handwritten digits.

    python examples/qat.py        # about ten seconds on one core

A small network learns scikit-learn's digits; rounding its weights to 2 bits costs accuracy; a few more epochs with the
rounding in the loop give it back. The packed model is saved and loaded, and computes what the trained one computed.
"""

from __future__ import annotations

import copy
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn

from anytorch.quant import convert, load, prepare_qat, quantize, save

FORMAT = "int2"


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    bunch = load_digits()
    images = torch.tensor(bunch.data, dtype=torch.float32) / 16 - 0.3
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1200], order[1200:]
    return images[train], labels[train], images[test], labels[test]


def network(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int, rate: float) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for at in torch.randperm(len(labels)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[at]), labels[at]).backward()
            optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float((model.eval()(images).argmax(1) == labels).float().mean())


def main() -> dict[str, float]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels, test_images, test_labels = data()
    model = network()
    train(model, images, labels, epochs=30, rate=2e-3)
    found = {"float32": accuracy(model, test_images, test_labels)}

    rounded = copy.deepcopy(model)
    quantize(rounded, FORMAT, group_size=64, refine=False)
    found["rounded afterwards"] = accuracy(rounded, test_images, test_labels)

    calibrated = copy.deepcopy(model)
    quantize(calibrated, FORMAT, group_size=64, calibration=[images[:512]])
    found["rounded with GPTQ"] = accuracy(calibrated, test_images, test_labels)

    prepare_qat(model, FORMAT, group_size=64)
    train(model, images, labels, epochs=30, rate=2e-3)
    convert(model)
    found["trained with rounding"] = accuracy(model, test_images, test_labels)

    with tempfile.TemporaryDirectory() as folder:
        save(model, folder)
        found["saved and loaded"] = accuracy(load(network(), folder), test_images, test_labels)
    return found


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{FORMAT if name != 'float32' else '':5} {name:22} {value:.3f}")
