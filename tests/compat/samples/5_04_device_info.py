# 5-virtual-blackwell.md, python block 4 (1. 设备检测�选择)
from apt_model.core.system import get_device_info

# ��详细设备信�
info = get_device_info()
print(info)
# {
#   'cuda_available': False,
#   'npu_available': True,
#   'device_count': 2,
#   'device_name': 'NPU Ascend 910B',
#   'device_type': 'npu',
#   'npu_version': '5.0.0'
# }
