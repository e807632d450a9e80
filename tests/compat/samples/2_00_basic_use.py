# 2-yirage.md, python block 0 (基本使用)
import yirage as yr

# 查看�用�端
print("Available backends:", [b.value for b in yr.get_available_backends()])

# 自动选择最佳�端
yr.set_backend('auto')
print("Current backend:", yr.get_backend().value)

# 手动选择�端
yr.set_backend('cuda')  # 或 'cpu', 'mps'
