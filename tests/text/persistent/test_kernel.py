"""PersistentKernel: from a model, and written down layer by layer as Mirage's documentation does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anytorch
from anytorch.errors import AnytorchError, InputError, ModelError, UsageError
from anytorch.text.decoders import Decoder
from anytorch.text.decoders.rotary import tables
from anytorch.text.decoders.spec import read_spec
from anytorch.text.persistent.kernel import PersistentKernel

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.manual_seed(3)
    made = Decoder(read_spec(CONFIG, "a config.json")).eval().requires_grad_(False)
    for one in made.parameters():
        one.data.normal_(0, 0.3)
    return made


def greedy(decoder: Decoder, ids: list[int], count: int) -> list[int]:
    made: list[int] = []
    for _ in range(count):
        made.append(int(decoder([ids + made])[0, -1].argmax()))
    return made


def written_down(decoder: Decoder, kernel: PersistentKernel, rows: int, *, groups: int = 2, fused: bool = True) -> None:
    """The layers of Mirage's demonstration: `fused` as its README has them, else one by one."""
    spec, body, length = decoder.spec, decoder.model, kernel.max_seq_length
    attach, new = kernel.attach_input, kernel.new_tensor
    tokens = attach(torch.zeros(rows, 1, dtype=torch.int64), name="input_token")
    cos, sin = (
        attach(torch.cat((one, one), -1), name=name)
        for one, name in zip(tables(spec, length), ("cos", "sin"), strict=True)
    )

    def room(width: int, name: str, dtype: Any = torch.float32) -> Any:
        return new(dims=(rows, width), dtype=dtype, name=name, io_category="cuda_tensor")

    x = room(spec.width, "embed_out")
    grid: dict[str, Any] = {"grid_dim": (1, 1, 1), "block_dim": (128, 1, 1)}
    kernel.embed_layer(input=tokens, weight=attach(body.embed_tokens.weight, name="words"), output=x, **grid)
    for number, layer in enumerate(body.layers):
        own: Any = layer.self_attn
        mlp: Any = layer.mlp

        def weight(module: Any, name: str, number: int = number) -> Any:
            return attach(module.weight, name=f"layer_{number}_{name}")

        fuse = kernel.fuse_tensors if fused else kernel.shuffle_tensors
        qkv = fuse(
            [weight(own.q_proj, "q"), weight(own.k_proj, "k"), weight(own.v_proj, "v")],
            0,
            groups,
            name=f"qkv_{number}",
        )
        attn_in = room(spec.q_width + 2 * spec.kv_width, f"attn_in_{number}")
        norm = weight(layer.input_layernorm, "norm")
        if fused:
            kernel.rmsnorm_linear_layer(input=x, weight_norm=norm, weight_linear=qkv, output=attn_in, **grid)
        else:
            between = room(spec.width, f"normed_{number}")
            kernel.rmsnorm_layer(input=x, weight=norm, output=between, **grid)
            kernel.linear_layer(input=between, weight=qkv, output=attn_in, **grid)
        caches = [
            attach(torch.zeros(rows, length, spec.kv_heads, spec.head_width), name=f"{kind}_{number}")
            for kind in ("k_cache", "v_cache")
        ]
        attn_out = room(spec.q_width, f"attn_out_{number}")
        kernel.attention_layer(
            input=attn_in,
            k_cache=caches[0],
            v_cache=caches[1],
            q_norm=weight(own.q_norm, "q_norm"),
            k_norm=weight(own.k_norm, "k_norm"),
            cos_pos_embed=cos,
            sin_pos_embed=sin,
            output=attn_out,
            **grid,
        )
        middle = room(spec.width, f"middle_{number}")
        kernel.linear_with_residual_layer(
            input=attn_out, weight=weight(own.o_proj, "o"), residual=x, output=middle, **grid
        )
        gate_up = fuse([weight(mlp.gate_proj, "gate"), weight(mlp.up_proj, "up")], 0, 4, name=f"gate_up_{number}")
        mlp_mid = room(2 * spec.inner, f"mlp_mid_{number}")
        kernel.rmsnorm_linear_layer(
            input=middle,
            weight_norm=weight(layer.post_attention_layernorm, "after"),
            weight_linear=gate_up,
            output=mlp_mid,
            **grid,
        )
        x = room(spec.width, f"x_{number}")
        down = weight(mlp.down_proj, "down")
        if fused:
            kernel.silu_mul_linear_with_residual_layer(input=mlp_mid, weight=down, residual=middle, output=x, **grid)
        else:
            inner = room(spec.inner, f"inner_{number}")
            kernel.silu_mul_layer(input=mlp_mid, output=inner, **grid)
            kernel.linear_with_residual_layer(input=inner, weight=down, residual=middle, output=x, **grid)
    logits = room(spec.vocabulary, "logits")
    kernel.rmsnorm_linear_layer(
        input=x,
        weight_norm=attach(body.norm.weight, name="last_norm"),
        weight_linear=attach(decoder.lm_head.weight, name="head"),
        output=logits,
        **grid,
    )
    if fused:
        kernel.argmax_layer(input=logits, output=room(1, "chosen", torch.int64), **grid)
        return
    parts = (room(4, "best", torch.float32), room(4, "best_row", torch.int64))
    kernel.argmax_partial_layer(input=logits, output=parts, grid_dim=(4, 1, 1), block_dim=(128, 1, 1))
    kernel.argmax_reduce_layer(input=parts, output=room(1, "chosen", torch.int64), **grid)


def prompted(prompts: list[list[int]], length: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(len(prompts), length, dtype=torch.int64)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)] = torch.tensor(ids)
    return {
        "step": torch.zeros(len(prompts), dtype=torch.int32),
        "tokens": tokens,
        "prompt_lengths": torch.tensor([len(ids) for ids in prompts], dtype=torch.int32),
    }


@pytest.mark.parametrize("fused", [True, False], ids=["fused layers", "one by one"])
@pytest.mark.parametrize("groups", [1, 2])
def test_written_down_it_gives_the_decoders_tokens(decoder: Decoder, groups: int, fused: bool) -> None:
    prompts = [[5, 9, 2], [7], list(range(10, 30))]
    meta = prompted(prompts, 40)
    kernel = PersistentKernel(num_workers=96, num_local_schedulers=48, max_seq_length=40, meta_tensors=meta)
    written_down(decoder, kernel, 3, groups=groups, fused=fused)
    kernel.compile()
    found = kernel()
    assert found is meta["tokens"]
    for row, ids in enumerate(prompts):
        assert found[row].tolist() == ids + greedy(decoder, ids, 40 - len(ids))
    assert meta["step"].tolist() == [39, 39, 39]
    assert "recorded step" in kernel.explain()


def test_a_row_ends_with_its_last_word_and_a_call_goes_on_from_where_it_was(decoder: Decoder) -> None:
    ids = [5, 9, 2]
    every = greedy(decoder, ids, 21)
    end = every[6]
    meta = prompted([ids], 24)
    kernel = PersistentKernel(max_seq_length=24, eos_token_id=end, meta_tensors=meta)
    written_down(decoder, kernel, 1)
    first = every.index(end)
    kernel.compile()()
    place = len(ids) + first
    assert meta["step"].tolist() == [place] and meta["tokens"][0, : place + 1].tolist() == ids + every[: first + 1]
    assert not meta["tokens"][0, place + 1 :].any()
    # [step, tokens]: what comes before `step` is in the caches.
    kernel.eos_token_id, kernel.meta = None, {name: meta[name] for name in ("step", "tokens")}
    kernel()
    assert meta["tokens"][0].tolist() == ids + every[:21]


def test_drawn_tokens_follow_the_logits() -> None:
    """Two words of equal weight and one that is hopeless: drawn about as often, and never."""
    meta = [torch.zeros(1, dtype=torch.int32), torch.zeros(1, 400, dtype=torch.int64)]
    kernel = PersistentKernel(max_seq_length=400, meta_tensors=meta)
    token = kernel.attach_input(torch.zeros(1, 1, dtype=torch.int64), name="input_token")
    x = kernel.new_tensor(dims=(1, 3), dtype="float32", name="x")
    kernel.embed_layer(token, kernel.attach_input(torch.tensor([[1.0, 1.0, -60.0]] * 3), name="words"), x)
    kernel.sampling_layer(x, kernel.new_tensor(dims=(1, 1), dtype=torch.int64, name="chosen"), temperature=0.7)
    torch.manual_seed(0)
    counts = kernel.compile()()[0, 1:].bincount(minlength=3).tolist()
    assert counts[2] == 0 and 150 < counts[0] < 250


def test_from_a_model_and_from_a_folder(decoder: Decoder, tmp_path: Path) -> None:
    import json

    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(dict(decoder.state_dict()), tmp_path / "model.safetensors")
    prompts = [[5, 9, 2], [7]]
    want = [greedy(decoder, ids, 12) for ids in prompts]
    for model in (decoder, tmp_path, str(tmp_path)):
        kernel = anytorch.PersistentKernel.from_model(model, max_seq_length=40, backend="cpu", rows=2, num_workers=1)
        assert kernel.generate(prompts, max_new_tokens=12) == want
        assert kernel.generate(prompts[0], 12) == want[0]
        assert kernel.generate(prompts[0], 12, ends=[want[0][5]]) == want[0][: want[0].index(want[0][5])]
        assert kernel.explain() == "one call of C++ for all tokens of up to 2 texts, 1 worker"


def test_without_a_compiler_it_is_recorded_steps(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    from anytorch.errors import CompilerMissing

    def none(*_: Any, **__: Any) -> Any:
        raise CompilerMissing("no compiler")

    monkeypatch.setattr("anytorch.native.load", none)
    kernel = PersistentKernel.from_model(decoder, max_seq_length=30)
    assert kernel.generate([5, 9, 2], 12) == greedy(decoder, [5, 9, 2], 12)
    assert "a recorded step" in kernel.explain()


META = [torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1024, dtype=torch.int64)]


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: PersistentKernel(world_size=2), "one process decodes on one device"),
        (lambda: PersistentKernel(num_workers=0), "num_workers=0 is invalid"),
        (lambda: PersistentKernel(num_local_schedulers=-1), "from 0 to"),
        (lambda: PersistentKernel(max_seq_length=True), "max_seq_length=True is invalid"),
        (lambda: PersistentKernel(meta_tensors=META[:1]), "1 tensors"),
        (lambda: PersistentKernel(meta_tensors={"tokens": META[1]}), "no 'step'"),
        (lambda: PersistentKernel(meta_tensors=[META[0], META[1][:, :5]]), "1024 or more"),
        (lambda: PersistentKernel(meta_tensors=[META[1], META[1]]), "step is torch.int64 of"),
        (lambda: PersistentKernel(meta_tensors=META).compile(), "no embed_layer"),
        (lambda: PersistentKernel(meta_tensors=META)(), "no compiled program"),
        (lambda: PersistentKernel().generate([1], 2), "no model"),
        (lambda: PersistentKernel(backend="toaster"), "toaster"),
        (lambda: PersistentKernel().new_tensor((1, 2), name="x"), "nothing is attached"),
        (lambda: PersistentKernel().attach_input(META[0]), "missing or taken"),
    ],
)
def test_what_cannot_be_meant_is_said(build: Callable[[], Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build()


def test_layers_name_what_does_not_fit() -> None:
    kernel = PersistentKernel(meta_tensors=META)
    x = kernel.attach_input(torch.zeros(1, 8), name="x")
    y = kernel.new_tensor((1, 6), dtype=torch.float32, name="y")
    with pytest.raises(UsageError, match=r"dims=\(1, 0\) is invalid"):
        kernel.new_tensor((1, 0), name="none")
    with pytest.raises(UsageError, match=r"linear_layer: the weight 'w' is \[6, 7\], not \[outputs, 8\]"):
        kernel.linear_layer(x, kernel.attach_input(torch.zeros(6, 7), name="w"), y)
    with pytest.raises(UsageError, match=r"rmsnorm_layer: 'y' is \[1, 6\], not \[1, 8\]"):
        kernel.rmsnorm_layer(x, kernel.attach_input(torch.zeros(8), name="g"), y)
    with pytest.raises(UsageError, match="cannot be split into 4 equal groups"):
        kernel.fuse_tensors([x], 0, 4, name="z")
    with pytest.raises(UsageError, match="one whole number for each of 1 rows"):
        kernel.argmax_layer(x, y)
    with pytest.raises(InputError, match="2 prompts: there is room for 1"):
        PersistentKernel.from_model(Decoder(read_spec(CONFIG, "a config.json")).requires_grad_(False)).generate(
            [[1], [2]], 2
        )
    with pytest.raises(InputError, match="0 tokens"):
        PersistentKernel.from_model(Decoder(read_spec(CONFIG, "a config.json")).requires_grad_(False)).generate([], 2)


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, np.array])
def test_prompts_are_taken_as_tokenizers_give_them(decoder: Decoder, kind: Callable[[Any], Any]) -> None:
    kernel = PersistentKernel.from_model(decoder, max_seq_length=32, rows=2)
    first, second = greedy(decoder, [1, 2, 3], 4), greedy(decoder, [4, 5, 6], 4)
    assert kernel.generate(kind([1, 2, 3]), 4) == first
    assert kernel.generate([kind([1, 2, 3]), kind([4, 5, 6])], 4) == [first, second]
    assert kernel.generate(kind([[1, 2, 3], [4, 5, 6]]), 4) == [first, second]
    assert kernel.generate(list(np.array([1, 2, 3])), np.int64(4)) == first


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ("text", "ids are of type str"),
        (None, "ids are of type NoneType"),
        ({1: 2}, "ids are of type dict"),
        ([], "the prompt has 0 tokens"),
        ([[1], []], "prompt 1 has 0 tokens"),
        ([1.5], "token 0 is 1.5, not a whole number"),
        ([True], "token 0 is True"),
        (["a"], "token 0 is 'a'"),
        ([[1], 2], "prompt 1 is 2, where others are lists"),
        (torch.tensor(1), "ids are of type int"),
        (torch.zeros(1, 2, 2, dtype=torch.int64), r"token 0 is \[0, 0\], not a whole number"),
    ],
)
def test_what_is_no_prompt_is_told_in_words(decoder: Decoder, ids: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        PersistentKernel.from_model(decoder, max_seq_length=16).generate(ids, 3)


def test_numbers_and_ends_are_checked(decoder: Decoder) -> None:
    kernel = PersistentKernel.from_model(decoder, max_seq_length=16)
    whole = greedy(decoder, [1], 16)
    for number in (-1, 1.5, True, None, "3"):
        with pytest.raises(UsageError, match="max_new_tokens="):
            kernel.generate([1], number)  # type: ignore[arg-type]
    assert kernel.generate([1], 10**9) == whole  # as many as there is room for, not memory for so many
    assert kernel.generate([1], 9, ends=whole[3]) == kernel.generate([1], 9, ends=[whole[3]])
    for ends in ("a", [None], -1, [1.5]):
        with pytest.raises(UsageError, match="ends="):
            kernel.generate([1], 3, ends)  # type: ignore[arg-type]
    several = PersistentKernel.from_model(decoder, max_seq_length=16, eos_token_id=[59, whole[2]])
    assert several.generate([1], 9) == whole[: whole.index(whole[2])]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows": 0}, "rows=0"),
        ({"rows": "a"}, "rows='a'"),
        ({"max_seq_length": 0}, "max_seq_length=0"),
        ({"max_seq_length": "5"}, "max_seq_length='5'"),
        ({"eos_token_id": "x"}, "eos_token_id='x'"),
        ({"spec_decode_config": "lookahead"}, "method 'lookahead' is unknown"),
        ({"spec_decode_config": {"ngramsize": 3}}, "'ngramsize' is unknown.*\n.*did you mean 'ngram_size'"),
        ({"profiler_tensor": "x"}, "profiler_tensor is of type str"),
        ({"backend": 5}, "unknown device '5'"),
    ],
)
def test_options_that_are_none_are_told_by_name(decoder: Decoder, options: dict[str, Any], words: str) -> None:
    with pytest.raises(AnytorchError, match=words):
        PersistentKernel.from_model(decoder, **{"max_seq_length": 16, **options})


