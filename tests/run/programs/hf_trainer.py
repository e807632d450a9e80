"""A Hugging Face Trainer on a small GPT-2 of random weights: evaluation, saving, resuming, generating."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
config = GPT2Config(
    vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0
)


class Tokens(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(count)
        self.rows = torch.randint(0, 64, (count, 12), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        max_steps=4,
        logging_steps=1,
        save_steps=2,
        report_to=[],
        learning_rate=1e-2,
        seed=0,
        disable_tqdm=True,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        dataloader_pin_memory=True,
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Tokens(32), eval_dataset=Tokens(8))
    assert (arguments.device.type == "cuda") == torch.cuda.is_available(), arguments.device
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"= loss {entry['loss']:.4f}")
    print(f"= eval {trainer.evaluate()['eval_loss']:.4f}")
    again = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Tokens(32))
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    print(f"= resumed {again.state.log_history[-2]['loss']:.4f}")
    model = trainer.model.eval()
    out = model.generate(torch.tensor([[1, 2, 3]], device=model.device), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert out.shape[1] <= 8 and out.is_cuda == torch.cuda.is_available()
