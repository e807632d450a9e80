"""Choose a device, use it, and know what happened when it is not the one that was asked for.

python examples/choose_device.py            the best device here
python examples/choose_device.py cuda:1     that one, or the CPU and the reason
"""

import sys
import warnings

import torch

import anytorch

request = sys.argv[1] if len(sys.argv) > 1 else "auto"

with warnings.catch_warnings():
    warnings.simplefilter("ignore", anytorch.DeviceFallbackWarning)  # it is told below, in our own words
    choice = anytorch.resolve(request)

print(f"asked for {choice.requested}, using {choice.device} ({choice.chosen.name})")
if choice.fell_back:
    print(choice.warning)
    for reason in choice.reasons:
        print(f"  {reason.code}: {reason.text}\n  fix: {reason.fix}")

anytorch.seed(42)
model = torch.nn.Linear(64, 8).to(choice.device)
with anytorch.autocast(choice.device):  # the dtype that is fast on this device; plain float32 where none is faster
    output = model(torch.randn(4, 64, device=choice.device))
print(f"output {tuple(output.shape)} {output.dtype} on {output.device}")

use = anytorch.memory(choice.device)
print(f"memory free: {'unknown' if use.free is None else f'{use.free / 2**30:.1f} GiB'} (asked: {use.source})")
