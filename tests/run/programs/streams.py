"""Copies beside the work on a stream of their own, in the manner of NVIDIA's prefetcher; events that measure."""

import torch

assert torch.cuda.is_available()
torch.manual_seed(0)


class data_prefetcher:
    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream()
        self.mean = torch.tensor([0.485 * 255]).cuda().view(1, 1)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = self.next_target = None
            return
        with torch.cuda.stream(self.stream):
            self.next_input = self.next_input.cuda(non_blocking=True)
            self.next_target = self.next_target.cuda(non_blocking=True)
            self.next_input = self.next_input.float().sub_(self.mean)

    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        input, target = self.next_input, self.next_target
        if input is not None:
            input.record_stream(torch.cuda.current_stream())
            target.record_stream(torch.cuda.current_stream())
        self.preload()
        return input, target


loader = [(torch.full((2, 3), float(i)).pin_memory(), torch.tensor([i])) for i in range(3)]
prefetcher = data_prefetcher(loader)
seen = []
input, target = prefetcher.next()
while input is not None:
    seen.append((input.mean().item(), target.item()))
    input, target = prefetcher.next()
assert [t for _, t in seen] == [0, 1, 2] and abs(seen[1][0] - (1 - 0.485 * 255)) < 1e-3

start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
s1, s2 = torch.cuda.Stream(priority=-1), torch.cuda.Stream(device="cuda:0")
start.record()
a = torch.randn(64, 64, device="cuda")
with torch.cuda.stream(s1):
    b = a @ a
    done = s1.record_event()
s2.wait_event(done)
with torch.cuda.stream(s2):
    assert torch.cuda.current_stream() == s2
    c = b + 1
s2.synchronize()
end.record(torch.cuda.current_stream())
torch.cuda.synchronize(device=torch.device("cuda:0"))
assert start.elapsed_time(end) > 0 and end.query() and s1.query()
assert torch.allclose(c.cpu(), a.cpu() @ a.cpu() + 1, atol=1e-3)
assert torch.cuda.default_stream() == torch.cuda.current_stream() and isinstance(torch.cuda.current_stream().cuda_stream, int)
with torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream()):
    pass
print("= streams 1.0")
