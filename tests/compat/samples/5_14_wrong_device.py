# 5-virtual-blackwell.md, python block 14 (设备类�错误)
# 显�指定设备
device = torch.device('npu:0')
model = model.to(device)

# 或使用prefer_npu
from apt_model.core.system import get_device
device = get_device(prefer_npu=True)