def test_meta_tensors_and_places_that_are_none_are_told_by_name(decoder: Decoder) -> None:
    step, tokens = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 16, dtype=torch.int64)
    for given, words in (
        (5, "of type int"),
        ([1, 2], "step is of type int"),
        ({"step": step, "tokens": tokens, "token": step}, "'token' is unknown.*\n.*did you mean"),
    ):
        with pytest.raises(UsageError, match=words):
            PersistentKernel(max_seq_length=16, meta_tensors=given)  # type: ignore[arg-type]
    kernel = PersistentKernel(max_seq_length=16, meta_tensors=[step, tokens])
    written_down(decoder, kernel, 2)
    kernel.compile()
    for place in (-1, 16):
        step[1] = place
        with pytest.raises(InputError, match=f"step has {place}: use 0 to 15"):
            kernel()
    step[1] = 0
    for token in (-1, decoder.spec.vocabulary):
        tokens[1, 0] = token
        with pytest.raises(InputError, match=f"row 1 of tokens has {token}: ids go from 0 to"):
            kernel()


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_transformers_is_taken_with_its_weights(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.Qwen3Config(**CONFIG, tie_word_embeddings=tied)
    model = transformers.Qwen3ForCausalLM(config).eval()
    kernel = PersistentKernel.from_model(model, max_seq_length=32)
    ids = torch.tensor([[3, 1, 4]])
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert kernel.generate(ids[0], 8) == wanted[0, 3:].tolist()
    with torch.no_grad():
        model.model.norm.weight.mul_(-1)  # one and the same memory
    assert kernel.generate(ids[0], 8) != wanted[0, 3:].tolist()
    for other, words in (
        (model.model, "should be otherwise"),
        (torch.nn.Linear(2, 2), "Linear has no config"),
        (transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1)), "has no decoder here"),
        (None, "model is of type NoneType"),
    ):
        with pytest.raises(AnytorchError, match=words):
            PersistentKernel.from_model(other)  # type: ignore[arg-type]
    model.model.norm.to(torch.bfloat16)
    with pytest.raises(ModelError, match=r"torch\.bfloat16 on cpu and torch\.float32 on cpu"):
        PersistentKernel.from_model(model)


