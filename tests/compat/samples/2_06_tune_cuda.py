# 2-yirage.md, python block 6 (CUDA�端优化)
# 高性能GPU (>= 24GB)
yr.set_backend('cuda')
mpk = yr.PersistentKernel(
    num_workers=96,
    num_local_schedulers=48,
    # ... 其他�数
)
