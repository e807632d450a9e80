"""Choosing tokens: the distributions that were asked for, by counting."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from anytorch.text.generate.sampling import Sampling, defaults_of, next_token, penalised  # noqa: E402

LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


def counts(sampling: Sampling, number: int = 2000) -> Counter[int]:
    random = torch.Generator().manual_seed(3)
    return Counter(next_token(LOGITS, sampling, [], random) for _ in range(number))


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
        random = torch.Generator().manual_seed(1)
        found = {next_token(logits, Sampling(temperature=1.0, top_p=top_p), [], random) for _ in range(3000)}
        assert found <= set(kept.nonzero()[:, 0].tolist())


def test_penalised_tokens_are_less_likely_whatever_their_sign() -> None:
    found = penalised(torch.tensor([2.0, -2.0, 1.0]), [0, 1, 0], 2.0)
    assert found.tolist() == [1.0, -4.0, 1.0]


def test_defaults_come_from_the_models_own_file() -> None:
    own = SimpleNamespace(do_sample=True, temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)
    assert defaults_of(own) == Sampling(0.6, 0.95, 20, 1.1)
    assert defaults_of(SimpleNamespace(do_sample=False, temperature=0.6, repetition_penalty=None)) == Sampling()
    assert defaults_of(SimpleNamespace(do_sample=True, temperature=None)).temperature == 1.0
