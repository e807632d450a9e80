"""Mixed precision, gradient accumulation and a schedule, in the manner of many training scripts."""

from contextlib import nullcontext

import torch
import torch.nn as nn
from torch.cuda.amp import GradScaler, autocast

torch.manual_seed(3)
device = "cuda" if torch.cuda.is_available() else "cpu"
device_type = "cuda" if "cuda" in device else "cpu"
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}["bfloat16"]
ctx = nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type=device_type, dtype=torch.float32)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), fused=False)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=4)
scaler = GradScaler(enabled=torch.cuda.is_available())
accumulation = 2
for step in range(6):
    x, y = torch.randn(4, 8).to(device), torch.randn(4, 1).to(device)
    with ctx:
        loss = nn.functional.mse_loss(model(x), y) / accumulation
    scaler.scale(loss).backward()
    if (step + 1) % accumulation == 0:
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        print(f"= loss {loss.item() * accumulation:.4f} norm {norm.item():.3f} lr {scheduler.get_last_lr()[0]:.5f}")
state = scaler.state_dict()
scaler.load_state_dict(state)
with autocast(enabled=torch.cuda.is_available(), dtype=ptdtype):
    half = model(x)
if torch.cuda.is_available():
    assert half.dtype == ptdtype and scaler.get_scale() == 65536.0 and torch.is_autocast_enabled() is False
    with torch.cuda.amp.autocast():
        assert torch.is_autocast_enabled() and torch.get_autocast_gpu_dtype() == torch.float16
print(f"= half {half.float().mean().item():.1f}")
# A gradient that overflows is left out, and the scale halves.
if torch.cuda.is_available():
    before = [p.detach().clone() for p in model.parameters()]
    (scaler.scale(model(x).sum()) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters())) and scaler.get_scale() == 32768.0
