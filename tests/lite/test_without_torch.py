"""It works where torch cannot be installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PROGRAM = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "wgpu", "scipy", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
import anytorch.lite as lite
assert "numpy" not in sys.modules, "importing the package costs nothing"
from anytorch.lite import functional as F
lite.seed(0)
model = lite.Sequential(lite.CustomConv2d(1, 4, 3), lite.BatchNorm2d(4), lite.GELU(), lite.MaxPool2d(2),
                        lite.Flatten(), lite.CustomLinear(36, 3))
optimizer = lite.AdamW(model.parameters(), lr=0.01)
x, y = lite.randn(12, 1, 8, 8), lite.tensor([0, 1, 2] * 4)
losses = []
for _ in range(30):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < 0.2 * losses[0], losses
lite.save(model, "model.safetensors")
model.load_state_dict(lite.load("model.safetensors"))
out, (h, c) = lite.LSTM(3, 4)(lite.randn(5, 2, 3))
quantized = lite.quantize_dynamic(model.eval())
assert quantized(x).shape == (12, 3)
assert "torch" not in sys.modules
try:
    lite.CustomTensor([1], device="webgpu")
except Exception as exc:
    assert "wgpu" in str(exc), exc
else:
    raise AssertionError("there is no wgpu here")
print("done")
"""


def test_it_runs_without_torch(run_python: Callable[..., Any], tmp_path: Any) -> None:
    done = run_python(f"import os; os.chdir({str(tmp_path)!r})\n{PROGRAM}")
    assert done.stdout.strip() == "done"
