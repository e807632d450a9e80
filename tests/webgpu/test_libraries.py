"""accelerate and transformers on this device without being told: what they choose, and a real run of `Trainer`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

# Both orders: who imports accelerate first, and who imports the device first.
FIRST = "import anytorch.webgpu\n"
LAST = (
    "import accelerate, accelerate.utils, transformers\nfrom transformers import Trainer, TrainingArguments\n" + FIRST
)

CHOSEN = """
import torch, accelerate
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import get_max_memory
from transformers import TrainingArguments
here = Accelerator()
prepared = here.prepare(torch.nn.Linear(4, 4))
answer(
    accelerator=str(here.device), prepared=str(prepared.weight.device),
    cpu=str(AcceleratorState._reset_state(True) or Accelerator(cpu=True).device),
    arguments=str(TrainingArguments(output_dir="out", report_to=[]).device),
    on_cpu=str(TrainingArguments(output_dir="out", report_to=[], use_cpu=True).device),
    memory=[str(name) for name in get_max_memory()], asked=[str(name) for name in get_max_memory({"cpu": 2**30})],
)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "imports", [FIRST, pytest.param(LAST, marks=pytest.mark.slow)], ids=["device first", "device last"]
)
def test_what_is_chosen(imports: str, webgpu: Any, run_script: Callable[..., Any], tmp_path: Path) -> None:
    found = run_script(f"import os; os.chdir({str(tmp_path)!r})\n{imports}{CHOSEN}")
    assert found == {
        "accelerator": "webgpu:0", "prepared": "webgpu:0", "cpu": "cpu", "arguments": "webgpu:0", "on_cpu": "cpu",
        "memory": ["0", "cpu"], "asked": ["cpu"],
    }  # fmt: skip


TRAINED = """
import anytorch.webgpu
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, TextClassificationPipeline
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
rows = [{"input_ids": torch.tensor([3, 4, 5, 6, 7, 8]), "labels": torch.tensor([3, 4, 5, 6, 7, 8])} for _ in range(8)]

def losses(use_cpu):
    torch.manual_seed(0)
    made = TrainingArguments(
        output_dir="out", per_device_train_batch_size=4, max_steps=4, learning_rate=0.05, logging_steps=1, report_to=[],
        save_strategy="steps", save_steps=2, disable_tqdm=True, use_cpu=use_cpu, seed=0, lr_scheduler_type="constant",
    )
    trainer = Trainer(LlamaForCausalLM(config), made, train_dataset=rows)
    trainer.train()
    where = {str(parameter.device) for parameter in trainer.model.parameters()}
    return [log["loss"] for log in trainer.state.log_history if "loss" in log], sorted(where), trainer

(ours, where, trainer), (plain, there, _) = losses(False), losses(True)
again = LlamaForCausalLM.from_pretrained("out/checkpoint-4", device_map="auto")
ids = torch.tensor([[3, 4, 5]])
written = again.generate(ids.to(again.device), max_new_tokens=2, do_sample=False)
expected = LlamaForCausalLM.from_pretrained("out/checkpoint-4").generate(ids, max_new_tokens=2, do_sample=False)
answer(ours=ours, plain=plain, where=where, there=there, mapped=str(again.device), written=written.cpu().tolist(),
       expected=expected.tolist())
"""


@pytest.mark.slow
def test_a_real_run_of_the_trainer(webgpu: Any, run_script: Callable[..., Any], tmp_path: Path) -> None:
    found = run_script(f"import os; os.chdir({str(tmp_path)!r})\n{TRAINED}", env={"ANYTORCH_WEBGPU_FALLBACK": "silent"})
    assert found["where"] == ["webgpu:0"] and found["there"] == ["cpu"] and found["mapped"] == "webgpu:0"
    assert found["ours"] == pytest.approx(found["plain"], rel=2e-3) and found["ours"][-1] < found["ours"][0]
    assert found["written"] == found["expected"], "read back onto the device, it writes what it writes on the CPU"


PIPED = """
import anytorch.webgpu
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast, pipeline
open("vocab.txt", "w").write("\\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]))
tokenizer = BertTokenizerFast("vocab.txt")
config = BertConfig(vocab_size=7, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
model = BertForSequenceClassification(config).eval()
used = {}
for name, device in (("none", None), ("number", 0), ("cpu", "cpu"), ("minus", -1)):
    asked = {} if device is None else {"device": device}
    piped = pipeline("text-classification", model=model, tokenizer=tokenizer, **asked)
    used[name] = [str(piped.device), str(next(piped.model.parameters()).device), round(piped("good")[0]["score"], 3)]
    model.to("cpu")
answer(**used)
"""


@pytest.mark.slow
def test_a_pipeline_takes_a_number(webgpu: Any, run_script: Callable[..., Any], tmp_path: Path) -> None:
    found = run_script(f"import os; os.chdir({str(tmp_path)!r})\n{PIPED}", env={"ANYTORCH_WEBGPU_FALLBACK": "silent"})
    assert [found[name][:2] for name in ("none", "number")] == [["webgpu:0", "webgpu:0"]] * 2
    assert [found[name][:2] for name in ("cpu", "minus")] == [["cpu", "cpu"]] * 2
    assert len({entry[2] for entry in found.values()}) == 1, "the same answer everywhere"
