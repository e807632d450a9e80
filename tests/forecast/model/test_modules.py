"""The modules against the published code's numbers: ids exact, logits and values within 1e-5, gradients too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from anytorch.errors import InputError
from anytorch.forecast.model.model import FixedEmbedding, TimeEmbedding

CONFIGS = ("a", "b")


def close(found: torch.Tensor, wanted: np.ndarray, atol: float = 1e-5, rtol: float = 1e-5) -> None:
    np.testing.assert_allclose(found.detach().numpy(), wanted, atol=atol, rtol=rtol)


@pytest.fixture(params=CONFIGS)
def parts(request: pytest.FixtureRequest, golden: Any) -> Any:
    config = request.param
    arrays = {name: torch.from_numpy(value) for name, value in golden.case(f"{config}_module").items()}
    return golden.tokenizer(config), golden.model(config), arrays


@torch.inference_mode()
def test_ids_of_both_kinds(parts: Any) -> None:
    tokenizer, _, case = parts
    s1, s2 = tokenizer.encode(case["x_norm"], half=True)
    assert torch.equal(s1, case["enc_s1"]) and torch.equal(s2, case["enc_s2"])
    assert torch.equal(tokenizer.encode(case["x_norm"]), case["enc_full"])


@torch.inference_mode()
def test_decoding(parts: Any) -> None:
    tokenizer, _, case = parts
    pair = [case["enc_s1"], case["enc_s2"]]
    close(tokenizer.indices_to_bits(pair, half=True), case["bits"].numpy())
    close(tokenizer.decode(pair, half=True), case["dec_half"].numpy())
    close(tokenizer.decode(case["enc_full"]), case["dec_full"].numpy())


@torch.inference_mode()
def test_tokenizer_forward(parts: Any) -> None:
    tokenizer, _, case = parts
    (coarse, whole), loss, code, index = tokenizer(case["x_norm"])
    close(coarse, case["tok_fwd_z_pre"].numpy())
    close(whole, case["tok_fwd_z"].numpy())
    close(loss, case["tok_fwd_bsq_loss"].numpy())
    close(code, case["tok_fwd_quantized"].numpy())
    assert torch.equal(index, case["tok_fwd_indices"])


@torch.inference_mode()
def test_embeddings(parts: Any) -> None:
    _, model, case = parts
    close(model.embedding((case["enc_s1"][:, :-1], case["enc_s2"][:, :-1])), case["emb"].numpy())
    close(model.time_emb(case["stamp"][:, :-1]), case["time_emb"].numpy())


@torch.inference_mode()
def test_teacher_forced_logits_in_eval_mode(parts: Any) -> None:
    """As published: rotary on, and not causal in the s2 path."""
    _, model, case = parts
    s1, s2 = case["enc_s1"], case["enc_s2"]
    first, second = model(s1[:, :-1], s2[:, :-1], case["stamp"][:, :-1], use_teacher_forcing=True, s1_targets=s1[:, 1:])
    close(first, case["tf_eval_s1_logits"].numpy(), atol=2e-5)
    close(second, case["tf_eval_s2_logits"].numpy(), atol=2e-5)
    close(torch.stack(model.head.compute_loss(first, second, s1[:, 1:], s2[:, 1:])), case["tf_eval_loss"].numpy())


@torch.inference_mode()
def test_generation_steps(parts: Any) -> None:
    _, model, case = parts
    s1, s2 = case["enc_s1"][:, :-1], case["enc_s2"][:, :-1]
    logits, _ = model.decode_s1(s1, s2)
    close(logits[:, -1], case["no_stamp_s1_logits_last"].numpy(), atol=2e-5)
    _, context = model.decode_s1(s1, s2, case["stamp"][:, :-1])
    close(context, case["decode_s1_context"].numpy(), atol=2e-5)
    close(
        model.decode_s2(context, case["decode_s2_s1_ids"])[:, -1],
        case["decode_s2_logits_last"].numpy(),
        atol=2e-5,
    )


@torch.inference_mode()
def test_validation_can_be_causal(parts: Any) -> None:
    """The published eval forward lets s2 see the future; `s2_causal=True` does not, and is the training forward."""
    _, model, case = parts
    s1, s2, stamp = case["enc_s1"], case["enc_s2"], case["stamp"]
    changed = s1.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 2**model.s1_bits

    def s2_logits(ids: torch.Tensor, **options: Any) -> torch.Tensor:
        return model(ids, s2, stamp, use_teacher_forcing=True, s1_targets=s1, **options)[1]

    assert not torch.allclose(s2_logits(s1)[:, :-1], s2_logits(changed)[:, :-1], atol=1e-4)
    torch.testing.assert_close(s2_logits(s1, s2_causal=True)[:, :-1], s2_logits(changed, s2_causal=True)[:, :-1])


def gradients(module: torch.nn.Module) -> dict[str, np.ndarray]:
    found = {name: p.grad.numpy().copy() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return found


def agree(found: dict[str, np.ndarray], case: dict[str, np.ndarray], prefix: str) -> None:
    wanted = {name.removeprefix(prefix): value for name, value in case.items() if name.startswith(prefix)}
    assert len(wanted) > 5
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-6, err_msg=name)


def test_training_losses_and_gradients(golden: Any) -> None:
    from anytorch.forecast.model import Kronos, KronosTokenizer

    tokenizer = KronosTokenizer.from_pretrained(golden.folder("b", "tokenizer")).train()
    model = Kronos.from_pretrained(golden.folder("b", "model")).train()
    case, data = golden.case("b_train"), golden.case("b_module")
    x, stamp = torch.from_numpy(data["x_norm"]), torch.from_numpy(data["stamp"])
    s1, s2 = torch.from_numpy(data["enc_s1"]), torch.from_numpy(data["enc_s2"])

    (coarse, whole), bsq, _, _ = tokenizer(x)
    parts = (torch.nn.functional.mse_loss(coarse, x), torch.nn.functional.mse_loss(whole, x), bsq)
    total = sum(parts) / 2
    total.backward()
    close(torch.stack((total, *parts)), case["tok_losses"])
    agree(gradients(tokenizer), case, "tok_grad/")

    first, second = model(s1[:, :-1], s2[:, :-1], stamp[:, :-1], use_teacher_forcing=True, s1_targets=s1[:, 1:])
    losses = model.head.compute_loss(first, second, s1[:, 1:], s2[:, 1:])
    losses[0].backward()
    close(torch.stack(losses), case["mod_losses"])
    if "tf_train_s1_logits" in case:
        close(first, case["tf_train_s1_logits"], atol=2e-5)
        close(second, case["tf_train_s2_logits"], atol=2e-5)
    found = gradients(model)
    assert not any(name.startswith("time_emb") for name in found), "learn_te is false: the tables are frozen"
    agree(found, case, "mod_grad/")


def test_sampled_s1_without_teacher_forcing(golden: Any) -> None:
    model, case = golden.model("a"), golden.case("a_module")
    s1, s2 = torch.from_numpy(case["enc_s1"]), torch.from_numpy(case["enc_s2"])
    with torch.inference_mode():
        torch.manual_seed(1)
        once = model(s1, s2)[1]
        torch.manual_seed(1)
        again = model(s1, s2)[1]
        torch.manual_seed(2)
        other = model(s1, s2)[1]
    assert torch.equal(once, again) and not torch.equal(once, other)


@torch.inference_mode()
def test_what_programs_read_of_the_published_modules(parts: Any) -> None:
    """Names that programs of the original repository use, with the values they have there."""
    tokenizer, model, case = parts
    config = model.config
    for name in ("learn_te", "ff_dim", "ffn_dropout_p", "attn_dropout_p", "resid_dropout_p", "token_dropout_p"):
        assert getattr(model, name) == config[name]
    assert model.s1_vocab_size == model.head.vocab_s1 == 2**model.s1_bits
    assert (tokenizer.enc_layers, tokenizer.dec_layers) == (
        tokenizer.config["n_enc_layers"],
        tokenizer.config["n_dec_layers"],
    )
    assert tokenizer.ff_dim == tokenizer.config["ff_dim"]
    context = case["decode_s1_context"]
    assert torch.equal(model.head(context), model.head.proj_s1(context))
    assert torch.equal(model.head.cond_forward(context), model.head.proj_s2(context))
    knowing = model.dep_layer(context, model.embedding.emb_s1(case["enc_s1"][:, 1:]))  # in eval mode not causal
    close(model.head.cond_forward(knowing), case["tf_eval_s2_logits"].numpy())


@torch.inference_mode()
def test_the_quantiser_itself(parts: Any) -> None:
    tokenizer, _, case = parts
    vectors = tokenizer.encode_vectors(case["x_norm"])
    loss, code, index = tokenizer.tokenizer(vectors)
    close(loss, case["tok_fwd_bsq_loss"].numpy())
    close(code, case["tok_fwd_quantized"].numpy())
    assert torch.equal(index, case["enc_full"])
    nothing, _, (s1, s2) = tokenizer.tokenizer(vectors, half=True, collect_metrics=False)
    assert torch.equal(s1, case["enc_s1"]) and torch.equal(s2, case["enc_s2"]) and nothing == 0


@torch.inference_mode()
def test_a_composite_id_is_split_and_not_unpacked(parts: Any) -> None:
    """Two series: a tensor [2, rows] must not be taken for the pair (s1, s2)."""
    _, model, case = parts
    s1, s2 = case["enc_s1"][:, :-1], case["enc_s2"][:, :-1]
    assert len(s1) == 2
    composite = s1 * 2**model.s2_bits + s2
    close(model.embedding(composite), case["emb"].numpy())
    high, low = model.embedding.split_token(composite, model.s2_bits)
    assert torch.equal(high, s1) and torch.equal(low, s2)


@torch.inference_mode()
def test_the_loss_of_the_rows_that_count(parts: Any) -> None:
    _, model, case = parts
    logits = case["tf_eval_s1_logits"], case["tf_eval_s2_logits"]
    targets = case["enc_s1"][:, 1:], case["enc_s2"][:, 1:]
    for found, wanted in zip(model.head.compute_loss(*logits, *targets), case["tf_eval_loss"], strict=True):
        close(found, wanted.numpy())
    padded = torch.zeros_like(targets[0])
    padded[:, 10:] = 1  # 0 is a row that counts
    found = model.head.compute_loss(*logits, *targets, padding_mask=padded)
    wanted = model.head.compute_loss(*(part[:, :10] for part in (*logits, *targets)))
    for one, other in zip(found, wanted, strict=True):
        close(one, other.numpy())


def test_pairs_and_single_ids_are_not_mixed_up(parts: Any) -> None:
    tokenizer, _, case = parts
    pair = [case["enc_s1"], case["enc_s2"]]
    with pytest.raises(InputError, match="this is a list\nhint: pass half=True for a pair"):
        tokenizer.decode(pair)
    with pytest.raises(InputError, match=r"decodes a pair \[s1, s2\], and this is a tensor of shape \[2, 45\]"):
        tokenizer.decode(case["enc_full"], half=True)
    with pytest.raises(InputError, match="and this is 3 parts"):
        tokenizer.decode([*pair, pair[0]], half=True)
    close(tokenizer.decode(torch.stack(pair), half=True), case["dec_half"].numpy())


@pytest.mark.parametrize("width", [8, 7])
def test_a_fixed_table_holds_sinusoids_from_the_start(width: int) -> None:
    table = FixedEmbedding(24, width).emb.weight
    assert not table.requires_grad
    row, column = np.arange(24)[:, None], np.arange(width)
    angles = row * 10000.0 ** (-(column - column % 2) / width)
    close(table, np.where(column % 2 == 0, np.sin(angles), np.cos(angles)))
    one = TimeEmbedding(width, learn_pe=False)(torch.zeros(1, 1, 5))
    close(one[0, 0], np.where(column % 2 == 0, 0.0, 5.0))  # the sum of five tables' first rows
    with torch.device("meta"):
        assert FixedEmbedding(24, width).emb.weight.is_meta
