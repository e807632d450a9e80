"""A whole training step as a CUDA graph, as torch's documentation has it: warm-up on a side stream, capture, replays."""

import torch

assert torch.cuda.is_available()
torch.manual_seed(0)
N, D_in, H, D_out = 8, 6, 5, 3
model = torch.nn.Sequential(torch.nn.Linear(D_in, H), torch.nn.Tanh(), torch.nn.Linear(H, D_out)).cuda()
loss_fn = torch.nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
static_input = torch.randn(N, D_in).cuda()
static_target = torch.randn(N, D_out).cuda()
s = torch.cuda.Stream()
s.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(s):
    for i in range(3):
        optimizer.zero_grad(set_to_none=True)
        y_pred = model(static_input)
        loss = loss_fn(y_pred, static_target)
        loss.backward()
        optimizer.step()
torch.cuda.current_stream().wait_stream(s)
g = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
weight = model[0].weight.detach().clone()
with torch.cuda.graph(g):
    static_y_pred = model(static_input)
    static_loss = loss_fn(static_y_pred, static_target)
    static_loss.backward()
    optimizer.step()
assert torch.equal(weight, model[0].weight), "a capture computes nothing"
for i in range(3):
    static_input.copy_(torch.randn(N, D_in))
    static_target.copy_(torch.randn(N, D_out))
    g.replay()
    print(f"= loss {static_loss.item():.4f}")

# A forward pass alone, and functions that were made graphs.
linear = torch.nn.Linear(4, 4).cuda()
x = torch.zeros(2, 4, device="cuda")
g2 = torch.cuda.CUDAGraph()
with torch.cuda.graph(g2, pool=g.pool()), torch.no_grad():
    y = linear(x) * 2
x.fill_(1)
g2.replay()
assert torch.allclose(y, linear(torch.ones(2, 4, device="cuda")) * 2, atol=1e-5)
graphed = torch.cuda.make_graphed_callables(linear, (torch.ones(2, 4, device="cuda"),))
assert torch.allclose(graphed(x), linear(x))
