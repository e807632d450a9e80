"""A whole text in one launch: tokens that the decoder would choose, on a GPU of NVIDIA from compute capability 9.0 on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch

from anytorch.errors import InputError
from anytorch.text.decoders import Decoder, RecordedSteps
from anytorch.text.decoders.choosing import Choice, Points, chosen
from anytorch.text.decoders.spec import read_spec
from anytorch.text.persistent import trace
from anytorch.text.persistent.cuda import CudaKernel, refusal
from anytorch.text.persistent.cuda_weights import PackedDecoder, row_of, unpacked_rows
from anytorch.text.persistent.fused import FusedSteps, steps_for
from anytorch.text.persistent.kernel import PersistentKernel
from anytorch.text.persistent.launched import LaunchedSteps, rows_for
from anytorch.text.persistent.panels import rounded

pytestmark = pytest.mark.device

SMALL: dict[str, Any] = {
    "vocab_size": 1003,
    "hidden_size": 264,
    "intermediate_size": 520,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "head_dim": 256, "attention_bias": True, "mlp_bias": True},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 70, "head_dim": 64},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "head_dim": 128},
    "qwen3": {"model_type": "qwen3", "head_dim": 64, "num_attention_heads": 14},
}


def decoder_on(device: torch.device, name: str, dtype: torch.dtype) -> Decoder:
    torch.manual_seed(2)
    decoder = Decoder(read_spec({**SMALL, **FAMILIES[name]}, "a config.json")).eval().requires_grad_(False)
    for parameter_name, parameter in decoder.named_parameters():
        spread = 1.0 if parameter.dim() == 1 or "embed" in parameter_name else parameter.shape[-1] ** -0.5
        parameter.data.normal_(1.0 if "norm" in parameter_name else 0.0, 0.3 if parameter.dim() == 1 else spread)
    return decoder.to(device, dtype)


@pytest.fixture
def gpu(accelerator: Any, missing: Callable[[str, str], NoReturn]) -> torch.device:
    spec = read_spec({**SMALL, **FAMILIES["qwen3"]}, "a config.json")
    if why := refusal(spec, torch.bfloat16, accelerator):
        missing("hopper", why)
    device: torch.device = accelerator
    return device


def check(decoder: Decoder, ids: list[int], made: list[int]) -> None:
    """Every token is, by float32, as good as rounding to the decoder's dtype lets one tell."""
    wide = Decoder(decoder.spec).eval().requires_grad_(False).to(decoder.lm_head.weight.device)
    wide.load_state_dict(decoder.state_dict())
    whole = [ids + made[:-1]]
    truth, own = (one(whole)[0, len(ids) - 1 :].float() for one in (wide, decoder))
    chosen = truth[torch.arange(len(made)), torch.tensor(made)]
    rounding = (truth - own).abs().max()
    assert float((truth.amax(-1) - chosen).max()) <= 2 * float(rounding) < 0.5 * float(truth.std())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_the_decoders(gpu: torch.device, name: str, dtype: torch.dtype) -> None:
    decoder = decoder_on(gpu, name, dtype)
    kernel = CudaKernel(decoder, positions=400)
    for ids in ([5], list(range(3, 90))):
        made = kernel.generate(ids, 200)
        assert len(made) == 200
        check(decoder, ids, made)
    assert kernel.generate([5], 200) == kernel.generate([5], 200)


def test_a_long_text_is_split_among_many_blocks(gpu: torch.device) -> None:
    """From a few splits that everybody joins to many that one block joins, on the way."""
    decoder = decoder_on(gpu, "qwen2", torch.bfloat16)
    ids = torch.randint(0, 1003, (2000,), generator=torch.Generator().manual_seed(1)).tolist()
    made = CudaKernel(decoder, positions=2200).generate(ids, 150)
    assert len(made) == 150
    check(decoder, ids, made)


