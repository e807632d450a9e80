"""A small DDPM: a schedule on the device, time embeddings, an average of the weights, sampling with a generator."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
T = 20
betas = torch.linspace(1e-4, 0.02, T, device=device)
alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)


def timestep_embedding(t, dim):
    freqs = torch.exp(-math.log(10000) * torch.arange(dim // 2, device=t.device) / (dim // 2))
    args = t[:, None].float() * freqs[None]
    return torch.cat([args.cos(), args.sin()], dim=-1)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(2, c), nn.Conv2d(c, 3 * c, 1), nn.Conv2d(c, c, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, 2, c // 2, h * w).unbind(1)
        attn = torch.einsum("bhcn,bhcm->bhnm", q, k).mul(c**-0.5).softmax(-1)
        return x + self.out(torch.einsum("bhnm,bhcm->bhcn", attn, v).reshape(b, c, h, w))


class UNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, c), nn.SiLU(), nn.Linear(c, c))
        self.i, self.down, self.attn = nn.Conv2d(1, c, 3, padding=1), nn.Conv2d(c, c, 3, 2, 1), Attention(c)
        self.o = nn.Conv2d(2 * c, 1, 3, padding=1)

    def forward(self, x, t):
        h = F.silu(self.i(x) + self.time(timestep_embedding(t, 16))[:, :, None, None])
        d = self.attn(self.down(h))
        return self.o(torch.cat([h, F.interpolate(d, scale_factor=2, mode="nearest")], 1))


model = UNet().to(device)
ema = copy.deepcopy(model).eval().requires_grad_(False)
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
generator = torch.Generator("cpu").manual_seed(1)
for step in range(3):
    x = torch.rand(4, 1, 8, 8, generator=generator).to(device)
    t = torch.randint(0, T, (4,), generator=generator).to(device)
    noise = torch.randn(x.shape, generator=generator).to(device)
    a = alphas_cumprod[t].view(-1, 1, 1, 1)
    loss = F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for p, q in zip(ema.parameters(), model.parameters()):
            p.lerp_(q, 0.1)
    print(f"= loss {loss.item():.4f}")
with torch.inference_mode():
    g = torch.Generator(device=device).manual_seed(0)
    x = torch.randn(2, 1, 8, 8, generator=g, device=device)
    for i in reversed(range(T)):
        t = torch.full((2,), i, device=device, dtype=torch.long)
        eps = ema(x, t)
        x = (x - betas[i] / (1 - alphas_cumprod[i]).sqrt() * eps) / (1 - betas[i]).sqrt()
        if i:
            x += betas[i].sqrt() * torch.randn_like(x)
images = (x.clamp(-1, 1) + 1) / 2 * 255
assert images.cpu().permute(0, 2, 3, 1).to(torch.uint8).numpy().shape == (2, 8, 8, 1)
