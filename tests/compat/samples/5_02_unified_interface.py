# 5-virtual-blackwell.md, python block 2 (统一设备��)
from apt_model.optimization.npu_backend import (
    DeviceBackend,
    get_unified_backend,
    is_npu_available,
    get_accelerator_type
)

# 检测加速器类�
accel_type = get_accelerator_type()
print(accel_type)  # 'cuda', 'npu', 或 'cpu'

# NPU�用性检查
if is_npu_available():
    print("NPU�用�")

# ��统一�端
backend = get_unified_backend()
print(backend.device_type)  # 'npu' / 'cuda' / 'cpu'
print(backend.get_device_name())  # 'NPU Ascend 910B'
