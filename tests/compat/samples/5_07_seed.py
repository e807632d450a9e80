# 5-virtual-blackwell.md, python block 7 (4. �机��设置)
from apt_model.core.system import set_seed

# �时设置CPU/GPU/NPU��
set_seed(42)
