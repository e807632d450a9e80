"""Programs from the years before torch.device: Variable, typed tensors, .cuda() by a switch, default tensor types."""

import numpy as np
import torch
from torch.autograd import Variable

cuda = torch.cuda.is_available()
torch.manual_seed(2)
FloatTensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor
LongTensor = torch.cuda.LongTensor if cuda else torch.LongTensor
Tensor = FloatTensor
dtype = torch.cuda.FloatTensor if cuda else torch.FloatTensor
w1 = Variable(torch.randn(6, 5).type(dtype), requires_grad=True)
w2 = Variable(torch.randn(5, 2).type(dtype), requires_grad=True)
x = Variable(Tensor(np.linspace(-1, 1, 24).reshape(4, 6)))
target = Variable(LongTensor([0, 1, 0, 1]), requires_grad=False)
valid = Variable(Tensor(4, 1).fill_(1.0), requires_grad=False)
for t in range(3):
    out = x.mm(w1).clamp(min=0).mm(w2)
    loss = torch.nn.functional.cross_entropy(out, target) + (valid - 1).sum()
    loss.backward()
    w1.data -= 0.1 * w1.grad.data
    w2.data -= 0.1 * w2.grad.data
    w1.grad.data.zero_()
    w2.grad.data.zero_()
    print(f"= {loss.data.item():.4f}")
z = Variable(FloatTensor(np.random.RandomState(0).normal(0, 1, (2, 3))))
assert z.data.cpu().numpy().shape == (2, 3) and z.type() == ("torch.cuda.FloatTensor" if cuda else "torch.FloatTensor")
assert isinstance(z.data, FloatTensor) and (z.get_device() == 0 if cuda else True)
eye = torch.eye(3).type(FloatTensor).type_as(w1)
mask = torch.cuda.ByteTensor(3).zero_() if cuda else torch.ByteTensor(3).zero_()
assert mask.sum().item() == 0 and eye.sum().item() == 3
if cuda:
    assert torch.cuda.FloatTensor([1, 2]).tolist() == [1, 2] and torch.cuda.LongTensor(2, 3).shape == (2, 3)
    assert z.new(2, 2).is_cuda and z.new([1.0]).is_cuda and z.new_zeros(2).is_cuda
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    assert torch.ones(2).is_cuda and torch.nn.Linear(2, 2).weight.is_cuda and torch.tensor([1.0]).device.type == "cuda"
    torch.set_default_tensor_type("torch.FloatTensor")
    assert not torch.ones(2).is_cuda
    torch.cuda.set_device(0)
    with torch.cuda.device_of(z):
        assert torch.cuda.current_device() == 0
