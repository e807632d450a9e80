"""Find the largest batch that fits: halve on a real out-of-memory error, pass every other error through.

python examples/fit_batch.py            starts at 4096 and fits on most machines at once
python examples/fit_batch.py 1000000000000     asks for petabytes, and arrives at what fits
"""

import sys

import torch

import anytorch

device = anytorch.best_device()
model = torch.nn.Linear(256, 256).to(device)
start = int(sys.argv[1]) if len(sys.argv) > 1 else 4096


def step(batch: int) -> float:
    with torch.no_grad():
        return float(model(torch.ones(batch, 256, device=device)).mean())


fit = anytorch.fit_batch(step, start)
if fit.too_large:
    print(f"did not fit: {', '.join(map(str, fit.too_large))}")
print(f"batch {fit.batch} fits on {device}; mean output {fit.result:.4f}")
