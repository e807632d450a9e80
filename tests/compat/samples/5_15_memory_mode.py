# 5-virtual-blackwell.md, python block 15
vb.enable_memory_mode()  # 显�优先模�
