"""Taking weights away, and training on so that the rest makes up for them.

    python examples/prune.py      # about ten seconds on one core

Unstructured: four of five weights become zero. Structured: half of the hidden neurons go, and the layers get smaller.
"""

from __future__ import annotations

import copy

import torch
from qat import accuracy, data, network, train

from anytorch.quant import finish_pruning, prune, prune_neurons, sparsity


def main() -> dict[str, float]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels, test_images, test_labels = data()
    model = network(64)
    train(model, images, labels, epochs=30, rate=2e-3)
    found = {"all weights": accuracy(model, test_images, test_labels)}

    sparse = copy.deepcopy(model)
    prune(sparse, 0.8)
    found["a fifth of the weights"] = accuracy(sparse, test_images, test_labels)
    train(sparse.train(), images, labels, epochs=30, rate=2e-3)
    finish_pruning(sparse)
    found["…trained on"] = accuracy(sparse, test_images, test_labels)
    found["its share of zeros"] = sparsity(sparse)

    small = copy.deepcopy(model)
    prune_neurons(small, [("0", "2"), ("2", "4")], 0.5)
    found["half of the neurons"] = accuracy(small, test_images, test_labels)
    train(small.train(), images, labels, epochs=30, rate=2e-3)
    found["…trained on, too"] = accuracy(small, test_images, test_labels)
    found["its share of parameters"] = sum(p.numel() for p in small.parameters()) / sum(
        p.numel() for p in model.parameters()
    )
    return found


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name:26} {value:.3f}")
