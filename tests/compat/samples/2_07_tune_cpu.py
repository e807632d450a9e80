# 2-yirage.md, python block 7 (CPU�端优化)
import os

# 设置OpenMP线程数
os.environ['OMP_NUM_THREADS'] = str(os.cpu_count())

yr.set_backend('cpu')
mpk = yr.PersistentKernel(
    num_workers=8,
    num_local_schedulers=4,
    # ... 其他�数
)
