# 4-custom-backend.md, python block 2 (basic use)
from pytorch_custom_backend import CustomDevice, CustomTensor, CustomLinear

# 1. 創建�備
device = CustomDevice("custom_gpu")
print(f"Using device: {device}")

# 2. 創建張�
x = CustomTensor([1, 2, 3, 4], device=device)
y = CustomTensor([5, 6, 7, 8], device=device)

# 3. 基本�算
z = x + y  # 加法
w = x * y  # 乘法
print(f"Addition result: {z}")
print(f"Multiplication result: {w}")

# 4. 矩陣�算
a = CustomTensor(np.random.randn(3, 4), device=device)
b = CustomTensor(np.random.randn(4, 2), device=device)
c = a @ b  # 矩陣乘法
print(f"Matrix multiplication: {a.shape} @ {b.shape} = {c.shape}")

# 5. 使用�經網絡層
model = CustomLinear(10, 5)
input_data = CustomTensor(np.random.randn(2, 10), device=device)
output = model(input_data)
print(f"Neural network: {input_data.shape} -> {output.shape}")
