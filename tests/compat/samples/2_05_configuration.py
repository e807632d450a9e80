# 2-yirage.md, python block 5 (�置管�)
# ��优化�置
optimizer = yr.BackendOptimizer()
optimizer.save_config('optimal_config.json', backend='cuda')

# 加载�置
config = optimizer.load_config('optimal_config.json')
