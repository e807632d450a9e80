"""Models of transformers in steps over fixed tensors: what is kept and taken back, and what a recording may not do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.text.generate.conftest import make_tokenizer  # noqa: E402
from tests.text.generate.test_families import FAMILIES, generated, tiny, tokens_of  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from anytorch.devices.types import MemoryUse  # noqa: E402
from anytorch.errors import InputError, ModelError, OutOfMemory, UsageError  # noqa: E402
from anytorch.text.decoders import room  # noqa: E402
from anytorch.text.generate.generator import TextGenerator  # noqa: E402
from anytorch.text.generate.kernel import KernelRows, Opened  # noqa: E402
from anytorch.text.generate.model_steps import AheadModelSteps, ModelSteps, Stepped, open_model  # noqa: E402
from anytorch.text.generate.requests import End, TextRequest  # noqa: E402
from anytorch.text.generate.sampling import Sampling  # noqa: E402
from anytorch.text.generate.scheduler import Scheduler  # noqa: E402

KINDS = ["GPT2", "Bloom", "Gemma2", "Mixtral", "Mamba", "Bamba", "FalconH1"]  # one of every kind that is kept
PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name in KINDS:
        made[name] = tmp_path_factory.mktemp(name)
        tiny(name, FAMILIES[name][1], made[name])
    return made


@pytest.fixture(params=KINDS)
def stepped(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Stepped:
    return opened_of(folders[request.param])


def opened_of(folder: Path) -> Stepped:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    with torch.no_grad():
        return Stepped(model, folder)


def wanted_logits(stepped: Stepped, ids: list[int]) -> Any:
    with torch.no_grad():
        return stepped.forward.model(torch.tensor([ids]), use_cache=False).logits[0, -1]


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


def after(ids: list[int], number: int) -> int:
    return (7 * ids[-1] + 11 * number) % 320


def test_every_step_gives_the_logits_of_the_whole_text(stepped: Stepped) -> None:
    """Three rows that begin at different times, past the window and over the places of the first recording."""
    steps = ModelSteps(stepped, 3, 100)
    texts, begins = [PROMPT[:3], PROMPT + PROMPT, PROMPT[:1]], [0, 10, 12]
    for number in range(40):
        for row, text in enumerate(texts):
            if number == begins[row]:
                close(steps.read(row, text), wanted_logits(stepped, text))
        going = [row for row in range(3) if number >= begins[row] and (row or number % 3)]
        for row in going:
            texts[row].append(after(texts[row], number))
            steps.follow(row, texts[row][-1])
        if not going:
            continue
        logits = steps.step()
        for row in going:
            close(logits[row], wanted_logits(stepped, texts[row]))
    steps.cut(1)
    close(steps.read(1, PROMPT), wanted_logits(stepped, PROMPT))


def test_a_step_may_be_run_again_and_taken_back(stepped: Stepped, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, text = ModelSteps(stepped, 2, 64), list(PROMPT)
    run = steps._recorder.run
    monkeypatch.setattr(steps._recorder, "run", lambda shape, work: [run(shape, work) for _ in range(3)][-1])
    steps.read(0, text)
    for number in range(6):
        steps.follow(0, after([3], number))  # a step that fails, and whose token is another one then
        if number % 2:
            steps.step()
        steps.cut(0, len(text))
        text.append(after(text, number))
        steps.follow(0, text[-1])
        close(steps.step()[0], wanted_logits(stepped, text))


def test_a_text_moves_between_rows_and_to_a_longer_kernel(stepped: Stepped) -> None:
    short, text = ModelSteps(stepped, 2, 24), list(PROMPT)
    short.read(1, text)
    for number in range(2):
        text.append(after(text, number))
        short.follow(1, text[-1])
        short.step()
    long = ModelSteps(stepped, 3, 200)
    long.take(2, short, 1)
    long.take(0, long, 2)
    long.cut(2)
    for number in range(20):
        text.append(after(text, number))
        long.follow(0, text[-1])
        close(long.step()[0], wanted_logits(stepped, text))


def test_a_prompt_goes_on_in_portions_only_where_nothing_is_forgotten(folders: dict[str, Path]) -> None:
    steps = ModelSteps(stepped := opened_of(folders["GPT2"]), 2, 64)
    steps.read(1, PROMPT[:7])
    close(steps.read(1, PROMPT[7:], onward=True), wanted_logits(stepped, PROMPT))
    with pytest.raises(InputError, match="room for 1 to 64"):
        steps.read(1, PROMPT * 3, onward=True)
    for name in ("Gemma2", "Mamba"):
        steps = ModelSteps(opened_of(folders[name]), 1, 64)
        steps.read(0, PROMPT[:7])
        with pytest.raises(UsageError, match="reads one as a whole"):
            steps.read(0, PROMPT[7:], onward=True)


def test_a_state_does_not_go_back_further_than_it_was_kept(folders: dict[str, Path]) -> None:
    steps = ModelSteps(opened_of(folders["Mamba"]), 1, 64)
    steps.read(0, PROMPT)
    for token in (3, 4):
        steps.follow(0, token)
        steps.step()
    with pytest.raises(UsageError, match="cannot go back to 20 tokens"):
        steps.cut(0, 20)


class Unasked(TorchDispatchMode):
    """Refuses what a recording cannot hold: numbers that the host reads, and shapes that depend on numbers."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not any(name.startswith(one) for one in self.REFUSED), f"a step reads back: {name}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", KINDS)
