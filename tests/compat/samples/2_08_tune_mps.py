# 2-yirage.md, python block 8, the device part (MPS�端优化)
# Apple Silicon优化
yr.set_backend('mps')
