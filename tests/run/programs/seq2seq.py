"""Translation with nn.Transformer, in the manner of the tutorial: masks on the device, greedy decoding afterwards."""

import math

import torch
import torch.nn as nn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
PAD, BOS, EOS, VOCAB = 0, 1, 2, 13


class PositionalEncoding(nn.Module):
    def __init__(self, emb_size, dropout, maxlen=50):
        super().__init__()
        den = torch.exp(-torch.arange(0, emb_size, 2) * math.log(10000) / emb_size)
        pos = torch.arange(0, maxlen).reshape(maxlen, 1)
        pe = torch.zeros((maxlen, emb_size))
        pe[:, 0::2] = torch.sin(pos * den)
        pe[:, 1::2] = torch.cos(pos * den)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pe", pe.unsqueeze(-2))

    def forward(self, x):
        return self.dropout(x + self.pe[: x.size(0), :])


class Seq2Seq(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.transformer = nn.Transformer(
            d_model=size, nhead=4, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=32, dropout=0.0
        )
        self.generator, self.embed, self.size = nn.Linear(size, VOCAB), nn.Embedding(VOCAB, size), size
        self.positions = PositionalEncoding(size, 0.0)

    def tokens(self, x):
        return self.positions(self.embed(x.long()) * math.sqrt(self.size))

    def forward(self, src, trg, src_mask, tgt_mask, src_pad, tgt_pad, mem_pad):
        return self.generator(
            self.transformer(
                self.tokens(src), self.tokens(trg), src_mask, tgt_mask, None, src_pad, tgt_pad, mem_pad
            )
        )


def square_mask(sz):
    mask = (torch.triu(torch.ones((sz, sz), device=DEVICE)) == 1).transpose(0, 1)
    return mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, float(0.0))


model = Seq2Seq()
for p in model.parameters():
    if p.dim() > 1:
        nn.init.xavier_uniform_(p)
model = model.to(DEVICE)
loss_fn = torch.nn.CrossEntropyLoss(ignore_index=PAD)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001, betas=(0.9, 0.98), eps=1e-9)
model.train()
for step in range(3):
    src = torch.randint(3, VOCAB, (6, 4))
    src[4:, 1] = PAD
    tgt = torch.cat([torch.full((1, 4), BOS), src.flip(0), torch.full((1, 4), EOS)])
    src, tgt = src.to(DEVICE), tgt.to(DEVICE)
    tgt_input = tgt[:-1, :]
    src_mask = torch.zeros((6, 6), device=DEVICE).type(torch.bool)
    src_pad, tgt_pad = (src == PAD).transpose(0, 1), (tgt_input == PAD).transpose(0, 1)
    logits = model(src, tgt_input, src_mask, square_mask(tgt_input.size(0)), src_pad, tgt_pad.float().masked_fill(tgt_pad, float("-inf")), src_pad)
    optimizer.zero_grad()
    loss = loss_fn(logits.reshape(-1, logits.shape[-1]), tgt[1:, :].reshape(-1))
    loss.backward()
    optimizer.step()
    print(f"= loss {loss.item():.4f}")
model.eval()
with torch.no_grad():
    source = torch.arange(3, 9).view(-1, 1)
    memory = model.transformer.encoder(model.tokens(source.to(DEVICE)), torch.zeros(6, 6, device=DEVICE).bool())
    ys = torch.ones(1, 1).fill_(BOS).type(torch.long).to(DEVICE)
    for _ in range(3):
        out = model.transformer.decoder(model.tokens(ys), memory.to(DEVICE), square_mask(ys.size(0)).type(torch.float))
        _, next_word = torch.max(model.generator(out.transpose(0, 1)[:, -1]), dim=1)
        ys = torch.cat([ys, torch.ones(1, 1).type_as(source.data).to(DEVICE).fill_(next_word.item())], dim=0)
assert len(ys.cpu().numpy().ravel().tolist()) == 4