def test_a_step_asks_the_host_for_nothing(name: str, folders: dict[str, Path]) -> None:
    stepped = opened_of(folders[name])
    stepped.gathers = stepped.mixes
    steps = AheadModelSteps(stepped, 2, 64)
    steps.read(0, PROMPT)
    steps.follow(0, 3)
    with Unasked():
        steps._computed(*steps._extent())


# --- requests ------------------------------------------------------------------------------------------------------------


def texts_by(opened: Opened, kind: type[ModelSteps], stepped: Stepped) -> list[tuple[list[int], str]]:
    """Six requests, three at once, which come and go: their tokens, and why each ended."""
    made = Opened(opened.model, lambda rows, positions: kind(stepped, rows, positions), "", "", None, opened.needs)
    scheduler = Scheduler(KernelRows(made, 1 << 30), most_at_once=3, most_waiting=9, guard=torch.no_grad)
    asked = [
        (Sampling(), 30), (Sampling(0.9, 0.9, 40), 25), (Sampling(), 7), (Sampling(1.2), 40),
        (Sampling(repetition_penalty=1.2), 12), (Sampling(0.7, 0.8, 5, 1.1), 9),
    ]  # fmt: skip
    requests = [
        TextRequest(PROMPT[: 9 + 2 * row], sampling, count, frozenset([1]), torch.Generator().manual_seed(row))
        for row, (sampling, count) in enumerate(asked)
    ]
    for request in requests:
        scheduler.submit(request)
    found: list[tuple[list[int], str]] = []
    for request in requests:
        while not isinstance(event := request.mailbox.get(), End):
            pass
        assert event.error is None
        found.append((request.tokens[request.prompt_length :], event.reason))
    scheduler.close()
    return found


@pytest.mark.parametrize("name", KINDS)
def test_tokens_that_the_device_chooses_are_those_of_its_logits(name: str, folders: dict[str, Path]) -> None:
    stepped = opened_of(folders[name])
    opened = open_model(stepped.forward.model, folders[name], 512)
    wanted = texts_by(opened, ModelSteps, stepped)
    assert texts_by(opened, AheadModelSteps, stepped) == wanted
    assert any(reason == "length" for _, reason in wanted)


@pytest.mark.parametrize("name", ["GPT2", "Mamba", "Bamba"])
def test_the_job_computes_other_families_in_steps(name: str, folders: dict[str, Path]) -> None:
    tokenizer = make_tokenizer(folders[name])
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[name]).eval()
    prompts = ["The quick brown fox jumps over the lazy dog", "x", "日本語のテキスト"]
    wanted = [generated(model, tokenizer, prompt, 25) for prompt in prompts]
    with TextGenerator(folders[name], device="cpu") as generator:
        with generator._scheduler._changed:  # the worker sees them all at once
            streams = [generator.stream(prompt, max_tokens=25, temperature=0) for prompt in prompts]
        assert [tokens_of(stream) for stream in streams] == wanted
        assert generator.stats.tokens > 1.5 * generator.stats.steps
        one, two = (generator.complete("The", max_tokens=20, temperature=0.9, seed=5).text for _ in range(2))
        assert one == two
        facts = generator.describe()
        assert facts["decoding"] == "ModelSteps" and facts["parameters"] == model.num_parameters()
        assert f"do not support the family {model.config.model_type}" in facts["decoding_why"]
        assert "a step of transformers' own model" in generator.explain() and "not recorded" in generator.explain()


