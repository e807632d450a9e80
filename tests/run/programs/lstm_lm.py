"""A language model of the older kind: LSTM, packed sequences, hidden states cut from their history, clipped gradients."""

import torch
import torch.nn as nn
from torch.autograd import Variable
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

torch.manual_seed(7)
use_cuda = torch.cuda.is_available()
if use_cuda:
    torch.cuda.manual_seed_all(7)
    torch.backends.cudnn.deterministic = True


class RNNModel(nn.Module):
    def __init__(self, ntoken=11, ninp=8, nhid=12, nlayers=2):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp, padding_idx=0)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, batch_first=True, bidirectional=True)
        self.decoder = nn.Linear(2 * nhid, ntoken)
        self.nlayers, self.nhid = nlayers, nhid

    def init_hidden(self, bsz):
        weight = next(self.parameters()).data
        return (
            Variable(weight.new(2 * self.nlayers, bsz, self.nhid).zero_()),
            Variable(weight.new(2 * self.nlayers, bsz, self.nhid).zero_()),
        )

    def forward(self, x, lengths, hidden):
        self.rnn.flatten_parameters()
        packed = pack_padded_sequence(self.encoder(x), lengths, batch_first=True, enforce_sorted=False)
        out, hidden = self.rnn(packed, hidden)
        out, _ = pad_packed_sequence(out, batch_first=True)
        return self.decoder(out), hidden


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


model = RNNModel()
if use_cuda:
    model.cuda()
criterion, lr = nn.CrossEntropyLoss(ignore_index=0), 1.0
hidden = model.init_hidden(4)
for step in range(3):
    sequences = [torch.randint(1, 11, (n,)) for n in (5, 3, 6, 2)]
    lengths = torch.tensor([len(s) for s in sequences])
    data = pad_sequence(sequences, batch_first=True)
    if use_cuda:
        data = data.cuda()
    hidden = repackage_hidden(hidden)
    model.zero_grad()
    output, hidden = model(data, lengths, hidden)
    loss = criterion(output.reshape(-1, 11), data.reshape(-1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for p in model.parameters():
        if p.grad is not None:
            p.data.add_(p.grad.data, alpha=-lr)
    print(f"= loss {loss.item():.4f}")
assert hidden[0].is_cuda == use_cuda
