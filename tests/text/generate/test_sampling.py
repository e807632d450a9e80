"""Choosing tokens: the distributions that were asked for, by counting."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from anytorch.text.decoders.choosing import Choice, Points, candidates_of, chosen  # noqa: E402
from anytorch.text.generate.sampling import Sampling, defaults_of, next_token, penalised, unheeded  # noqa: E402

LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


def counts(sampling: Sampling, number: int = 2000) -> Counter[int]:
    points = Points(torch.Generator().manual_seed(3))
    return Counter(next_token(LOGITS, sampling, [], points) for _ in range(number))


def test_greedy_takes_the_most_likely() -> None:
    assert counts(Sampling(), 5) == {0: 5}


def test_temperature_one_gives_the_models_own_distribution() -> None:
    found = counts(Sampling(temperature=1.0))
    for token, share in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert found[token] / 2000 == pytest.approx(share, abs=0.04)


def test_a_low_temperature_sharpens_and_a_high_one_flattens() -> None:
    assert counts(Sampling(temperature=0.3))[0] > 1600
    assert counts(Sampling(temperature=5.0))[3] > 250


def test_top_k_and_top_p_leave_only_the_most_likely() -> None:
    assert set(counts(Sampling(temperature=1.0, top_k=2))) == {0, 1}
    assert set(counts(Sampling(temperature=1.0, top_p=0.75))) == {0, 1}
    assert set(counts(Sampling(temperature=1.0, top_p=0.81))) == {0, 1, 2}
    assert set(counts(Sampling(temperature=1.0, top_p=0.01))) == {0}
    assert counts(Sampling(temperature=1.0, top_k=2))[0] / 2000 == pytest.approx(0.625, abs=0.04)


def test_top_p_keeps_what_transformers_keeps() -> None:
    from transformers.generation.logits_process import TopPLogitsWarper

    torch.manual_seed(0)
    for top_p in (0.1, 0.5, 0.9, 0.99):
        logits = torch.randn(50) * 3
        kept = torch.isfinite(TopPLogitsWarper(top_p)(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0])
        points = Points(torch.Generator().manual_seed(1))
        found = {next_token(logits, Sampling(temperature=1.0, top_p=top_p), [], points) for _ in range(3000)}
        assert found <= set(kept.nonzero()[:, 0].tolist())


def test_penalised_tokens_are_less_likely_whatever_their_sign() -> None:
    found = penalised(torch.tensor([2.0, -2.0, 1.0]), [0, 1, 0], 2.0)
    assert found.tolist() == [1.0, -4.0, 1.0]


def test_a_temperature_too_small_for_float32_takes_the_most_likely() -> None:
    """The quotients were infinite, and the least likely token was taken."""
    for temperature in (1e-38, 1e-44, 1e-60):
        for logits in (
            torch.tensor([1.0, 30.0, 2.0]),
            torch.tensor([-3.0, -1.0, -2.0]),
            torch.tensor([-1.0, 0.0, -5.0]),
        ):
            points = Points(torch.Generator().manual_seed(3))
            after = points.ahead(2)[1]
            assert next_token(logits, Sampling(temperature=temperature), [], points) == 1
            assert points.take() == after


def test_the_smallest_penalty_makes_no_number_of_zero() -> None:
    assert penalised(torch.tensor([0.0, 1.0]), [0], 1e-60).tolist() == [0.0, 1.0]


def test_defaults_come_from_the_models_own_file() -> None:
    own = SimpleNamespace(do_sample=True, temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)
    assert defaults_of(own) == Sampling(0.6, 0.95, 20, 1.1)
    assert defaults_of(SimpleNamespace(do_sample=False, temperature=0.6, repetition_penalty=None)) == Sampling()
    assert defaults_of(SimpleNamespace(do_sample=True, temperature=None)).temperature == 1.0
    assert counts(defaults_of(SimpleNamespace(do_sample=True, top_p=0.0)), 50) == {0: 50}


def test_what_a_models_file_asks_for_in_vain_is_known() -> None:
    own = {"no_repeat_ngram_size": 3, "num_beams": 1, "min_p": 0.1, "suppress_tokens": [7], "guidance_scale": None}
    assert unheeded(SimpleNamespace(do_sample=False, **own)) == ["no_repeat_ngram_size=3", "suppress_tokens=[7]"]
    assert unheeded(SimpleNamespace(do_sample=True, min_p=0.1, typical_p=1.0)) == ["min_p=0.1"]
    (shown,) = unheeded(SimpleNamespace(bad_words_ids=[[n] for n in range(100)]))
    assert len(shown) < 60 and shown.endswith("…")


def test_random_numbers_can_be_looked_at_before_they_are_used_up() -> None:
    points = Points(torch.Generator().manual_seed(7))
    random = torch.Generator().manual_seed(7)
    wanted = [float(torch.rand((), generator=random, dtype=torch.float64)) for _ in range(5)]
    assert points.ahead(3) == wanted[:3] and points.take() == wanted[0]
    assert points.ahead(2) == wanted[1:3] and [points.take() for _ in range(4)] == wanted[1:]


@pytest.mark.parametrize("candidates", ["few", "all"])
def test_the_choice_for_all_rows_at_once_is_the_one_for_each(candidates: str) -> None:
    """Greedy rows beside others, by a few candidates where every top_k allows it, and by the whole vocabulary."""
    torch.manual_seed(1)
    asked = [Sampling(), Sampling(0.7, 0.9, 40), Sampling(1.3, 1.0, 5), Sampling(2.0, 0.3, 64), Sampling(0.01, 0.9, 2)]
    if candidates == "all":
        asked += [Sampling(1.0), Sampling(0.8, 0.95)]
    logits = torch.randn(len(asked), 300) * 3
    count = candidates_of([Choice(one.temperature, one.top_k, one.top_p) for one in asked], 300)
    assert count == (64 if candidates == "few" else 300)
    given = [torch.tensor([getattr(one, name) for one in asked]) for name in ("temperature", "top_k", "top_p")]
    found: set[tuple[int, ...]] = set()
    for turn in range(60):
        points = [Points(torch.Generator().manual_seed(100 * turn + row)) for row in range(len(asked))]
        point = torch.tensor([one.ahead(1)[0] for one in points], dtype=torch.float64)
        made = chosen(logits, count, given[0], given[1], given[2].double(), point).tolist()
        assert made == [next_token(logits[row], one, [], points[row]) for row, one in enumerate(asked)]
        found.add(tuple(made))
    assert len(found) > 10


def test_greedy_rows_need_one_candidate_and_numbers() -> None:
    assert candidates_of([Choice(), Choice()], 300) == 1 and candidates_of([Choice(1.0, 3000)], 300) == 300
    logits = torch.tensor([[1.0, 3.0, 3.0], [torch.nan, 0.0, 1.0], [0.0, torch.inf, 1.0]])
    nothing = torch.zeros(3)
    assert chosen(logits, 1, nothing, nothing, nothing, nothing).tolist() == [1, -2, -2]
    assert chosen(logits, 3, nothing, nothing, nothing, nothing).tolist() == [1, -2, -2]
