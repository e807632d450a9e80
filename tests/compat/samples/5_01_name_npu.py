# 5-virtual-blackwell.md, python block 1 (方�2: 显�指定NPU)
from apt_model.core.system import get_device

# 优先使用NPU
device = get_device(prefer_npu=True)
print(device)  # npu:0

# 强制使用CPU
device = get_device(force_cpu=True)
print(device)  # cpu
