# 5-virtual-blackwell.md, python block 16 (内��足)
from apt_model.core.system import memory_cleanup
memory_cleanup()
