# 4-custom-backend.md, python block 6 (custom adam)
class CustomAdam:
    def __init__(self, parameters, lr=0.001):
        self.parameters = parameters
        self.lr = lr
        self.m = {}  # 一�矩
        self.v = {}  # 二�矩

    def step(self):
        # Adam更新�輯
        pass
