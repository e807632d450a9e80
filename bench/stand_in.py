"""What the stand-in costs a training loop of small operations: the same loop on the CPU, with and without it, in turns.

python bench/stand_in.py [--rounds 40] [--output bench/results/stand-in.json]

Both loops say `device = torch.device(…)`; without the stand-in that is "cpu", with it "cuda". In `moving` every batch goes
there by `.to(device)`, two redirected calls a step, which copy where torch would return what it was given; in `resident` the
batches are there, so nothing is redirected. The losses must be the same to the bit. One thread, and the seconds are those
that the process computed, so that others on the machine count little; `ratio` is that of the medians, `best_ratio` that of
the best rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write_results

import anytorch

STEPS, WARM = 200, 40
WAYS = ("resident", "moving")


def train(name: str, way: str) -> tuple[float, list[float]]:
    """CPU seconds and losses of a small network's training on made-up data."""
    torch.manual_seed(0)
    device = torch.device(name)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8)), torch.nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    data = [(torch.randn(4, 16), torch.randn(4, 1)) for _ in range(8)]
    if way == "resident":
        data = [(x.to(device), y.to(device)) for x, y in data]
    losses = []
    began = 0.0
    for step in range(WARM + STEPS):
        if (
            step == WARM
        ):  # Python has specialised the loop by now: entering the stand-in changes classes, once per program
            began = time.process_time()
        x, y = data[step % len(data)]
        if way == "moving":
            x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        hidden = x
        for layer in model:
            hidden = torch.tanh(layer(hidden)) * 0.5 + hidden[:, : layer.out_features] * 0.5
        loss = (hidden - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return time.process_time() - began, losses


def compared(way: str, rounds: int) -> dict[str, Any]:
    plain: list[float] = []
    stood: list[float] = []
    for number in range(rounds):
        for which in ("cpu", "cuda") if number % 2 else ("cuda", "cpu"):
            if which == "cpu":
                seconds, expected = train("cpu", way)
                plain.append(seconds)
            else:
                with anytorch.stand_in("cpu"):
                    seconds, found = train("cuda", way)
                stood.append(seconds)
        assert found == expected, "the losses differ"
    return {
        "plain_s": statistics.median(plain),
        "stand_in_s": statistics.median(stood),
        "ratio": statistics.median(stood) / statistics.median(plain),
        "best_ratio": min(stood) / min(plain),
        "plain_quartiles_s": statistics.quantiles(plain, n=4)[::2],
        "stand_in_quartiles_s": statistics.quantiles(stood, n=4)[::2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train("cpu", "moving")
    answer: dict[str, Any] = {
        **provenance(),
        "torch": torch.__version__,
        "steps": STEPS,
        "rounds": options.rounds,
        "losses_equal": True,  # or `compared` raises
        **{way: compared(way, options.rounds) for way in WAYS},
    }
    print(json.dumps(answer, indent=2))
    if options.output:
        write_results(options.output, answer)


if __name__ == "__main__":
    main()
