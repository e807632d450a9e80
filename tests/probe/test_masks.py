from __future__ import annotations

import pytest

from anytorch.probe.masks import rocm_visible, visible

UUIDS = ("GPU-aaaa1111", "GPU-bbbb2222")


# The first ten rows are measured: torch 2.13's own _device_count_nvml against a mock NVML with two cards
# (research page, section 3 row 2). The others follow from torch 2.13's _parse_visible_devices, read in the wheel.
@pytest.mark.parametrize(
    ("mask", "expected", "codes"),
    [
        (None, (0, 1), ()),
        ("1", (1,), ()),
        ("0,1", (0, 1), ()),
        ("-1", (), ("minus-one",)),
        ("", (), ("empty",)),
        ("0,0", (), ("repeated",)),
        ("GPU-bbbb", (1,), ()),
        ("7", (), ("beyond",)),
        ("1gpu2", (1,), ("junk",)),
        ("MIG-x", None, ("mig",)),
        ("1,0", (1, 0), ()),
        (" 1 , 0 ", (1, 0), ()),
        ("0,-1,1", (0,), ("minus-one",)),
        ("0,7,1", (0,), ("beyond",)),
        ("7,7", (), ("beyond", "repeated")),
        ("gpu", (), ("junk",)),
        ("0,,1", (0,), ("junk",)),
        ("+1", (1,), ()),
        ("GPU-", (), ("ambiguous-uuid",)),
        ("GPU-cccc", (), ("unknown-uuid",)),
        ("GPU-bbbb,GPU-aaaa", (1, 0), ()),
        ("GPU-aaaa,GPU-aaaa", (), ("repeated",)),
        ("GPU-aaaa,GPU-aaaa1", (), ("repeated",)),
        ("GPU-bbbb,0", (1,), ("mixed",)),
        ("9" * 400, (), ("beyond",)),
    ],
)
def test_visible_follows_cuda(mask: str | None, expected: tuple[int, ...] | None, codes: tuple[str, ...]) -> None:
    found = visible(mask, 2, UUIDS)
    assert found.visible == expected
    assert found.codes == codes
    assert found.hides_all == (expected == ())


def test_the_reason_says_what_was_wrong() -> None:
    assert "device 7 does not exist (there are 2, counted from 0)" in visible("0,7", 2).notes[0].text
    assert "only device 0" in visible("3", 1).notes[0].text


@pytest.mark.parametrize(
    "mask", ["1", "0,1", "-1", "", "0,0", "7", "1gpu2", "0,7", "1,0,0", "GPU-bbbb", "0,-1,1", "gpu"]
)
def test_torch_itself_agrees(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own parser over the same two cards: the list it makes, cut where it cuts."""
    torch_cuda = pytest.importorskip("torch.cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    parsed = torch_cuda._parse_visible_devices()
    if parsed and isinstance(parsed[0], str):
        parsed = torch_cuda._transform_uuid_to_ordinals(parsed, list(UUIDS))
    kept = next((parsed[:at] for at, index in enumerate(parsed) if index >= 2), parsed)
    assert visible(mask, 2, UUIDS).visible == tuple(kept)


def test_rocm_numbers_what_rocr_leaves() -> None:
    env = {"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}
    found = rocm_visible(env, 3)
    assert found.visible == (2,)
    assert found.codes == ("many-masks",)
    # HIP_ counts from what is left, so an index of the whole machine falls off the end (SwarmUI issue 565).
    assert rocm_visible({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, 2).visible == ()
    assert rocm_visible({"CUDA_VISIBLE_DEVICES": "1"}, 2).visible == (1,)
    assert rocm_visible({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, 2).visible == (0,)
    assert rocm_visible({}, 2).visible == (0, 1)
