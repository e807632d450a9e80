"""The planner is a pure function: budgets are kept, the answer is the fastest it knows, and errors name what would work."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anytorch.errors import BudgetTooSmall, UsageError
from anytorch.memory.plan import LEAST_STAGING_NBYTES, make_plan, spread
from anytorch.memory.types import Budgets, Speeds, Step, TierPlan, WeightBlock

MB = 2**20


def chain(sizes: list[int], compute_s: float = 0.0) -> tuple[list[WeightBlock], list[Step]]:
    blocks = [WeightBlock(f"b{i}", size) for i, size in enumerate(sizes)]
    return blocks, [Step(block.name, (block.name,), compute_s) for block in blocks]


def test_everything_fits() -> None:
    blocks, steps = chain([10, 20, 30])
    plan = make_plan(blocks, steps, Budgets(60), Speeds(1, 1))
    assert set(plan.homes.values()) == {"device"}
    assert plan.ring_nbytes == 0 and plan.prediction.from_host_nbytes == 0
    assert "nothing streams" in plan.explain()


def test_half_is_resident_and_spread_out() -> None:
    blocks, steps = chain([10] * 20)
    plan = make_plan(blocks, steps, Budgets(120, 1000), Speeds(10, 1))
    resident = [i for i in range(20) if plan.homes[f"b{i}"] == "device"]
    assert plan.ring_nbytes <= 20 and len(resident) >= 10
    assert max(b - a for a, b in itertools.pairwise(resident)) <= 3, "resident blocks stand together"


def test_for_training_the_first_blocks_stay() -> None:
    """Backward ends with them and forward begins with them: updates on the host have that long to be done."""
    blocks, steps = chain([10] * 20)
    plan = make_plan(blocks, steps, Budgets(120, 1000), Speeds(10, 1), training=True)
    resident = [i for i in range(20) if plan.homes[f"b{i}"] == "device"]
    assert len(resident) >= 10 and resident == list(range(len(resident)))


def test_double_buffering_is_not_given_up_where_computing_time_is_unknown() -> None:
    blocks, steps = chain([10] * 10)
    assert make_plan(blocks, steps, Budgets(35, 1000), Speeds(10, 1)).ring_nbytes >= 20


def test_known_computing_decides_what_limits() -> None:
    blocks, steps = chain([10**9] * 10, compute_s=1.0)
    slow = make_plan(blocks, steps, Budgets(3 * 10**9, 10**11), Speeds(0.5, None))
    fast = make_plan(blocks, steps, Budgets(3 * 10**9, 10**11), Speeds(50, None))
    assert slow.prediction.limit == "host link"
    assert fast.prediction.limit == "computing"
    assert fast.prediction.pass_s == pytest.approx(10.0, rel=0.01)  # all of the streaming is hidden
    streamed = slow.prediction.from_host_nbytes
    assert slow.prediction.pass_s == pytest.approx(streamed / 0.5e9, rel=0.15)


def test_prediction_without_overlap_adds_up() -> None:
    """One block fits: fetching waits for computing and computing for fetching."""
    blocks, steps = chain([10**9] * 4, compute_s=0.5)
    plan = make_plan(blocks, steps, Budgets(10**9, None, 10**12), Speeds(None, 2.0))
    assert plan.prediction.pass_s == pytest.approx(4 * (0.5 + 0.5))


def test_a_block_larger_than_the_ring_is_resident() -> None:
    blocks, steps = chain([100, 10, 10, 10, 10])
    plan = make_plan(blocks, steps, Budgets(125, 1000), Speeds(10, 1))
    assert plan.homes["b0"] == "device"
    assert plan.device_nbytes <= 125


def test_a_shared_block_counts_once_and_is_preferred() -> None:
    blocks = [WeightBlock("tied", 50), *(WeightBlock(f"b{i}", 50) for i in range(6))]
    steps = [Step("embed", ("tied",)), *(Step(f"b{i}", (f"b{i}",)) for i in range(6)), Step("head", ("tied",))]
    plan = make_plan(blocks, steps, Budgets(150, 1000), Speeds(10, 1))
    assert plan.homes["tied"] == "device", "it is used twice per pass"


def test_the_smallest_budget_is_named_and_works() -> None:
    blocks, steps = chain([100, 300, 200])
    with pytest.raises(BudgetTooSmall, match="'b1'") as caught:
        make_plan(blocks, steps, Budgets(299, 10_000), Speeds(1, 1))
    assert "300 bytes" in caught.value.hint
    assert make_plan(blocks, steps, Budgets(300, 10_000), Speeds(1, 1)).device_nbytes <= 300


def test_no_disk_and_too_little_host() -> None:
    blocks, steps = chain([100] * 10)
    with pytest.raises(BudgetTooSmall, match="host budget") as caught:
        make_plan(blocks, steps, Budgets(200, 500), Speeds(1, 1))
    smallest = int(caught.value.hint.split(" bytes")[0].rpartition(" ")[2])
    make_plan(blocks, steps, Budgets(200, smallest), Speeds(1, 1))


def test_no_room_for_staging_says_how_much_it_takes() -> None:
    blocks, steps = chain([MB] * 10)
    with pytest.raises(BudgetTooSmall, match="disk reads pass through") as caught:
        make_plan(blocks, steps, Budgets(2 * MB, MB, 10**12), Speeds(1, 1))
    assert str(LEAST_STAGING_NBYTES) in caught.value.hint


def test_disk_budget() -> None:
    blocks, steps = chain([100] * 10)
    with pytest.raises(BudgetTooSmall, match="on disk"):
        make_plan(blocks, steps, Budgets(200, None, 100), Speeds(1, 1))
    make_plan(blocks, steps, Budgets(200, None, 100), Speeds(1, 1), on_disk=True)
    with pytest.raises(BudgetTooSmall, match="the disk may not be used"):
        make_plan(blocks, steps, Budgets(200), Speeds(1, 1))


@pytest.mark.parametrize(
    ("steps", "message"),
    [([], "at least one step"), ([Step("a", ("nonsense",))], "not among"), ([Step("a", ("b0",))], "no step uses b1")],
)
def test_nonsense(steps: list[Step], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_plan(chain([1, 1])[0], steps, Budgets(10))


def test_spread() -> None:
    sizes = dict.fromkeys("abcdefgh", 10)
    assert spread("abcdefgh", sizes, 80) == list("abcdefgh")
    chosen = spread("abcdefgh", sizes, 40)
    assert len(chosen) == 4 and chosen not in (list("abcd"), list("efgh"))
    assert spread("abc", {"a": 30, "b": 5, "c": 5}, 12) == ["b", "c"]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=12),
    device=st.integers(1, 5000),
    host=st.one_of(st.none(), st.integers(0, 8000)),
    disk=st.one_of(st.none(), st.integers(0, 10_000)),
    again=st.lists(st.integers(0, 11), max_size=4),
)
def test_plans_keep_every_budget(
    sizes: list[int], device: int, host: int | None, disk: int | None, again: list[int]
) -> None:
    blocks, steps = chain(sizes)
    steps += [Step(f"again{i}", (f"b{n % len(sizes)}",)) for i, n in enumerate(again)]
    try:
        plan = make_plan(blocks, steps, Budgets(device, host, disk), Speeds(3, 1))
    except BudgetTooSmall as exc:
        assert "bytes" in exc.hint or "disk" in exc.hint
        return
    check_plan(plan, device, host, disk)


def check_plan(plan: TierPlan, device: int, host: int | None, disk: int | None) -> None:
    assert plan.homes.keys() == plan.blocks.keys()
    assert plan.device_nbytes <= device
    assert plan.host_nbytes <= (host or 0)
    assert plan.nbytes_at("disk") <= (disk or 0)
    for step in plan.steps:
        assert sum(plan.blocks[n].nbytes for n in step.blocks if plan.homes[n] != "device") <= plan.ring_nbytes
    streams = [n for n, home in plan.homes.items() if home != "device"]
    assert (plan.ring_nbytes > 0) == bool(streams)
    assert plan.prediction.pass_s >= 0
    assert plan.explain()


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    blocks, steps = chain([10**8] * 8, compute_s=0.01)
    plan = make_plan(blocks, steps, Budgets(3 * 10**8, 4 * 10**8, 10**10), Speeds(20, 2))
    for name in ("plan.png", "plan.svg"):
        assert Path(plan.picture(str(tmp_path / name))).stat().st_size > 1000
    with pytest.raises(UsageError, match=r"\.png or \.svg"):
        plan.picture(str(tmp_path / "plan.txt"))


def test_pictures_name_the_unit_they_count_in(tmp_path: Path) -> None:
    """Bars are multiples of 2**30 bytes, in a new picture and in the one that the guide shows."""
    pytest.importorskip("matplotlib")
    blocks, steps = chain([2**30] * 8, compute_s=0.01)
    made = make_plan(blocks, steps, Budgets(3 * 2**30, 4 * 2**30, 2**40), Speeds(20, 2)).picture(
        str(tmp_path / "plan.svg")
    )
    shown = Path(__file__).parents[2] / "docs" / "assets" / "tiers-plan.svg"
    for path, title in ((Path(made), "8 GiB within 3 GiB"), (shown, "15.2 GiB within 8 GiB")):
        words = path.read_text()
        assert f"<!-- {title} of device memory -->" in words and "<!-- GiB (black line: the budget) -->" in words
        assert " GB " not in words
