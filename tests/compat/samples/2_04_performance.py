# 2-yirage.md, python block 4 (性能监�)
# ��内�使用信�
memory_info = yr.get_memory_info('cuda')
print("Memory usage:", memory_info)

# 快速性能基准测试
results = yr.benchmark_backends(duration_seconds=10)
print("Performance results:", results)
