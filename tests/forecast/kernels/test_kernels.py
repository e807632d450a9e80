"""Our Triton kernels for a step, by Triton's own interpreter on the CPU: the same ids as torch's, not how fast.

Where Triton is not installed the tests are skipped, or fail if ANYTORCH_TEST_REQUIRE names triton, as `make test` does.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NoReturn

import pytest
import torch

from anytorch.forecast.decoding.decoder import Decoder
from anytorch.forecast.kernels import choice, row_step
from anytorch.forecast.kernels.products import Product
from anytorch.forecast.kernels.row_step import Tiles, power_of_two, query_table, why_not
from anytorch.forecast.model import PUBLISHED, Kronos
from anytorch.forecast.model.fused import attend_shared

START = """
import numpy as np
import torch
import triton
import triton.language as tl

torch.set_num_threads(1)


@triton.jit
def count(until, out):
    total = 0
    for _ in tl.range(0, tl.load(until), 1):
        total += 1
    tl.store(out, total)


until, out = torch.tensor([3]), torch.zeros(1, dtype=torch.int32)
try:
    count[(1,)](until, out)
except Exception as exc:  # the interpreter of Triton 3.6 cannot loop to a loaded number with NumPy 2.4
    answer(unusable=f"{type(exc).__name__}: {exc}")
    raise SystemExit

import anytorch
from anytorch.forecast import KronosPredictor
from anytorch.forecast.generation import generate
from anytorch.forecast.kernels import choice, products, row_step
from anytorch.forecast.inputs import Series
from anytorch.forecast.kernels.products import error_of
from anytorch.forecast.kernels.products import Cut, Products, Work, candidates
from anytorch.forecast.decoding.sampling import Sampler
from anytorch.forecast.model import PUBLISHED, Kronos, KronosTokenizer

generate.FEWEST_STEPS = 2
torch.manual_seed(0)
shape = {"s1_bits": 6, "s2_bits": 6}
none = {f"{name}_dropout_p": 0.0 for name in ("ffn", "attn", "resid", "token")}
model = Kronos(**shape, n_layers=1, d_model=64, n_heads=4, ff_dim=96, learn_te=True, **none).eval()
config = {**PUBLISHED["kronos-small"].tokenizer_config, **shape, "d_model": 32, "n_heads": 2, "ff_dim": 48}
tokenizer = KronosTokenizer(**config).eval()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    for head in (model.head.proj_s1, model.head.proj_s2):
        head.weight.mul_(3)
HORIZON = 3


