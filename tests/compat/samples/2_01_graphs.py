# 2-yirage.md, python block 1 (创建�端特定的图)
# 为���端创建图
cuda_graph = yr.new_kernel_graph(backend='cuda')
cpu_graph = yr.new_kernel_graph(backend='cpu')
mps_graph = yr.new_kernel_graph(backend='mps')
