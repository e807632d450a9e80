"""Handwritten digits with anytorch.lite alone: no torch, a few seconds on one core, more than 97 % right.

python examples/lite_digits.py            (needs scikit-learn, for the 1,797 images of 8 × 8 pixels)
"""

import numpy as np
from sklearn.datasets import load_digits

from anytorch import lite
from anytorch.lite import functional as F


class Network(lite.Module):
    def __init__(self):
        self.conv1 = lite.CustomConv2d(1, 16, 3, padding=1)
        self.norm1 = lite.BatchNorm2d(16)
        self.conv2 = lite.CustomConv2d(16, 32, 3, padding=1)
        self.norm2 = lite.BatchNorm2d(32)
        self.dropout = lite.Dropout(0.2)
        self.linear = lite.CustomLinear(32 * 2 * 2, 10)

    def forward(self, x):  # (N, 1, 8, 8)
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)  # (N, 16, 4, 4)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)  # (N, 32, 2, 2)
        return self.linear(self.dropout(x.flatten(1)))  # (N, 10)


def accuracy(model, images, labels):
    model.eval()
    with lite.no_grad():
        return (model(lite.tensor(images)).argmax(1) == lite.tensor(labels)).float().mean().item()


def main(epochs=12):
    lite.seed(0)
    data = load_digits()
    images, labels = (data.images[:, None] / 16).astype("float32"), data.target
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1437], order[1437:]
    model = Network()
    optimizer = lite.AdamW(model.parameters(), lr=3e-3)
    schedule = lite.cosine_schedule(optimizer, epochs)
    for epoch in range(epochs):
        model.train()
        np.random.default_rng(epoch).shuffle(train)
        for start in range(0, len(train), 64):
            rows = train[start : start + 64]
            loss = F.cross_entropy(model(lite.tensor(images[rows])), lite.tensor(labels[rows]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        print(
            f"epoch {epoch + 1}: loss {loss.item():.4f}, test accuracy {accuracy(model, images[test], labels[test]):.4f}"
        )
    lite.save(model, "digits.safetensors")
    before = accuracy(model, images[test], labels[test])
    after = accuracy(lite.quantize_dynamic(model), images[test], labels[test])
    print(f"float32: {before:.4f}, int8: {after:.4f}")
    return before, after


if __name__ == "__main__":
    main()
