"""What the host's kernel and recorded steps share: portions of prompts, cuts, moves, and a stop that is not lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.text.persistent.test_host import _decoder, _greedy

from anytorch.errors import InputError
from anytorch.text.decoders import Decoder, RecordedSteps, Rows
from anytorch.text.persistent.host import HostKernel

WAYS = {"host": lambda decoder, **options: HostKernel(decoder, threads=2, **options), "recorded": RecordedSteps}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Any:
    return WAYS[request.param]


def _go_on(kernel: Rows, row: int, token: int, count: int) -> list[int]:
    made = [token]
    while len(made) < count:
        kernel.follow(row, made[-1])
        made.append(int(kernel.step()[row].argmax()))
    return made


def _two(decoder: Decoder, way: Any) -> tuple[Rows, dict[int, int]]:
    """Two texts whose first tokens are known: [7, 8, 9] in row 0, [20, 21] in row 1."""
    kernel = way(decoder, rows=3, positions=64)
    return kernel, {row: int(kernel.read(row, ids).argmax()) for row, ids in ((0, [7, 8, 9]), (1, [20, 21]))}


def test_a_prompt_in_portions_is_the_prompt_while_others_go_on(way: Any) -> None:
    decoder = _decoder()
    kernel = way(decoder, rows=2, positions=64)
    other = int(kernel.read(0, [7, 8, 9]).argmax())
    prompt = list(range(30, 41))
    kernel.read(1, prompt[:4])
    kernel.follow(0, other)
    kernel.step()
    kernel.read(1, prompt[4:9], onward=True)
    kernel.follow(0, 5)
    kernel.step()
    token = int(kernel.read(1, prompt[9:], onward=True).argmax())
    assert _go_on(kernel, 1, token, 6) == _greedy(decoder, prompt, 6)
    with pytest.raises(InputError, match="a prompt of 70 tokens: there is room for 1 to 64"):
        kernel.read(1, [1] * (70 - kernel.lengths[1]), onward=True)


def test_a_token_that_was_put_there_can_be_taken_back(way: Any) -> None:
    decoder = _decoder()
    kernel, first = _two(decoder, way)
    kernel.follow(0, 1)  # a wrong one
    kernel.cut(0, 3)
    kernel.follow(1, first[1])
    kernel.step()
    assert kernel.lengths[:2] == [3, 3]
    assert _go_on(kernel, 0, first[0], 5) == _greedy(decoder, [7, 8, 9], 5)


def test_a_text_moves_to_another_row_and_to_another_kernel(way: Any) -> None:
    decoder = _decoder()
    kernel, first = _two(decoder, way)
    kernel.take(2, kernel, 0)
    larger = way(decoder, rows=4, positions=100)
    larger.take(3, kernel, 1)
    kernel.cut(0)
    assert _go_on(kernel, 2, first[0], 5) == _greedy(decoder, [7, 8, 9], 5)
    assert _go_on(larger, 3, first[1], 5) == _greedy(decoder, [20, 21], 5)
    with pytest.raises(InputError, match="a text of 7 tokens: there is room for 2"):
        way(decoder, rows=1, positions=2).take(0, kernel, 2)


def test_a_stop_before_it_begins_is_not_lost_and_holds_once(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = _decoder()
    kernel = way(decoder, rows=2, positions=64)
    plain = _greedy(decoder, [5], 8)
    kernel.stop()
    assert kernel.generate([[5], [6]], 8) == [[], []]
    assert kernel.generate([[5]], 8) == [plain]
    read = kernel._read

    def stopped(*given: Any) -> torch.Tensor:
        kernel.stop()  # by another thread, while the prompt is read
        return read(*given)

    with monkeypatch.context() as patch:
        patch.setattr(kernel, "_read", stopped)
        assert kernel.generate([[5], [6]], 8) == [plain[:1], []]
    assert kernel.generate([[5]], 8) == [plain]


def test_rows_and_tokens_are_checked(way: Any) -> None:
    kernel = way(_decoder(), rows=1, positions=8)
    for call in (lambda: kernel.follow(1, 2), lambda: kernel.cut(-1), lambda: kernel.read(3, [1])):
        with pytest.raises(InputError, match="is not one of 1"):
            call()
    with pytest.raises(InputError, match="token -1 is invalid"):
        kernel.follow(0, -1)


def test_numbers_that_are_none_are_an_error_of_a_row_that_is_asked_for(way: Any) -> None:
    decoder = _decoder()
    decoder.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(ArithmeticError, match="NaN"):
        way(decoder, rows=2, positions=20).generate([[1]], 5)