def test_ends_room_and_a_wish_to_stop(gpu: torch.device) -> None:
    kernel = CudaKernel(decoder_on(gpu, "qwen3", torch.bfloat16), positions=120)
    every = kernel.generate([7, 8], 60)
    end = every[40]
    assert kernel.generate([7, 8], 60, ends=[end, 1002]) == every[: every.index(end)]
    assert len(kernel.generate([7, 8], 1000)) == 119  # the last one needs no place
    some = kernel.stream([7, 8], 118)
    assert [next(some), next(some)] == every[:2]
    some.close()  # in the middle
    assert kernel.generate([7, 8], 60) == every
    with pytest.raises(InputError, match="room for 1 to 120"):
        kernel.generate([1] * 121, 3)


def test_a_thousand_launches(gpu: torch.device) -> None:
    kernel = CudaKernel(decoder_on(gpu, "mistral with a window", torch.float16), positions=100)
    want = kernel.generate([3, 4, 5], 8)
    kernel.read([3, 4, 5])
    for _ in range(1000):
        kernel.length = 3
        assert list(kernel.follow(want[0], 7)) == want[1:]


def test_a_model_that_computes_no_numbers_is_said(gpu: torch.device) -> None:
    decoder = decoder_on(gpu, "llama", torch.bfloat16)
    kernel = CudaKernel(decoder, positions=50)
    kernel.read([1, 2])
    dict(decoder.named_parameters())["model.layers.1.mlp.down_proj.weight"].data[0, 0] = torch.inf
    with pytest.raises(ArithmeticError, match="NaN or infinity"):
        list(kernel.follow(3, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_several_texts_by_recorded_steps_of_our_kernels(gpu: torch.device, name: str, dtype: torch.dtype) -> None:
    decoder = decoder_on(gpu, name, dtype)
    steps, why = steps_for(decoder, 5, 400)
    assert isinstance(steps, FusedSteps), why
    prompts = [list(range(3, 3 + count)) for count in (1, 40, 90, 2, 300)]
    for some in (prompts, prompts[2:3]):
        for ids, made in zip(some, steps.generate(some, 90), strict=True):
            assert len(made) == 90
            check(decoder, ids, made)
    assert not steps.recorded and steps._recorder.recordings


def test_what_was_recorded_outlives_another_kernel_of_the_same_decoder(gpu: torch.device) -> None:
    """A second kernel lays weights out anew: what the first one recorded reads the old ones."""
    decoder = decoder_on(gpu, "qwen2", torch.bfloat16)
    steps, _ = steps_for(decoder, 2, 200)
    wanted = steps.generate([[5], [7, 8]], 40)
    kernel = CudaKernel(decoder, positions=200)
    torch.cuda.empty_cache()
    rubbish = [torch.full((1 << 20,), float("nan"), device=gpu) for _ in range(64)]
    assert steps.generate([[5], [7, 8]], 40) == wanted and len(kernel.generate([5], 40)) == 40 and rubbish


def test_a_persistent_kernel_of_several_rows(gpu: torch.device) -> None:
    decoder = decoder_on(gpu, "qwen3", torch.bfloat16)
    kernel = PersistentKernel.from_model(decoder, 200, rows=3)
    assert "our own kernels" in kernel.explain()
    for ids, made in zip([[5], [6, 7]], kernel.generate([[5], [6, 7]], 50), strict=True):
        check(decoder, ids, made)


# --- texts that come and go ----------------------------------------------------------------------------------------------


def launched_steps(decoder: Decoder, rows: int, positions: int) -> LaunchedSteps:
    steps, why = rows_for(decoder, rows, positions)
    assert isinstance(steps, LaunchedSteps), why
    return steps


def test_a_text_changes_between_one_launch_and_steps(gpu: torch.device) -> None:
    """Alone it is launched; beside another both take steps, ahead of the host; closed anywhere, it goes on as it should."""
    decoder = decoder_on(gpu, "qwen3", torch.bfloat16)
    steps = launched_steps(decoder, 4, 300)
    prompts = [list(range(3, 40)), [7, 8, 9]]
    texts = [[int(steps.read(row, ids).argmax())] for row, ids in enumerate(prompts)]
    for rows, count in (([0], 20), ([0, 1], 15), ([1], 30), ([0, 1], 5), ([0], 1), ([0], 12)):
        for row in rows:
            steps.follow(row, texts[row][-1])
        flow = steps.tokens(rows, [Choice(most=100)] * len(rows))
        for _ in range(count):
            for row, token in zip(rows, next(flow), strict=True):
                texts[row].append(token)
        flow.close()
        for row in rows:
            assert steps.lengths[row] == len(prompts[row]) + len(texts[row]) - 1
    for ids, made in zip(prompts, texts, strict=True):
        assert len(made) > 50
        check(decoder, ids, made)
    assert not steps.recorded


def test_the_end_of_a_text_is_given_and_no_more_than_is_wanted(gpu: torch.device) -> None:
    steps = launched_steps(decoder_on(gpu, "qwen2", torch.float16), 1, 200)
    first = int(steps.read(0, [5, 6]).argmax())
    steps.follow(0, first)
    every = [one for (one,) in steps.tokens([0], [Choice(most=40)])]
    assert len(every) == 40 and steps.lengths == [42]
    end = every[25]
    steps.cut(0, 2)
    steps.follow(0, first)
    assert [one for (one,) in steps.tokens([0], [Choice(ends=(end,))])] == every[: every.index(end) + 1]


def test_chance_decides_on_the_device_as_it_does_on_the_host(gpu: torch.device) -> None:
    decoder = decoder_on(gpu, "qwen3", torch.bfloat16)
    steps = FusedSteps(decoder, 4, 200)
    asked = [(0.8, 20, 0.9), (1.5, 40, 1.0), (0.0, 0, 1.0), (0.7, 0, 0.8)]
    for among in (asked[:3], asked):  # by a few candidates, and by the whole vocabulary
        points = [Points(torch.Generator().manual_seed(row)) for row in range(len(among))]
        choices = [Choice(*one, points=own.ahead) for one, own in zip(among, points, strict=True)]
        for row in range(len(among)):
            steps.read(row, [row + 3, 5])
            steps.follow(row, 9)
        ids = [[row + 3, 5, 9] for row in range(len(among))]
        for made in steps.tokens(range(len(among)), choices):
            for row, token in enumerate(made):
                logits = decoder([ids[row]])[0, -1].float()
                # Rounding may turn a choice at the edge between two tokens: what was chosen must be a likely one.
                order = logits.argsort(descending=True).tolist()
                assert order.index(token) < (among[row][1] or 400) + 3 if among[row][0] else 5
                ids[row].append(token)
                points[row].take()
            if len(ids[0]) == 40:
                break
    point = torch.rand(3, dtype=torch.float64)
    logits = torch.randn(3, 1003)
    given = [torch.tensor([1.0, 0.7, 0.0]), torch.tensor([50, 0, 0]), torch.tensor([0.9, 0.8, 1.0]).double(), point]
    on_device = chosen(logits.to(gpu), 1003, *(one.to(gpu) for one in given))
    assert on_device.tolist() == chosen(logits, 1003, *given).tolist()


# --- packed weights ------------------------------------------------------------------------------------------------------


def rounding_as(decoder: Decoder, packed: PackedDecoder) -> tuple[Decoder, Decoder]:
    """Float32 decoders with what packed weights stand for: with their inputs as they are, and rounded as the kernel does it.
    The decoder itself gets these weights, too: it reads the prompts."""
    packed.lend(decoder)
    made = []
    for with_rounding in (False, True):
        wide = Decoder(decoder.spec).eval().requires_grad_(False).to(decoder.lm_head.weight.device)
        wide.lm_head.weight = torch.nn.Parameter(wide.lm_head.weight.clone(), False)  # not the words', if they were one
        wide.load_state_dict(decoder.state_dict())
        rows, scale = packed.matrices["head"]
        wide.lm_head.weight = torch.nn.Parameter(
            unpacked_rows(rows, scale, row_of(decoder.spec.width, packed.bits)), False
        )
        if with_rounding:
            for one in wide.modules():
                if isinstance(one, torch.nn.Linear):
                    one.register_forward_pre_hook(lambda _, given: (rounded(given[0]),))
        made.append(wide)
    return made[0], made[1]


@pytest.mark.parametrize(
    ("name", "weights"), [*zip(FAMILIES, ("int8", "int4", "int4", "int8"), strict=True), ("qwen3", "int4")]
)
def test_tokens_by_packed_weights(gpu: torch.device, name: str, weights: Any) -> None:
    decoder = decoder_on(gpu, name, torch.bfloat16)
    packed = PackedDecoder(decoder, weights)
    plain, with_rounding = rounding_as(decoder, packed)
    kernel = CudaKernel(decoder, positions=300, weights=packed)
    for ids in ([5], list(range(3, 90))):
        made = kernel.generate(ids, 120)
        whole = [ids + made[:-1]]
        truth, rough, own = (one(whole)[0, len(ids) - 1 :].float() for one in (plain, with_rounding, decoder))
        chosen_ones = truth[torch.arange(len(made)), torch.tensor(made)]
        rounding = float((truth - rough).abs().max() + (truth - own).abs().max())
        assert float((truth.amax(-1) - chosen_ones).max()) <= 1.5 * rounding < 1.5 * float(truth.std())
    kernel.length = 1
    list(kernel.follow(7, 1))
    by = (kernel.logits - with_rounding([[3, 7]])[0, -1]).norm() / kernel.logits.norm()
    assert float(by) < 0.05


# --- how it is ended, and how long it may be -----------------------------------------------------------------------------


def test_a_long_context(gpu: torch.device) -> None:
    """32,768 tokens: logits of the launch beside torch's step, which reads the same keys and values."""
    torch.manual_seed(2)
    spec = read_spec({**SMALL, **FAMILIES["qwen3"], "max_position_embeddings": 40_960}, "a config.json")
    decoder = Decoder(spec).eval().requires_grad_(False).to(gpu, torch.bfloat16)
    steps = RecordedSteps(decoder, 1, 32_800)
    ids = torch.randint(0, 1003, (32_768,), generator=torch.Generator().manual_seed(1)).tolist()
    steps.read(0, ids)
    kernel = CudaKernel(decoder, kept=steps.kept)
    made = list(kernel.launched(0, 9, len(ids), 1, ()))
    steps.follow(0, 9)
    wanted = steps.step()[0].float()
    assert float((kernel.logits - wanted).norm() / wanted.norm()) < 0.05
    assert float(wanted.max() - wanted[made[0]]) < 0.1 * float(wanted.std())


def test_a_launch_that_is_cancelled_leaves_the_device_usable(gpu: torch.device) -> None:
    decoder = decoder_on(gpu, "llama", torch.bfloat16)
    steps = launched_steps(decoder, 2, 4000)
    first = int(steps.read(0, [3, 4]).argmax())
    for stop_after in (1, 5, 50):
        steps.cut(0, 2)
        steps.follow(0, first)
        flow = steps.tokens([0], [Choice()])
        made = [next(flow)[0] for _ in range(stop_after)]
        flow.close()
        torch.cuda.synchronize(gpu)
        assert steps.lengths[0] == 2 + stop_after and float(torch.ones(8, device=gpu).sum()) == 8
        check(decoder, [3, 4], [first, *made])


def test_a_trace_of_a_launch(gpu: torch.device) -> None:
    kernel = CudaKernel(decoder_on(gpu, "qwen3", torch.bfloat16), positions=100, profile=True)
    assert len(kernel.generate([3, 4], 30)) == 30
    assert kernel.marks is not None
    found = list(trace.spans(kernel.marks))
    assert len(found) == kernel.blocks * (3 * trace.MARKS + 1)
    assert all(0 <= end - begin < 1_000_000 for *_, begin, end in found)
