# 5-virtual-blackwell.md, python block 5 (2. 内�管�)
from apt_model.core.system import (
    get_memory_info,
    memory_cleanup
)

# ��内�信�（支�NPU）
mem_info = get_memory_info()
print(mem_info)
# {
#   'ram': {...},
#   'vram': {},  # GPU内�（如�有）
#   'npu_memory': {
#     'npu_0': {
#       'allocated_gb': 2.5,
#       'reserved_gb': 3.0,
#       'max_allocated_gb': 2.8
#     }
#   }
# }

# 清�所有设备缓�（GPU + NPU）
memory_cleanup()
