# 5-virtual-blackwell.md, python block 6
from apt_model.optimization.vgpu_stack import create_vgpu_stack

# 自动创建NPU堆�
stack = create_vgpu_stack()

# NPU�置示例：
# Level 0: npu:0 - 2000MB @ 600.0GB/s  （NPU HBM）
# Level 1: cpu - 8000MB @ 40.0GB/s     （CPU内�）
# Level 2: ssd - 32000MB @ 7.0GB/s     （NVMe）
