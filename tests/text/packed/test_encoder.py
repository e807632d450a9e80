"""What the packed encoder promises whatever the model: the same bits in any batch, sizes, accuracy, refusals."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anytorch import native
from anytorch.errors import CompilerMissing, InputError, ModelError, UsageError
from anytorch.native import simd
from anytorch.native.compiler import SHARED, find_compiler
from anytorch.text.checkpoints.spec import EncoderSpec
from anytorch.text.checkpoints.weights import is_optional, shapes
from anytorch.text.packed import FORMATS, PackedEncoder, binding
from anytorch.text.packed.calibration import sample_tokens
from anytorch.text.packed.encoder import bucket

BERT = EncoderSpec(
    family="bert", vocabulary=120, width=64, layers=2, heads=4, kv_heads=4, head_width=16, inner=160, max_positions=700,
    type_rows=2,
)  # fmt: skip
GATED = EncoderSpec(
    family="qwen3", vocabulary=120, width=64, layers=2, heads=4, kv_heads=2, head_width=24, inner=100, max_positions=700,
    activation="silu", gated=True, pre_norm=True, rms_norm=True, embed_norm=False, final_norm=True, qk_norm=True,
    learned_positions=False, rotary_thetas=(1e4, 1e3), windows=(0, 9), causal=True,
)  # fmt: skip
SPECS = {"bert": BERT, "gated": GATED}


def random_weights(spec: EncoderSpec, seed: int = 5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in shapes(spec).items():
        values = rng.standard_normal(shape)
        scale = shape[-1] ** -0.5 if len(shape) == 2 and name.startswith("layers") else 0.2
        offset = 1.0 if "norm.weight" in name else 0.0
        found[name] = (values * scale + offset).astype(np.float32)
    return found


def pack(sequences: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array([token for one in sequences for token in one], np.int32)
    return ids, np.cumsum([0, *map(len, sequences)]).astype(np.int32)


@cache
def weights_of(name: str) -> dict[str, np.ndarray]:
    return random_weights(SPECS[name])


@pytest.fixture(scope="module")
def encoders() -> Iterator[Callable[..., PackedEncoder]]:
    """Encoders made once per module: making one packs, and for some formats calibrates, the whole model."""
    made: dict[object, PackedEncoder] = {}

    def get(name: str = "bert", **options: object) -> PackedEncoder:
        key = (name, *sorted(options.items(), key=repr))
        if key not in made:
            made[key] = PackedEncoder(SPECS[name], weights_of(name), **options)  # type: ignore[arg-type]
        return made[key]

    yield get
    for one in made.values():
        one.close()


lengths = st.lists(st.one_of(st.integers(0, 40), st.sampled_from([95, 97, 130, 530])), min_size=1, max_size=9)


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("name", SPECS)
@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_same_bits_alone_and_in_any_batch_on_any_threads(
    name: str, quantization: str | None, data: st.DataObject, encoders: Callable[..., PackedEncoder]
) -> None:
    sizes = data.draw(lengths)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    sequences = [rng.integers(0, 120, size).tolist() for size in sizes]
    one = encoders(name, quantization=quantization, threads=1, budget=64, block=24)
    many = encoders(name, quantization=quantization, threads=3)
    together = many.run(*pack(sequences))
    assert np.isfinite(together).all()
    assert together.tobytes() == one.run(*pack(sequences)).tobytes()
    which = data.draw(st.integers(0, len(sequences) - 1))
    assert together[which].tobytes() == one.run(*pack([sequences[which]])).tobytes()
    assert together[which].tobytes() == many.run(*pack([sequences[which]])).tobytes()


@pytest.mark.parametrize(
    ("quantization", "mean", "least"), [("int8", 0.999, 0.995), ("int4", 0.98, 0.96), ("fp4", 0.97, 0.94)]
)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("level", native.supported())
def test_quantized_is_close_to_float(level: str, name: str, quantization: str, mean: float, least: float) -> None:
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, 120, size).tolist() for size in range(3, 40)]
    vectors = []
    for kind in (None, quantization):
        with PackedEncoder(
            SPECS[name], weights_of(name), normalize=True, quantization=kind, threads=1, level=level
        ) as encoder:
            vectors.append(encoder.run(*pack(sequences)))
    cosine = (vectors[0] * vectors[1]).sum(1)
    assert cosine.mean() >= mean and cosine.min() >= least, (cosine.mean(), cosine.min())


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("strange", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("level", native.supported())
def test_what_is_not_finite_is_not_a_number_in_every_format(
    level: str, strange: float, quantization: str | None
) -> None:
    """Whole numbers have no infinity: such a row must not become any other vector. The texts beside it stay as they are."""
    weights = {**weights_of("gated")}
    weights["word"] = weights["word"].copy()
    weights["word"][119, 3] = strange
    sequences = [[5, 6, 7], [5, 119, 7], [8, 9]]
    calibration = pack([[1, 2, 3]])
    with PackedEncoder(
        GATED, weights, quantization=quantization, threads=1, level=level, calibration=calibration
    ) as encoder:
        vectors = encoder.run(*pack(sequences))
        assert np.isnan(vectors[1]).all() and np.isfinite(vectors[[0, 2]]).all()
        assert vectors[0].tobytes() == encoder.run(*pack(sequences[:1]))[0].tobytes()


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.30), ("int4", 0.19), ("fp4", 0.19), ("int2", 0.13)])
def test_size_of_linear_weights(quantization: str, most: float) -> None:
    spec = EncoderSpec(
        family="bert", vocabulary=50, width=256, layers=1, heads=4, kv_heads=4, head_width=64, inner=1024, max_positions=32
    )  # fmt: skip
    weights = random_weights(spec)
    plain = sum(w.nbytes for name, w in weights.items() if w.ndim == 2 and name.startswith("layers"))
    with PackedEncoder(spec, weights, quantization=quantization, threads=1) as encoder:
        assert encoder.linear_nbytes <= most * plain


def test_poolings_of_nothing_and_of_one_token(encoders: Callable[..., PackedEncoder]) -> None:
    encoder = encoders(threads=1)
    assert encoder.run([], [0]).shape == (0, 64)
    assert encoder.tokens([], [0, 0]).shape == (0, 64)
    found = encoder.run([5], [0, 0, 1, 1])
    assert (found[[0, 2]] == 0).all() and (found[1] != 0).all()
    assert found[1].tobytes() == encoder.tokens([5], [0, 1])[0].tobytes()


def test_normalized(encoders: Callable[..., PackedEncoder]) -> None:
    found = encoders(threads=1, normalize=True).run([5, 6, 7], [0, 1, 1, 3])
    assert np.allclose(np.linalg.norm(found, axis=1), [1, 0, 1], atol=1e-6)


def test_calls_from_many_threads(encoders: Callable[..., PackedEncoder]) -> None:
    encoder = encoders(threads=2)
    texts = [np.arange(n, dtype=np.int32) for n in range(1, 25)]
    expected = [encoder.run(text, [0, len(text)]) for text in texts]
    found: list[np.ndarray | None] = [None] * len(texts)

    def work(offset: int) -> None:
        for i in range(offset, len(texts), 4):
            found[i] = encoder.run(texts[i], [0, len(texts[i])])

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(a is not None and a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True))


def test_closing_waits_for_a_run_in_another_thread(encoders: Callable[..., PackedEncoder]) -> None:
    """The memory that a run works with is not given back under it; the next one is told that the encoder is closed."""
    encoder = encoders(threads=1)
    real, order = encoder._library.encoder_run, []
    running, go_on = threading.Event(), threading.Event()

    class Library:
        def __getattr__(self, name: str) -> object:
            return getattr(real_library, name)

        def encoder_run(self, *given: object) -> int:
            running.set()
            assert go_on.wait(120)
            order.append("run")
            return int(real(*given))

        def encoder_free(self, handle: int) -> None:
            order.append("free")
            real_library.encoder_free(handle)

    real_library, encoder._library = encoder._library, Library()  # type: ignore[assignment]
    one = threading.Thread(target=encoder.run, args=([1, 2, 3], [0, 3]))
    one.start()
    assert running.wait(120)
    other = threading.Thread(target=encoder.close)
    other.start()
    other.join(0.05)
    assert order == [], "it waits"
    go_on.set()
    one.join()
    other.join()
    assert order == ["run", "free"]
    with pytest.raises(UsageError, match="closed"):
        encoder.run([1], [0, 1])


FORKS = """
import os
from anytorch.text.packed import PackedEncoder
from tests.text.packed.test_encoder import BERT, pack, weights_of

