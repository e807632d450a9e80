# 2-yirage.md, python block 3 (自动�置优化)
# 自动检测最优�置
config = yr.auto_configure_backend()
print("Optimal config:", config)

# 系统信�分�
optimizer = yr.BackendOptimizer()
optimizer.print_system_info()
