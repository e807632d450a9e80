# 4-custom-backend.md, python block 0 (custom device)
class CustomDevice:
    def __init__(self, device_type: str = "custom"):
        self.device_type = device_type
        self.index = 0
