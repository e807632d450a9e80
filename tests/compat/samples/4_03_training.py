# 4-custom-backend.md, python block 3 (training)
import torch
from pytorch_custom_backend import CustomDevice, CustomTensor, CustomLinear, CustomMSELoss

# 創建數據
device = CustomDevice("custom_gpu")
X = CustomTensor(torch.randn(100, 10).numpy(), device=device)
y = CustomTensor(torch.randn(100, 1).numpy(), device=device)

# 創建模�和�失函數
model = CustomLinear(10, 1)
criterion = CustomMSELoss()

# 簡單訓練循環 (概念演示)
learning_rate = 0.01
for epoch in range(10):
    # ��傳�
    predictions = model(X)
    loss = criterion(predictions, y)

    print(f"Epoch {epoch+1}, Loss: {loss.item():.4f}")

    # 注�: 這裡�略了梯度計算和�數更新
    # 實際使用需�實�自動微分
