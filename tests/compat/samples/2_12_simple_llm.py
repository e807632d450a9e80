# 2-yirage.md, python block 12 (简�的LLM��)
import yirage as yr
import torch

# 自动�置
yr.set_backend('auto')
print(f"Using backend: {yr.get_backend().value}")

# 创建模拟的LLM组件
batch_size, seq_len, hidden_size = 1, 128, 768

# 输入数�
input_ids = torch.randint(0, 32000, (batch_size, seq_len))
embeddings = torch.randn(batch_size, seq_len, hidden_size)

# 简�的��传�
def simple_forward(x):
    # Layer norm
    x = torch.layer_norm(x, (hidden_size,))
    
    # Linear transformation
    weight = torch.randn(hidden_size, hidden_size)
    x = torch.matmul(x, weight)
    
    # Activation
    x = torch.relu(x)
    
    return x

# 执行��
with torch.no_grad():
    output = simple_forward(embeddings)
    print(f"Output shape: {output.shape}")
    print(f"Backend used: {yr.get_backend().value}")
