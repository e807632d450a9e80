"""A character LSTM with anytorch.lite: it reads a text letter by letter, and then writes in its manner.

python examples/lite_characters.py [file]
"""

import sys
from pathlib import Path

import numpy as np

from anytorch import lite
from anytorch.lite import functional as F

RHYME = """
this is the house that jack built.
this is the malt that lay in the house that jack built.
this is the rat that ate the malt that lay in the house that jack built.
this is the cat that killed the rat that ate the malt that lay in the house that jack built.
this is the dog that worried the cat that killed the rat that ate the malt that lay in the house that jack built.
"""


class Writer(lite.Module):
    def __init__(self, letters, hidden=96):
        self.embedding = lite.Embedding(letters, 24)
        self.lstm = lite.LSTM(24, hidden, batch_first=True)
        self.linear = lite.CustomLinear(hidden, letters)

    def forward(self, letters, state=None):  # (B, L) whole numbers
        out, state = self.lstm(self.embedding(letters), state)  # (B, L, hidden)
        return self.linear(out), state  # (B, L, letters)


def write(model, alphabet, start, length):
    """Letters one by one, the likeliest each time; the state carries what has been read."""
    model.eval()
    text, state, given = start, None, start
    with lite.no_grad():
        for _ in range(length):
            numbers = lite.tensor([[alphabet.index(letter) for letter in given]])
            logits, state = model(numbers, state)
            given = alphabet[logits[0, -1].argmax().item()]
            text += given
    return text


def main(text=RHYME, steps=250, length=32):
    lite.seed(0)
    alphabet = sorted(set(text))
    numbers = np.array([alphabet.index(letter) for letter in text])
    model = Writer(len(alphabet))
    optimizer = lite.Adam(model.parameters(), lr=0.01)
    random = np.random.default_rng(0)
    for step in range(steps):
        starts = random.integers(0, len(numbers) - length - 1, 16)
        batch = np.stack([numbers[s : s + length + 1] for s in starts])  # (16, length + 1)
        logits, _ = model(lite.tensor(batch[:, :-1]))
        loss = F.cross_entropy(logits.transpose(1, 2), lite.tensor(batch[:, 1:]))
        optimizer.zero_grad()
        loss.backward()
        lite.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    written = write(model, alphabet, "this is the ", 60)
    print(written)
    return loss.item(), written


if __name__ == "__main__":
    main(Path(sys.argv[1]).read_text(encoding="utf-8") if len(sys.argv) > 1 else RHYME)
