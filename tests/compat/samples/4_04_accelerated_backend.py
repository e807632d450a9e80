# 4-custom-backend.md, python block 4 (accelerated backend)
# �能的擴展方�
class GPUAcceleratedBackend:
    def __init__(self):
        self.use_cuda = False
        self.use_opencl = True  # 或者 Vulkan, Metal �

    def matmul(self, a, b):
        if self.use_opencl:
            return opencl_matmul(a, b)
        else:
            return numpy_matmul(a, b)
