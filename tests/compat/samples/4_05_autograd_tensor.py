# 4-custom-backend.md, python block 5 (autograd tensor)
class AutogradTensor(CustomTensor):
    def __init__(self, data, requires_grad=False):
        super().__init__(data)
        self.requires_grad = requires_grad
        self.grad = None
        self.grad_fn = None

    def backward(self):
        # 實���傳�
        pass