def test_the_ends_of_a_model_are_those_of_its_files(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**CONFIG, eos_token_id=None)).eval()
    whole = PersistentKernel.from_model(model, max_seq_length=32).generate([3, 1, 4], 12)
    first, second = whole[5], whole[8]
    model.generation_config.eos_token_id = [59, first]
    model.save_pretrained(tmp_path)
    for given in (model, tmp_path, str(tmp_path)):
        kernel = PersistentKernel.from_model(given, max_seq_length=32)
        assert kernel.generate([3, 1, 4], 12) == whole[: whole.index(first)]
        assert kernel.generate([3, 1, 4], 12, ends=()) == whole
    asked = PersistentKernel.from_model(tmp_path, max_seq_length=32, eos_token_id=second)
    assert asked.generate([3, 1, 4], 12) == whole[: whole.index(second)]


def test_another_thread_can_stop_it(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = greedy(decoder, [1, 2], 20)
    kernel = PersistentKernel.from_model(decoder, max_seq_length=32)
    kernel.stop()  # it holds for what comes next, once
    assert kernel.generate([1, 2], 20) == [] and kernel.generate([1, 2], 20) == whole
    guessing = PersistentKernel.from_model(decoder, max_seq_length=32, spec_decode_config="promptlookup")
    guessing.stop()
    assert guessing.generate([1, 2], 20) == [] and guessing.generate([1, 2], 20) == whole
    meta = prompted([[1, 2]], 24)
    written = PersistentKernel(max_seq_length=24, meta_tensors=meta)
    written_down(decoder, written, 1)
    written.compile()
    step, steps = written._step, [0]

    def counted() -> torch.Tensor:
        steps[0] += 1
        if steps[0] == 5:
            written.stop()
        return step()

    monkeypatch.setattr(written, "_step", counted)
    written()
    place = int(meta["step"][0])
    assert place < 23 and meta["tokens"][0, : place + 1].tolist() == [1, 2, *whole[: place - 1]]
    written()
    assert meta["tokens"][0].tolist() == [1, 2, *greedy(decoder, [1, 2], 22)]
