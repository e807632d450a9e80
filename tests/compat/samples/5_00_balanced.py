# 5-virtual-blackwell.md, python block 0
import apt_model.optimization.vb_global as vb

# 自动检测并使用最佳设备（NPU/GPU/CPU）
vb.enable_balanced_mode()

# 输出示例：
# ?��� 虚拟Blackwell已全局�用
# 加速设备:        ?��� �为昇腾NPU
# FP4�化:         � �用
# Flash Attention: ✅ �用
# ...
