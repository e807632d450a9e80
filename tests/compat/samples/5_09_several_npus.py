# 5-virtual-blackwell.md, python block 9 (NPU多��练)
from apt_model.optimization.npu_backend import get_device_manager

manager = get_device_manager()

# ��所有NPU设备
npu_devices = [d for d in manager.get_all_devices()
               if d.type == 'npu']

if len(npu_devices) > 1:
    print(f"检测到{len(npu_devices)}个NPU设备")

    # 使用DataParallel
    model = nn.DataParallel(model, device_ids=[0, 1])
else:
    print("�NPU模�")
