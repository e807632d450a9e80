# 5-virtual-blackwell.md, python block 3 (设备管�器)
from apt_model.optimization.npu_backend import get_device_manager

# ��全局设备管�器
manager = get_device_manager()

# 列出所有设备
devices = manager.get_all_devices()
# [device(type='npu', index=0), device(type='npu', index=1), device(type='cpu')]

# ��最佳设备
best_device = manager.get_best_device(prefer_npu=True)
print(best_device)  # npu:0

# 设备摘�
summary = manager.get_device_summary()
print(summary)
# {
#   'total_devices': 3,
#   'cuda_devices': 0,
#   'npu_devices': 2,
#   'devices': {
#     'npu:0': {'device_name': 'NPU Ascend 910B', ...}
#   }
# }