encoder = PackedEncoder(BERT, weights_of("bert"), threads=2)
ids, starts = pack([[1, 2, 3]] * 9)
expected = encoder.run(ids, starts).tobytes()
child = os.fork()
if child == 0:
    same = encoder.run(ids, starts).tobytes() == expected
    encoder.close()
    os._exit(0 if same else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_works_in_a_forked_child() -> None:
    """Of a process of its own: the child ends what threads of other tests keep, and some of that cannot be ended there."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


@pytest.mark.parametrize(
    ("ids", "starts", "message"),
    [
        ([5, 120], [0, 2], "token 1 is 120, which is not in the vocabulary of 120"),
        ([-1], [0, 1], "token 0 is -1"),
        ([1] * 701, [0, 701], "text 0 has 701 tokens; the model takes 700"),
        ([1, 2], [0, 1], "end with 2"),
        ([1, 2], [1, 2], "begin with 0"),
        ([1, 2], [0, 2, 1, 2], "starts\\[2\\] does"),
        ([1], [], "begin with 0"),
        ([[1]], [0, 1], "one row of whole numbers"),
        ([1.5], [0, 1], "one row of whole numbers; got float64"),
        ([2**40], [0, 1], "beyond 32 bits"),
    ],
)
def test_wrong_input_is_refused(
    ids: list[int], starts: list[int], message: str, encoders: Callable[..., PackedEncoder]
) -> None:
    with pytest.raises(InputError, match=message):
        encoders(threads=2).run(ids, starts)
    assert np.isfinite(encoders(threads=2).run([1, 2], [0, 2])).all()  # and it still works


def test_wrong_weights_are_refused() -> None:
    good = weights_of("bert")
    for name in good:
        if not is_optional(name):
            with pytest.raises(ModelError, match=name.rsplit(".", 1)[0]):
                PackedEncoder(BERT, {k: v for k, v in good.items() if k != name}, threads=1)
        with pytest.raises(ModelError, match=r"shape|must be"):
            PackedEncoder(BERT, {**good, name: good[name][:-1]}, threads=1)


def test_wrong_choices_are_refused() -> None:
    good = weights_of("bert")
    with pytest.raises(UsageError, match="unknown pooling 'median'; poolings: cls, mean"):
        PackedEncoder(BERT, good, pooling="median")
    with pytest.raises(UsageError, match="unknown quantization 'int3'"):
        PackedEncoder(BERT, good, quantization="int3")
    with pytest.raises(UsageError, match="from 1 to 1,024"):
        PackedEncoder(BERT, good, threads=0)
    encoder = PackedEncoder(BERT, good, threads=1)
    encoder.close()
    encoder.close()
    with pytest.raises(UsageError, match="closed"):
        encoder.run([1], [0, 1])


def test_no_compiler_is_a_typed_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", f"{tmp_path}/empty")
    with pytest.raises(CompilerMissing, match="cannot build 'packed'"):
        PackedEncoder(BERT, weights_of("bert"))


def test_the_word_table_is_not_copied() -> None:
    weights = weights_of("bert")
    with PackedEncoder(BERT, weights, threads=1) as encoder:
        before = encoder.run([7], [0, 1])
        weights["word"][7] += 1
        try:
            assert (encoder.run([7], [0, 1]) != before).any()
        finally:
            weights["word"][7] -= 1


def test_memory_is_given_back() -> None:
    """Making and closing an encoder many times does not grow the process by even one more of it."""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc/self/statm")
    spec = EncoderSpec(
        family="bert", vocabulary=50, width=256, layers=2, heads=4, kv_heads=4, head_width=64, inner=1024, max_positions=32
    )  # fmt: skip
    weights = random_weights(spec)

    def resident() -> int:
        gc.collect()
        with open("/proc/self/statm") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def cycle() -> int:
        with PackedEncoder(spec, weights, threads=2) as encoder:
            encoder.run([1, 2, 3], [0, 3])
            return encoder.linear_nbytes

    nbytes = cycle()
    before = resident()
    for _ in range(8):
        cycle()
    assert resident() - before < nbytes


def test_shape_is_the_same_on_both_sides() -> None:
    """A field added on one side only would shift all that follow; the C++ says how large its struct is."""
    library = binding.open_library()
    assert library.encoder_shape_nbytes() == ctypes.sizeof(binding.Shape)


@pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="the levels beyond baseline are of x86-64"
)
@pytest.mark.parametrize("level", sorted(set(simd.levels_of("x86_64")) - set(native.supported())))
def test_levels_that_cannot_run_here_are_at_least_cpp(level: str) -> None:
    command = [
        *find_compiler().command,
        "-fsyntax-only",
        "-w",
        "-std=c++17",
        f"-I{SHARED}",
        *native.LEVELS[level].flags,
    ]
    found = subprocess.run([*command, *map(str, binding.SOURCES)], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr


def test_buckets_are_those_of_the_reference() -> None:
    torch = pytest.importorskip("torch")
    mpnet = pytest.importorskip("transformers.models.mpnet.modeling_mpnet")
    distances = np.arange(-600, 601)
    expected = mpnet.MPNetEncoder.relative_position_bucket(
        torch.from_numpy(distances), num_buckets=32, max_distance=128
    )
    assert (bucket(distances, 32, 128) == expected.numpy()).all()


def test_sample_tokens_fit_any_model() -> None:
    for spec in (BERT, EncoderSpec("bert", 3, 8, 1, 1, 8, 5)):
        ids, starts = sample_tokens(spec)
        assert ids.min() >= 0 and ids.max() < spec.vocabulary
        assert np.diff(starts).max() <= spec.max_positions
        assert starts[-1] == len(ids)


def test_a_table_whose_file_is_cut_short_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tables are mapped, small ones read: neither ends the process when somebody cuts the file short."""
    from safetensors.numpy import save_file

    from anytorch.text.checkpoints import checkpoint as checkpoints

    spec = replace(BERT, vocabulary=2000)
    ids, starts = pack([[1, 2, 3]])
    for small in (2**30, 1000):
        monkeypatch.setattr(checkpoints, "SMALL_NBYTES", small)
        save_file(random_weights(spec), tmp_path / "model.safetensors")
        with checkpoints.Checkpoint(tmp_path) as stored:
            weights = {name: stored.tensor(name) for name in stored.names()}
        with PackedEncoder(spec, weights, threads=1) as encoder:
            before = encoder.run(ids, starts)
            os.truncate(tmp_path / "model.safetensors", 5000)
            if small > 2**20:
                assert np.array_equal(encoder.run(ids, starts), before)
            else:
                with pytest.raises(ModelError, match="cut short while it was in use"):
                    encoder.run(ids, starts)
