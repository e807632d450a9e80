# 2-yirage.md, python block 6, the device part (CUDA�端优化)
# 高性能GPU (>= 24GB)
yr.set_backend('cuda')
