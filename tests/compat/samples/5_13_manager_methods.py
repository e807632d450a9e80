# 5-virtual-blackwell.md, python block 13 (UnifiedDeviceManager类)
manager = get_device_manager()

# 设备查询
manager.get_all_devices()                 # List[torch.device]
manager.get_best_device(prefer_npu=False) # torch.device
manager.get_backend(device)               # DeviceBackend

# 摘�信�
manager.get_device_summary()              # dict

# 清�
manager.cleanup_all()                     # 清�所有设备缓�
