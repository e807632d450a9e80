# 2-yirage.md, python block 8 (MPS�端优化)
# Apple Silicon优化
yr.set_backend('mps')
mpk = yr.PersistentKernel(
    num_workers=64,
    num_local_schedulers=32,
    # ... 其他�数
)
