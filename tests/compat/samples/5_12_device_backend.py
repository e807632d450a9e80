# 5-virtual-blackwell.md, python block 12 (DeviceBackend类)
backend = DeviceBackend(torch.device('npu:0'))

# 设备信�
backend.is_available()                    # bool
backend.device_count()                    # int
backend.get_device_name(index=0)          # str
backend.get_device_properties(index=0)    # dict

# 内�管�
backend.memory_allocated(index=0)         # bytes
backend.memory_reserved(index=0)          # bytes
backend.max_memory_allocated(index=0)     # bytes
backend.empty_cache()                     # 清�缓�

# Tensor�作
backend.to_device(tensor)                 # 移动到设备
backend.synchronize(index=0)              # ��

# 工具
backend.get_memory_summary()              # dict
