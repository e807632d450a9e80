# 2-yirage.md, python block 10 (常�问题)
# 检查内�使用
memory_info = yr.get_memory_info(yr.get_backend().value)
print("Memory status:", memory_info)

# �少批次大�或工作线程数