def test_a_text_that_does_not_fit_says_what_would(folders: dict[str, Path]) -> None:
    for name, each in (("GPT2", 2 * 2 * 32 * 4), ("Gemma2", 2 * 16 * 4)):
        model = opened_of(folders[name]).forward.model
        opened = open_model(model, folders[name], 512)
        rows = KernelRows(opened, opened.needs.nbytes(40))
        assert opened.needs.nbytes(401) - opened.needs.nbytes(400) == each  # a window of 16 is full by then
        request = TextRequest(PROMPT, Sampling(), 300, frozenset(), torch.Generator())
        with pytest.raises(OutOfMemory, match=r"20 \+ 300 tokens need .*which is 40 tokens") as caught:
            rows.read(request, 512)
        assert "max_tokens=20" in caught.value.hint


def test_rows_that_do_not_fit_say_what_would(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = opened_of(folders["Gemma2"])
    monkeypatch.setattr(room, "memory", lambda device: MemoryUse(free=2 * stepped.needs(None).nbytes(300)))
    with pytest.raises(OutOfMemory, match=r"2 rows of 301 positions need .* room for 300 positions of each"):
        ModelSteps(stepped, 2, 301)
    ModelSteps(stepped, 2, 300)


def test_states_are_the_same_however_long_a_text_is(folders: dict[str, Path]) -> None:
    with TextGenerator(folders["Mamba"], device="cpu") as generator:
        assert generator.max_length is None and generator.describe()["cache_nbytes_per_token"] == 0
        generator.complete([5, 6, 7], max_tokens=5, temperature=0)
        made = generator._scheduler._way._kernel  # type: ignore[attr-defined]
        generator.complete([5, 6, 7] * 100, max_tokens=900, temperature=0)
        assert generator._scheduler._way._kernel is made  # type: ignore[attr-defined]


def test_a_model_whose_steps_give_something_else_is_computed_op_by_op(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = ModelSteps._computed
    monkeypatch.setattr(ModelSteps, "_computed", lambda self, rows, places: compute(self, rows, places) * 1.01)
    make_tokenizer(folders["Bloom"])
    with TextGenerator(folders["Bloom"], device="cpu") as generator:
        facts = generator.describe()
        assert facts["decoding"] == "transformers"
        assert "do not support the family bloom" in facts["decoding_why"] and "other logits" in facts["decoding_why"]
        assert generator.complete("The", max_tokens=3, temperature=0).completion_tokens == 3


def test_wide_logits_of_short_floats_are_compared_as_what_they_are(folders: dict[str, Path]) -> None:
    """Mamba in bfloat16 gives float32 logits: they are as far apart as bfloat16 makes them."""
    with TextGenerator(folders["Mamba"], device="cpu", dtype="bfloat16") as generator:
        facts = generator.describe()
        logits = generator.model(input_ids=torch.tensor([[1, 2]])).logits
    assert logits.dtype == torch.float32 and facts["decoding"] == "ModelSteps", facts["decoding_why"]


def test_a_step_that_fails_leaves_the_model_to_transformers(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise NotImplementedError("no such op\nand more lines")

    model = opened_of(folders["GPT2"]).forward.model
    monkeypatch.setattr(ModelSteps, "_computed", fails)
    with pytest.raises(ModelError, match=r"its step over fixed tensors fails: NotImplementedError: no such op$"):
        open_model(model, folders["GPT2"], 512)


def test_angles_that_follow_the_longest_text_share_no_step(tmp_path: Path) -> None:
    """transformers takes them by the largest position beside: a row's logits would depend on its neighbours."""
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
             "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 16}
    long = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    phi = transformers.Phi3Config(**sizes, original_max_position_embeddings=16, rope_parameters=long)
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "partial_rotary_factor": 1.0}
    neox = transformers.GPTNeoXConfig(**sizes, rope_parameters=dynamic)
    for config, kind in ((phi, transformers.Phi3ForCausalLM), (neox, transformers.GPTNeoXForCausalLM)):
        with torch.no_grad(), pytest.raises(ModelError, match=r"(longrope|dynamic).*longest text"):
            Stepped(kind(config).eval(), tmp_path)


@pytest.mark.parametrize("name", ["GPT2", "Mamba"])
def test_a_mode_leaves_the_jobs_models_alone(name: str, folders: dict[str, Path]) -> None:
    import anytorch

    with TextGenerator(folders[name], device="cpu") as generator:
        wanted = generator.complete("a b", max_tokens=6, temperature=0).text
        with anytorch.use(cpu_dtype="bfloat16"), anytorch.mode("memory", device="cpu") as mode:
            assert generator.complete("a b", max_tokens=6, temperature=0).text == wanted
            assert mode.describe()["models"] == []
