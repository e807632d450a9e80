# 4-custom-backend.md, python block 1 (custom tensor)
class CustomTensor:
    def __init__(self, data, device=None, dtype=None):
        self.data = np.array(data, dtype=dtype or np.float32)
        self.device = device or CustomDevice()
        self.dtype = self.data.dtype
        self.shape = self.data.shape
