# 2-yirage.md, python block 9 (常�问题)
# 检查�用�端
available = yr.get_available_backends()
print(f"Available: {[b.value for b in available]}")

# 使用自动选择
yr.set_backend('auto')
