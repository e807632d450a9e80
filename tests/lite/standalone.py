"""Trains, saves and quantizes where torch, wgpu, SciPy and safetensors cannot be imported; run in a process of its own."""

# ruff: noqa: E402  (what must not be imported is blocked first)
import sys


class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "wgpu", "scipy", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Block())
import anytorch.lite as lite

assert "numpy" not in sys.modules, "importing the package costs nothing"
from anytorch.errors import DeviceUnavailable
from anytorch.lite import functional as F

lite.seed(0)
model = lite.Sequential(
    lite.CustomConv2d(1, 4, 3),
    lite.BatchNorm2d(4),
    lite.GELU(),
    lite.MaxPool2d(2),
    lite.Flatten(),
    lite.CustomLinear(36, 3),
)
optimizer = lite.AdamW(model.parameters(), lr=0.01)
x, y = lite.randn(12, 1, 8, 8), lite.tensor([0, 1, 2] * 4)
assert y.dtype == (y + 1).dtype == lite.arange(3).dtype == "int64"
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
except DeviceUnavailable as exc:
    assert "wgpu" in str(exc), exc
else:
    raise AssertionError("there is no wgpu here")
print("done")
