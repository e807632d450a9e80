"""Train the small language model that comes with anytorch, on prose about Python: 3.5 million weights.

python examples/train_writer.py --output src/anytorch/text/generate/tiny

It learns texts of the Python that runs it (examples/python_texts.py), as documents and as questions with answers, and leaves
a folder as the Hugging Face Hub has them: config.json, model.safetensors (bfloat16), tokenizer.json, a chat template.
Twenty-four passes are 45 s on an H200; by then it knows most of the texts by heart. `--passes 4 --batch 4` is for a CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import random
import time
from pathlib import Path
from typing import Any

import torch
from python_texts import Text, texts
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F

from anytorch.devices.choose import resolve
from anytorch.text.decoders import Decoder
from anytorch.text.decoders.spec import read_spec

END, SYSTEM, USER, ASSISTANT = SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "dtype": "bfloat16",
}
LENGTH = SHAPE["max_position_embeddings"]
CHAT = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SEED = 2024
HELD_OUT = 50  # one text in so many is not learned


def as_document(one: Text) -> str:
    return f"{one.name}\n{one.text}{END}"


def as_chat(one: Text) -> str:
    answer = one.text.split("\n")[0] if one.kind == "function" else "\n".join(one.text.split("\n")[:2])
    return f"{USER}{one.question}{END}{ASSISTANT}{answer}{END}"


def learned_tokenizer(found: list[Text]) -> Tokenizer:
    """Pieces of words that the texts are made of; any text can be written with them, byte by byte if need be."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab_size"],
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{one.name}\n{one.text}" for one in found), trainer)
    return tokenizer


def stream_of(found: list[Text], tokenizer: Tokenizer, seed: int) -> torch.Tensor:
    """Documents and chats in a new order, one after the other."""
    wholes = [as_document(one) for one in found] + [as_chat(one) for one in found]
    random.Random(seed).shuffle(wholes)
    return torch.tensor([token for one in tokenizer.encode_batch(wholes) for token in one.ids])


def learning_rate(done: float, most: float) -> float:
    """A short rise, then half a cosine to a tenth."""
    return most * min(1.0, done / 0.02) * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def loss_of(model: Decoder, batch: torch.Tensor) -> torch.Tensor:
    narrow = torch.bfloat16 if batch.device.type == "cuda" else None
    with torch.autocast(batch.device.type, narrow, enabled=narrow is not None):
        logits = model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: Decoder, ids: torch.Tensor, batch: int) -> float:
    windows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    if not len(windows):
        return math.nan
    return sum(float(loss_of(model, some)) * len(some) for some in windows.split(batch)) / len(windows)


def trained(found: list[Text], tokenizer: Tokenizer, options: argparse.Namespace, device: torch.device) -> Any:
    """The model, and what happened on the way."""
    torch.manual_seed(SEED)
    model = Decoder(read_spec(SHAPE, "SHAPE"))
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            deep = name.endswith(("o_proj.weight", "down_proj.weight"))
            torch.nn.init.normal_(weight, std=0.02 / math.sqrt(2 * SHAPE["num_hidden_layers"]) if deep else 0.02)
    model.to(device)
    learned = [one for place, one in enumerate(found) if place % HELD_OUT]
    held_out = stream_of(found[::HELD_OUT], tokenizer, SEED).to(device)
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device.type in ("cpu", "cuda"))
    steps_a_pass = len(stream_of(learned, tokenizer, 0)) // (options.batch * LENGTH)
    total, step, began, losses = options.passes * steps_a_pass, 0, time.perf_counter(), []
    for number in range(options.passes):
        ids = stream_of(learned, tokenizer, SEED + number).to(device)
        ids = ids[: steps_a_pass * options.batch * LENGTH].view(steps_a_pass, options.batch, LENGTH)
        for batch in ids:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step / total, options.rate)
            loss = loss_of(model, batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % 50 == 0:
                losses.append(float(loss.detach()))
                print(f"step {step} of {total}, loss {losses[-1]:.3f}, {time.perf_counter() - began:.0f} s", flush=True)
        print(f"after pass {number + 1}: held out {held_out_loss(model, held_out, options.batch):.3f}", flush=True)
    facts = {"steps": step, "loss": sum(losses[-5:]) / len(losses[-5:]), "tokens_a_pass": ids.numel()}
    facts["held_out_loss"] = held_out_loss(model, held_out, options.batch)
    return model, {**facts, "seconds": round(time.perf_counter() - began)}


def save(model: Decoder, tokenizer: Tokenizer, facts: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in model.named_parameters()}
    save_file({name: one for name, one in state.items() if name != "lm_head.weight"}, folder / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    (folder / "model.safetensors").chmod(0o644)  # it is made for its owner alone
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "bos_token": END,
        "model_max_length": LENGTH,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": list(SPECIAL[1:]),
        "chat_template": CHAT,
    }
    drawn = {"do_sample": True, "temperature": 0.3, "top_p": 0.9}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    for name, body in (
        ("config.json", SHAPE),
        ("tokenizer_config.json", settings),
        ("generation_config.json", {**drawn, **ends}),
        ("trained.json", facts),
    ):
        (folder / name).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def described(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--passes", type=int, default=24)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--save-texts", type=Path, help="write the texts there, for another machine")
    parser.add_argument("--texts", type=Path, help="learn these, and not those of the Python that runs this")
    options = parser.parse_args()
    if options.texts is None:
        found, version = texts(), platform.python_version()
    else:
        given = json.loads(options.texts.read_text("utf-8"))
        found, version = [Text(*one) for one in given["texts"]], given["python"]
    rows = [[one.kind, one.name, one.text] for one in found]
    if options.save_texts:
        options.save_texts.write_text(json.dumps({"python": version, "texts": rows}), "utf-8")
        return
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    device = resolve(None if options.device == "auto" else options.device).device
    tokenizer = learned_tokenizer(found)
    print(f"{len(found)} texts, {sum(len(one.text) for one in found)} letters, on {device}", flush=True)
    model, facts = trained(found, tokenizer, options, device)
    facts |= {"texts": len(found), "texts_of_python": version, "texts_sha256": digest, "passes": options.passes}
    facts |= {"torch": str(torch.__version__), "device": described(device)}
    save(model, tokenizer, {**facts, "batch": options.batch, "rate": options.rate}, options.output)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
