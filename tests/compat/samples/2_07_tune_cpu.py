# 2-yirage.md, python block 7, the device part (CPU�端优化)
import os

# 设置OpenMP线程数
os.environ['OMP_NUM_THREADS'] = str(os.cpu_count())

yr.set_backend('cpu')
