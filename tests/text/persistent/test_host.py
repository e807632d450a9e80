"""The token loop in C++: greedy tokens of the plain decoder, for every family, dtype, number of rows and of threads."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from anytorch.errors import InputError, UsageError
from anytorch.text.decoders import Decoder
from anytorch.text.decoders.spec import read_spec
from anytorch.text.persistent.host import HostKernel

SMALL: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 36,  # no multiple of a vector
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 700,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "head_dim": 10, "attention_bias": True, "mlp_bias": True},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 9, "head_dim": 32},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "head_dim": 18},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
}


def _decoder(name: str = "qwen3", dtype: torch.dtype = torch.float32) -> Decoder:
    torch.manual_seed(2)
    decoder = Decoder(read_spec({**SMALL, **FAMILIES[name]}, "a config.json")).eval()
    for parameter in decoder.parameters():
        parameter.data.normal_(0, 0.3)
    return decoder.requires_grad_(False).to(dtype)


def _greedy(decoder: Decoder, ids: list[int], count: int) -> list[int]:
    """With the decoder in float32, by a cache of its own."""
    wide = Decoder(decoder.spec).eval().requires_grad_(False)
    wide.load_state_dict(decoder.state_dict())
    kept = wide.new_cache(1, len(ids) + count)
    made: list[int] = []
    given = [ids]
    for _ in range(count):
        made.append(int(wide(given, kept)[0, -1].argmax()))
        given = [[made[-1]]]
    return made


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_the_plain_decoders(name: str, threads: int) -> None:
    decoder = _decoder(name)
    prompts = [[3, 1, 4, 1, 5], [9, 2], list(range(40)), [7], [8, 8, 8], [60]]
    kernel = HostKernel(decoder, rows=6, positions=90, threads=threads)
    assert kernel.generate(prompts, 40) == [_greedy(decoder, ids, 40) for ids in prompts]
    assert kernel.generate([prompts[1]], 4) == [_greedy(decoder, prompts[1], 4)], "rows are used again"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_half_weights_are_near_float32s(dtype: torch.dtype) -> None:
    decoder = _decoder(dtype=dtype)
    kernel = HostKernel(decoder, positions=40, threads=2)
    wide = Decoder(decoder.spec).eval().requires_grad_(False)
    wide.load_state_dict(decoder.state_dict())
    ids = [5, 6, 7, 8, 9, 10, 11]
    kernel.read(0, ids[:3])
    for place in range(3, 7):
        kernel.follow(0, ids[place])
        found = kernel.step()[0]
        # The prompt's keys are torch's, rounded at every op; ours are rounded when they are kept.
        truth, plain = wide([ids[: place + 1]])[0, -1], decoder([ids[: place + 1]])[0, -1].float()
        assert (found - truth).abs().max() <= 1.5 * (plain - truth).abs().max()


def test_contexts_that_are_cut_into_parts_and_threads_give_the_same_bits() -> None:
    """From 256 positions on, several workers share a head's context."""
    decoder = _decoder()
    ids = torch.randint(0, 67, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    found = {}
    for threads in (1, 2, 8):
        kernel = HostKernel(decoder, positions=440, threads=threads)
        kernel.read(0, ids[:-1])
        kernel.follow(0, ids[-1])
        found[threads] = kernel.step()[0].clone()
    truth = decoder([ids])[0, -1]
    for logits in found.values():
        torch.testing.assert_close(logits, truth, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[1], found[2]), "two key heads for two workers: no part is cut"
    assert HostKernel(decoder, positions=500, threads=8).generate([ids], 40) == [_greedy(decoder, ids, 40)]


def test_rows_join_and_leave_without_a_trace_on_the_others() -> None:
    decoder = _decoder()
    alone = HostKernel(decoder, positions=64, threads=2)
    both = HostKernel(decoder, rows=3, positions=64, threads=2)
    first = int(alone.read(0, [7, 8, 9]).argmax())
    assert int(both.read(1, [7, 8, 9]).argmax()) == first
    alone.follow(0, first)
    both.follow(1, first)
    both.read(2, [1, 2])
    both.follow(2, 5)
    expected = alone.step()[0].clone()
    torch.testing.assert_close(both.step()[1], expected, rtol=1e-5, atol=1e-5)
    alone.follow(0, 3)
    both.follow(1, 3)  # row 2 has left
    torch.testing.assert_close(both.step()[1], alone.step()[0], rtol=1e-5, atol=1e-5)


def test_texts_end_at_an_end_at_the_limit_and_when_a_row_is_full() -> None:
    decoder = _decoder()
    plain = _greedy(decoder, [5], 12)
    end = plain[4]
    kernel = HostKernel(decoder, positions=10, threads=2)
    assert kernel.generate([[5]], 8, ends={end}) == [plain[: plain.index(end)]]
    assert kernel.generate([[5]], 3) == [plain[:3]]
    assert kernel.generate([[5]], 1) == [plain[:1]] and kernel.generate([[5]], 0) == [[]]
    assert kernel.generate([[5]], 99) == [plain[:10]]
    assert kernel.done == 9 and kernel.lengths == [10]
    two = HostKernel(decoder, rows=2, positions=10, threads=2)
    assert two.generate([[5, 6, 7], [5]], 3, ends={int(two.read(0, [5, 6, 7]).argmax())})[0] == []
    assert two.lengths[0] == 3, "a text that has ended at once is as long as its prompt"


def test_another_thread_can_stop_it_and_none_can_use_it_meanwhile() -> None:
    decoder = _decoder()
    kernel = HostKernel(decoder, positions=700, threads=1)
    refused: list[Exception] = []

    def look_on() -> None:
        while kernel.done < 2:  # 1 is the prompt's, after which nobody computes for a moment
            pass
        try:
            kernel.step()
        except UsageError as exc:
            refused.append(exc)
        kernel.stop()

    watcher = threading.Thread(target=look_on)
    watcher.start()
    (made,) = kernel.generate([[5]], 690)
    watcher.join()
    assert made == _greedy(decoder, [5], 690)[: len(made)]
    if len(made) == 690:  # it was done before the watcher looked
        kernel.generate([[5]], 1)  # takes a stop that came too late
    else:
        assert refused
    assert kernel.generate([[5]], 3) == [made[:3]], "it can be used again"


@pytest.mark.parametrize(("call_s", "sizes"), [(10.0, [1] * 38), (0.1, [1, 5, 5, 5, 5, 5, 5, 5, 2]), (0.0, [1, 37])])
def test_a_long_text_is_computed_in_calls_that_ctrl_c_gets_between(
    call_s: float, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = _decoder()
    plain, other = _greedy(decoder, [5], 39), _greedy(decoder, [7, 8], 39)
    kernel, calls = HostKernel(decoder, rows=2, positions=60, threads=2), []
    ahead, now = kernel.ahead, [0.0]

    def counted(rows: Sequence[int], steps: int, *given: Any, **more: Any) -> list[list[int]]:
        calls.append(steps)
        if interrupted and len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        now[0] += call_s * steps
        return ahead(rows, steps, *given, **more)

    monkeypatch.setattr(kernel, "ahead", counted)
    monkeypatch.setattr("anytorch.text.persistent.host.time.perf_counter", lambda: now[0])
    interrupted = False
    assert kernel.generate([[5], [7, 8]], 39) == [plain, other]
    assert calls == sizes and kernel.done == 38 and kernel.lengths == [39, 40]
    interrupted = True
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        kernel.generate([[5]], 39)
    interrupted = False
    end = plain[20]
    assert kernel.generate([[5]], 39, ends={end}) == [plain[: plain.index(end)]], "it can be used again"
    assert kernel.generate([[5] * 30], 99) == [_greedy(decoder, [5] * 30, 31)], "until the row is full"


ALIKE = """
import os, resource, sys, threading
from tests.text.persistent.test_host import _decoder, _greedy
from anytorch.text.persistent.host import HostKernel

decoder = _decoder()
expected = _greedy(decoder, [5], 30)

def right(threads=3):
    return HostKernel(decoder, positions=40, threads=threads).generate([[5]], 30) == [expected]

"""
PLIGHTS = {
    "a child of a process whose workers wait": """
if not right():
    sys.exit("the parent's tokens are wrong")
child = os.fork()
if not child:
    os._exit(0 if right() and right(5) else 1)
if os.waitpid(child, 0)[1] or not right():
    sys.exit("tokens differ after a fork")
""",
    "a system that gives no more threads": """
right(2)
taken = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) << 10
resource.setrlimit(resource.RLIMIT_AS, (taken + (96 << 20),) * 2)
before = len(os.listdir("/proc/self/task"))
if not right(64):
    sys.exit("tokens differ with fewer threads")
added = len(os.listdir("/proc/self/task")) - before
if not added < 62:
    sys.exit(f"the limit did not hold: {added} more threads")
""",
    "four at once, of different sizes": """
found = []
def some(threads):
    found.extend(right(threads) for _ in range(5))
callers = [threading.Thread(target=some, args=(1 + number,)) for number in range(4)]
for one in callers: one.start()
for one in callers: one.join()
if found != [True] * 20:
    sys.exit(f"tokens differ: {found}")
""",
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("plight", PLIGHTS)
def test_workers_that_stay_between_calls_serve_in_any_plight(plight: str) -> None:
    done = subprocess.run([sys.executable, "-c", ALIKE + PLIGHTS[plight]], capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr


@pytest.mark.parametrize(
    "where", ["norm", "layers.0.self_attn.k_norm", "layers.1.self_attn.q_norm", "layers.0.mlp.up_proj"]
)
def test_numbers_that_are_none_are_an_error(where: str) -> None:
    decoder = _decoder()
    decoder.model.get_submodule(where).weight.data.fill_(torch.nan)
    with pytest.raises(ArithmeticError, match="NaN"):
        HostKernel(decoder, positions=20, threads=2).generate([[1]], 5)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 8), (6, 2, 20), (8, 2, 64), (5, 1, 128), (14, 2, 144)])
def test_heads_of_every_width_and_number_are_weighed_over_several_blocks(heads: int, kv_heads: int, width: int) -> None:
    config = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width, "num_hidden_layers": 1}
    torch.manual_seed(4)
    decoder = Decoder(read_spec({**SMALL, **FAMILIES["qwen3"], **config}, "a config.json")).eval().requires_grad_(False)
    for parameter in decoder.parameters():
        parameter.data.normal_(0, 0.3)
    exact = copy.deepcopy(decoder).double()
    ids = torch.randint(0, 60, (150,)).tolist()  # two whole blocks of 64 and a part of one
    kernel = HostKernel(decoder, positions=160, threads=2)
    kernel.read(0, ids[:1])
    for place in range(1, len(ids)):
        kernel.follow(0, ids[place])
        found = kernel.step()[0].clone()
        if place in (1, 7, 63, 64, 65, 127, 128, 149):
            torch.testing.assert_close(found.double(), exact([ids[: place + 1]])[0, -1], rtol=1e-4, atol=1e-4)


def test_what_cannot_be_computed_is_refused() -> None:
    decoder = _decoder()
    with pytest.raises(UsageError, match=r"torch.float64 on cpu"):
        HostKernel(_decoder(dtype=torch.float64))
    for options in ({"rows": 0}, {"threads": 40_000}):
        with pytest.raises(UsageError, match="use 1 to 1,024"):
            HostKernel(decoder, **options)
    kernel = HostKernel(decoder, positions=8)
    for ids, said in (([], "0 tokens"), ([1] * 9, "9 tokens")):
        with pytest.raises(InputError, match=said):
            kernel.read(0, ids)
    kernel.read(0, [1] * 7)
    with pytest.raises(InputError, match="token 67 is invalid: ids go from 0 to 66"):
        kernel.follow(0, 67)
    kernel.follow(0, 66)
    with pytest.raises(InputError, match="row 0 is full"):
        kernel.follow(0, 3)
    with pytest.raises(InputError, match="2 prompts: there is room for 1"):
        kernel.generate([[1], [2]], 3)
