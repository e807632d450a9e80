"""torch.func, hooks, custom autograd functions, scripted and traced modules, FFTs and sparse matrices on the device."""

import io

import torch
import torch.nn as nn
from torch.cuda.amp import custom_bwd, custom_fwd
from torch.func import functional_call, grad, stack_module_state, vmap

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


class Scale(torch.autograd.Function):
    @staticmethod
    @custom_fwd
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    @custom_bwd
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum().reshape(1)


x = torch.randn(3, 4).to(device).requires_grad_()
w = torch.ones(1, device=device, requires_grad=True)
Scale.apply(x, w).sum().backward()
print(f"= {w.grad.item():.4f}")
model = nn.Linear(4, 2).to(device)
params = dict(model.named_parameters())
per_sample = vmap(grad(lambda p, v: functional_call(model, p, (v,)).pow(2).sum()), in_dims=(None, 0))(params, x.detach())
print(f"= {per_sample['weight'].sum().item():.4f}")
ensemble = [nn.Linear(4, 2).to(device) for _ in range(3)]
stacked, buffers = stack_module_state(ensemble)
print(f"= {vmap(lambda p, b, v: functional_call(model, (p, b), (v,)), in_dims=(0, 0, None))(stacked, buffers, x.detach()).sum().item():.4f}")


class Scripted(nn.Module):
    def forward(self, v):
        return v.relu() + torch.zeros(v.shape[1], device=v.device)


scripted = torch.jit.script(Scripted().to(device))
traced = torch.jit.trace(model, x.detach())
saved = io.BytesIO()
torch.jit.save(traced, saved)
saved.seek(0)
loaded = torch.jit.load(saved, map_location=device)
print(f"= {scripted(x.detach()).sum().item():.4f} {loaded(x.detach()).sum().item():.4f}")
signal = torch.sin(torch.arange(64.0)).to(device)
spectrum = torch.stft(signal, 16, hop_length=8, window=torch.hann_window(16, device=device), return_complex=True).abs()
print(f"= {spectrum.sum().item():.3f} {torch.fft.rfft(signal).abs().max().item():.3f}")
index = torch.tensor([[0, 1, 1], [2, 0, 2]]).to(device)
adjacency = torch.sparse_coo_tensor(index, torch.ones(3, device=device), (3, 3))
features = torch.arange(6.0, device=device).view(3, 2)
print(f"= {torch.sparse.mm(adjacency, features).sum().item():.1f} {torch.zeros(3, 2, device=device).index_add_(0, index[0], features[index[1]]).sum().item():.1f}")
seen = []
model.register_forward_hook(lambda m, i, o: seen.append(o.device.type))
model(x.detach())
assert seen == [device.type]
a = torch.randn(4, 4).to(device)
spd = a @ a.T + torch.eye(4, device=device)
print(f"= {torch.linalg.cholesky(spd).diagonal().sum().item():.3f} {torch.linalg.solve(spd, a).sum().item():.2f}")
