# 5-virtual-blackwell.md, python block 8
#!/usr/bin/env python3
import torch
import torch.nn as nn
from apt_model.core.system import get_device, set_seed
from apt_model.optimization.npu_backend import get_accelerator_type
import apt_model.optimization.vb_global as vb

# 1. 设置��
set_seed(42)

# 2. ��设备
device = get_device()
print(f"使用设备: {device} ({get_accelerator_type().upper()})")

# 3. �用虚拟Blackwell
vb.enable_balanced_mode()

# 4. 创建模�
class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(768, 3072)
        self.fc2 = nn.Linear(3072, 768)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))

model = MyModel().to(device)

# 5. �练
optimizer = torch.optim.Adam(model.parameters())
criterion = nn.MSELoss()

for epoch in range(10):
    x = torch.randn(32, 768).to(device)
    y = torch.randn(32, 768).to(device)

    output = model(x)
    loss = criterion(output, y)

    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

    print(f"Epoch {epoch+1}: Loss = {loss.item():.4f}")

print("✅ �练完�")