def series(length, seed):
    walk = np.random.default_rng(seed).standard_normal((length, 6)).cumsum(0)
    normal = ((walk - walk.mean(0)) / walk.std(0)).astype(np.float32)
    minutes = 570 + 5 * np.arange(length + HORIZON)
    stamp = np.stack((minutes % 60, minutes // 60 % 24, minutes // 1440, 4 + minutes // 1440, minutes * 0 + 3), axis=1)
    one = np.ones(6, np.float32)
    return Series("made up", normal, 0 * one, one, stamp[:length], stamp[length:], None)


predictor = KronosPredictor(model, tokenizer, "cpu", 40, threads=1)
decoder = predictor.decoder()
decoder.tables = decoder._fusion_tables()


def compared(histories, sampler, samples, rolling):
    # Are the kernels used, and are their ids those of torch's? And what was chosen.
    ids = []
    for static, forecasts in (("", 1), ("plain", 2)):  # the second of a shape has the kernels compiled
        predictor.static, predictor.kernels = static, True
        decoder.kept = decoder.kept_rolled = None
        for _ in range(forecasts):
            paths = predictor.paths(histories, sampler, samples, rolling=rolling, seed=3)
        pending = [s.chooser for s in (decoder.kept, decoder.kept_rolled) if s is not None and s.chooser is not None]
        for chooser in pending:
            chooser.compiling.wait()
        if pending:  # the next one tries them
            paths = predictor.paths(histories, sampler, samples, rolling=rolling, seed=3)
        ids.append([[path.s1.tolist(), path.s2.tolist()] for path in paths])
    kept = decoder.kept
    return [kept.kernel_step is not None, kept.no_kernels, ids[0] == ids[1], sorted(c.chosen for c in kept.choices.values())]

"""

IDS = """found = []
for tiles, sampler, rolling, lengths, samples in (
    (dict(dot=False, block_n=32, block_k=32, block=8, splits=3, group=2), Sampler(0.8, 5, 0.9), "exact", [20, 13], 2),
    (
        dict(dot=True, block_n=32, block_k=64, block=16, splits=2, group=2, narrow=(32, 2, 4)),
        *(Sampler(1.0, 0, 0.5), "evict", [40, 30], 1),
    ),
    (dict(dot=False, block_n=32, block_k=64, block=32, splits=1, group=1), Sampler(1.0, 1, 1.0), "exact", [20], 1),
    # Sums in parts, and all samples on the matrix units: with prompts of two lengths, and with some of it evicted.
    (
        dict(dot=True, block_n=32, block_k=32, block=16, splits=2, group=0, parts=2),
        *(Sampler(1.0, 0, 0.9), "exact", [20, 13], 3),
    ),
    (
        dict(dot=False, block_n=32, block_k=32, block=16, splits=3, group=0, parts=3),
        *(Sampler(0.8, 5, 0.9), "evict", [40, 33], 2),
    ),
):
    row_step.Tiles.of = classmethod(lambda cls, rows: cls(**tiles))
    with anytorch.use(measure_kernels=False):
        found.append(compared([series(length, seed) for seed, length in enumerate(lengths)], sampler, samples, rolling))
answer(found=found, unusable="")
"""

PRODUCTS = """
# Every kind of product, cut in every way that is tried.
built_in = row_step.Tiles.of
errors = []
for rows in (5, 17, 65):  # of the last and of the second there is one more than tiles hold
    x, inner, weight = torch.randn(rows, 64), torch.randn(rows, 96), torch.randn(96, 64) / 8
    for work in (
        Work(x, weight, torch.empty(rows, 96), bias=torch.randn(96), norm=torch.rand(64)),
        Work(x, weight, torch.empty(rows, 48), norm=torch.rand(64), gated=True),
        Work(inner, torch.randn(64, 96), torch.empty(rows, 64), bias=torch.randn(64), residual=torch.randn(rows, 64)),
        Work(torch.randn(rows, 2 * 64), weight, torch.empty(rows, 96), bias=torch.randn(96), per_head=48),
    ):
        product = work.product
        ours = Products(x.device, lambda p: None if p.rows > 64 else built_in(p.rows).cut(p))
        more = [Cut(16, 32, 2, 2, 2), Cut(32, 32, 2, 4, 3), Cut(16, 16, 2, 2, 3, block_m=16)]
        more += [Cut(16, 32, 1, 2, 2, dot=False)] if rows <= 8 else []
        for way in [*candidates(product, ours.built_in(product)), *more]:
            for again in range(2 if way in more else 1):  # the counters are where they were
                ours.compute(work, way)
            errors.append([str(product), str(way), error_of(work)(work.out)])
            work.out.zero_()
answer(errors=errors, unusable="")
"""

CHOSEN = """
from anytorch.measured.stopwatch import Stopwatch

products.FEWEST_LAUNCHES = 1
runs = {}


def seconds(run, count):
    # The later an option comes, the faster it is.
    return 1e-3 / runs.setdefault(run, len(runs) + 1)


# Time stands still: the interpreter takes longer than there is for measuring.
choice.stopwatch_of = lambda device: Stopwatch(seconds, now=lambda: 0.0)
HORIZON = 8
chosen = compared([series(37, 0)], Sampler(1.0, 0, 0.9), 2, "exact")
full = decoder.kept_rolled
every = [*decoder.kept.choices.values(), *full.choices.values()]
refused = [one.name + one.refused for part in every for one in part.trials if one.refused]
answer(chosen=chosen, full=[full.no_kernels, [c.chosen for c in full.choices.values()]], refused=refused, unusable="")
"""


COMPILE = """
import torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from anytorch.forecast.kernels import attention
from anytorch.forecast.kernels.row_step import Tiles
from anytorch.forecast.kernels.products import Work, candidates, constants
from anytorch.forecast.kernels.attention_source import attend_many
from anytorch.forecast.kernels.products_source import linear
from anytorch.forecast.kernels.attention_source import attend_window

done = []


def compiled(kernel, given, numbers, **kinds):
    warps = given.pop("num_warps")
    kind = {name: kinds.get(name, "i32" if name in numbers else "*fp32") for name in kernel.arg_names}
    signature = {name: "constexpr" if name in given else kind[name] for name in kernel.arg_names}
    pointers = [place for place, name in enumerate(kernel.arg_names) if signature[name].startswith("*")]
    attributes = {(place,): [["tt.divisibility", 16]] for place in pointers}
    source = ASTSource(kernel, signature, {name: given[name] for name in kernel.arg_names if name in given}, attributes)
    found = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    done.append([kernel.__name__, "cubin" in found.asm, found.metadata.shared])


for rows in (20, 2380):  # Kronos-base: a step of 20 samples, and their own rows in a full window
    meta = lambda *shape: torch.empty(*shape, device="meta")
    work = Work(meta(rows, 832), meta(4096, 832), meta(rows, 2048), norm=meta(832), gated=True)
    built_in = Tiles.of(rows).cut(work.product) if rows == 20 else None
    for way in candidates(work.product, built_in):
        if way is not None:
            compiled(linear, constants(work, way), ("rows", "columns", "x_row"), arrived="*i32")
heads = {"HEADS": 16, "HEAD": 52, "TILE": 64, "PRECISION": "tf32x3"}
sizes = ("table_kind", "table_series", "samples", "longest", "capacity", "max_context", "series", "shared_rows", "own_rows")
for share in attention.MATRIX:
    given = {"EVICT": False, "SAMPLES": 32, "BLOCK": share.block, "OWN_BLOCK": share.own_block, "SPLITS": share.splits}
    kinds = {"counters": "*i64", "lengths": "*i64", "arrived": "*i32"}
    compiled(attend_many, {**heads, **given, "num_warps": share.warps}, sizes, **kinds)
for cut in attention.CUTS:
    given = {"BLOCK_M": cut.block_m, "BLOCK_N": cut.block_n, "STAGES": cut.stages, "num_warps": cut.warps}
    compiled(attend_window, {**heads, **given}, sizes, counters="*i64", scale="fp32")
answer(done=done)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_a_real_device(
    run_script: Callable[..., Any], missing: Callable[[str, str], NoReturn], tmp_path: Any
) -> None:
    """The interpreter takes much that the compiler does not. No device is needed to compile for one."""
    if find_spec("triton") is None:
        missing("triton", "it is not installed")
    done = run_script(COMPILE, {"TRITON_CACHE_DIR": str(tmp_path)}, warm=True)["done"]
    assert len(done) >= 15 and {name for name, _, _ in done} == {"linear", "attend_many", "attend_window"}
    most = 227 * 1024  # bytes that a program may have to itself on such a device
    assert all(made and shared <= most for _, made, shared in done)


@pytest.fixture
def interpreted(run_script: Callable[..., Any], missing: Callable[[str, str], NoReturn]) -> Callable[[str], Any]:
    def run(script: str) -> Any:
        if find_spec("triton") is None:
            missing("triton", "it is not installed")
        found = run_script(START + script, {"TRITON_INTERPRET": "1"}, warm=True)
        if found["unusable"]:
            missing("triton", f"its interpreter does not work here: {found['unusable']}")
        return found

    return run


def test_the_kernels_draw_the_same_ids(interpreted: Callable[[str], Any]) -> None:
    for used, why, same, ways in interpreted(IDS)["found"]:
        assert used and not why and same and not ways


@pytest.mark.long
def test_products_are_right_however_they_are_cut(interpreted: Callable[[str], Any]) -> None:
    errors = interpreted(PRODUCTS)["errors"]
    assert len(errors) > 80 and not [one for one in errors if not one[2] <= choice.MOST_ERROR]


@pytest.mark.long
def test_what_is_chosen_draws_the_same_ids(interpreted: Callable[[str], Any]) -> None:
    found = interpreted(CHOSEN)
    used, why, same, ways = found["chosen"]
    assert used and not why and same
    assert any("samples together" in way for way in ways) and len(ways) > 5
    assert not found["refused"]
    why, ways = found["full"]
    assert not why and len(ways) >= 5 and "torch" not in ways, "windows that are full go through our kernel, too"


def small(**changes: Any) -> Kronos:
    return Kronos(**{**PUBLISHED["kronos-mini"].config, "n_layers": 1, "ff_dim": 64, **changes}).eval()


def test_where_the_kernels_are_not_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_step, "find_spec", lambda name: object())
    assert why_not(Decoder(small()), 20) == ""
    assert "100 rows" in why_not(Decoder(small()), 100)
    assert "bfloat16" in why_not(Decoder(small().to(torch.bfloat16)), 1)
    assert "not fused" in why_not(Decoder(small(), tables=False), 1)
    assert "a width of 48" in why_not(Decoder(small(d_model=48, n_heads=4)), 1)
    monkeypatch.setattr(row_step, "find_spec", lambda name: None)
    assert "not installed" in why_not(Decoder(small()), 20)


def test_tiles_fit_the_rows() -> None:
    assert [power_of_two(count) for count in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    for rows in (1, 5, 8, 9, 64):
        tiles = Tiles.of(rows)
        assert tiles.dot == (rows > 8), "matrix units have tiles of 16 rows"
        assert all(power_of_two(size) == size for size in (tiles.block_n, tiles.block_k, tiles.block))
        assert tiles.share(1).group == 1 and tiles.share(5).group == 0
        wide, narrow = Product(rows, 832, 2496, norm=True), Product(rows, 2048, 832, residual=True)
        assert tiles.cut(wide).splits == (4 if rows > 8 else 1) and tiles.cut(narrow).splits == (8 if rows > 8 else 1)


@torch.no_grad()
def test_what_an_id_asks_is_its_query_in_the_space_of_the_context() -> None:
    torch.manual_seed(0)
    model = small()
    decoder = Decoder(model)
    context = torch.randn(1, 9, decoder.width)
    ids = torch.tensor([3, 1000])
    table = query_table(decoder)[ids]
    rows = context.unsqueeze(1)
    attended = attend_shared(table[:, None], (rows, rows), None, scale=1.0)[:, 0]  # as the kernels do
    values = torch.stack([attended[:, h] @ decoder.v_weight[h].T for h in range(4)], dim=1).flatten(1)
    cross = model.dep_layer.cross_attn
    found = cross.out_proj(values + cross.v_proj.bias)
    wanted = cross(model.embedding.emb_s1(ids)[:, None], context.expand(2, -1, -1), causal=False)[:, 0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
