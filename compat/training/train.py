"""Document 5's complete training script. Importing vb_global is what turns the mode of the environment on:

ENABLE_VIRTUAL_BLACKWELL=1 VB_MODE=balanced python training/train.py
"""

import apt_model.optimization.vb_global as vb
import torch
from apt_model.core.system import get_device, set_seed
from apt_model.optimization.npu_backend import get_accelerator_type
from torch import nn

set_seed(42)
device = get_device()
print(f"device: {device} ({get_accelerator_type().upper()}), mode on: {vb.is_enabled()}")

model = nn.Sequential(nn.Linear(768, 3072), nn.ReLU(), nn.Linear(3072, 768)).to(device)
optimizer = torch.optim.Adam(model.parameters())
criterion = nn.MSELoss()
for epoch in range(10):
    x = torch.randn(32, 768).to(device)
    y = torch.randn(32, 768).to(device)
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"Epoch {epoch + 1}: Loss = {loss.item():.4f}")
