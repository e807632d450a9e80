"""torch.compile around code that names CUDA: moves, questions about the device, factories, inductor's modes."""

import torch
import torch.nn as nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


@torch.compile
def moved(x):
    x = x.to("cuda") if torch.cuda.is_available() else x
    if x.device.type == "cuda" or not torch.cuda.is_available():
        x = x * 2
    if x.is_cuda:
        x = x + 1
    else:
        x = x + 1.0
    return x + torch.ones(x.shape, device=x.device) + torch.zeros(3, device=device)


print(f"= {moved(torch.ones(2, 3)).sum().item():.3f}")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, idx):
        device = idx.device
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=device)
        assert device.type in ("cuda", "cpu"), device
        return self.proj(torch.nn.functional.one_hot(pos % 4, 4).float()).sum(0) + idx.float().sum()


model = Block().to(device)
compiled = torch.compile(model, mode="reduce-overhead")
x = torch.tensor([[1, 2, 3]]).to(device)
print(f"= {compiled(x).sum().item():.3f}")
fullgraph = torch.compile(lambda a: torch.nn.functional.gelu(a.cuda() if torch.cuda.is_available() else a).sum(), fullgraph=True)
print(f"= {fullgraph(torch.linspace(-1, 1, 5)).item():.3f}")
step = torch.compile(lambda m, v: m(v).sum(), dynamic=True, options={"triton.cudagraphs": False})
print(f"= {step(model, x).item():.3f}")
loss = compiled(x).pow(2).sum()
loss.backward()
print(f"= {model.proj.weight.grad.sum().item():.3f}")
assert moved(torch.ones(2, 3)).is_cuda == torch.cuda.is_available()
