"""What a mask variable leaves visible, and why: pure functions with CUDA's own rules.

They are the rules torch.cuda applies before it counts by NVML (torch 2.13 `_parse_visible_devices`, measured against a
mock NVML in the research page, section 3):

    unset           every device              "1gpu2"     the digits in front: device 1
    ""  "-1"        none                      "GPU-ab"    the one card whose UUID begins so
    "0,0"           none (a repeat)           "MIG-…"     not known without the driver
    "0,7" of 2      device 0 (stops at 7)     "GPU-ab,1"  the first only (the kinds may not be mixed)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile

from anytorch.counts import counted
from anytorch.values import dataclass


@dataclass(frozen=True)
class MaskNote:
    """One thing worth telling about a mask. Codes: empty, minus-one, repeated, beyond, junk, unknown-uuid,
    ambiguous-uuid, mixed, mig, many-masks."""

    code: str
    text: str


@dataclass(frozen=True)
class Mask:
    text: str | None  # the variable's value; None: it is not set
    visible: tuple[int, ...] | None  # physical indices in the order the program sees them; None: only the driver knows
    notes: tuple[MaskNote, ...] = ()

    @property
    def hides_all(self) -> bool:
        return self.visible == ()

    @property
    def codes(self) -> tuple[str, ...]:
        return tuple(note.code for note in self.notes)


def visible(mask: str | None, count: int, uuids: Sequence[str] = ()) -> Mask:
    """What `mask` leaves of `count` devices whose UUIDs, in NVML order, are `uuids`.

    >>> visible("1,0", 2).visible
    (1, 0)
    """
    if mask is None:
        return Mask(None, tuple(range(count)))
    if not mask.strip():
        return Mask(mask, (), (MaskNote("empty", "it is set to nothing, which hides every device"),))
    if mask.startswith("MIG-"):
        slices = list(takewhile(lambda part: part.startswith("MIG-"), mask.split(",")))
        if len(set(slices)) < len(slices):
            return Mask(mask, (), (MaskNote("repeated", "a MIG slice is named twice, which hides every device"),))
        text = "it names a MIG slice, which only the driver can count: NVML-based counting is off"
        return Mask(mask, None, (MaskNote("mig", text),))
    if mask.startswith("GPU-"):
        return _by_uuid(mask, uuids)
    return _by_number(mask, count)


def _by_number(mask: str, count: int) -> Mask:
    chosen: list[int] = []
    seen: set[int] = set()
    notes: list[MaskNote] = []
    stopped = False  # by an index beyond the count; a repeat after it still empties the set, as in torch
    for part in mask.split(","):
        item = part.strip()
        match = re.match(r"[+-]?\d+", item, re.ASCII)
        number = int(match.group()[:18]) if match else -1  # more digits are beyond any count all the same
        if number < 0:
            code = "minus-one" if match else "junk"
            what = "is below zero" if match else "is not a number"
            notes.append(MaskNote(code, f"{item!r} {what}, which ends the list there"))
            break
        if match and match.group() != item:
            notes.append(MaskNote("junk", f"{item!r} is read as {number}: what follows the digits is ignored"))
        if number in seen:
            notes.append(MaskNote("repeated", f"device {number} is named twice, which hides every device"))
            return Mask(mask, (), tuple(notes))
        seen.add(number)
        if number >= count and not stopped:
            stopped = True
            have = f"there are {count}, counted from 0" if count != 1 else "there is only device 0"
            notes.append(MaskNote("beyond", f"device {number} does not exist ({have}), which ends the list there"))
        if not stopped:
            chosen.append(number)
    return Mask(mask, tuple(chosen), tuple(notes))


def _by_uuid(mask: str, uuids: Sequence[str]) -> Mask:
    chosen: list[int] = []
    notes: list[MaskNote] = []
    parts = mask.split(",")
    for at, part in enumerate(parts):
        if part in parts[:at]:
            notes.append(MaskNote("repeated", f"{part} is named twice, which hides every device"))
            return Mask(mask, (), tuple(notes))
        if not part.startswith("GPU-"):
            notes.append(
                MaskNote("mixed", f"{part!r} is not a GPU- UUID like the first one, which ends the list there")
            )
            parts = parts[:at]
            break
    for part in parts:
        matches = [index for index, uuid in enumerate(uuids) if uuid.startswith(part)]
        if len(matches) != 1:
            code = "ambiguous-uuid" if matches else "unknown-uuid"
            what = f"fits {len(matches)} cards" if matches else "fits no card here"
            notes.append(MaskNote(code, f"{part} {what}, which ends the list there"))
            break
        if matches[0] in chosen:
            notes.append(MaskNote("repeated", f"{part} names device {matches[0]} again, which hides every device"))
            return Mask(mask, (), tuple(notes))
        chosen.append(matches[0])
    return Mask(mask, tuple(chosen), tuple(notes))


def rocm_visible(env: Mapping[str, str], count: int, uuids: Sequence[str] = ()) -> Mask:
    """What the ROCm variables leave of `count` devices, in KFD order.

    ROCR_VISIBLE_DEVICES is applied first; HIP_VISIBLE_DEVICES (or, where that is not set, CUDA_VISIBLE_DEVICES) then
    numbers what is left.
    """
    lower = visible(env.get("ROCR_VISIBLE_DEVICES"), count, uuids)
    name = next((n for n in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if n in env), None)
    if name is None or lower.visible is None:
        return lower
    left = lower.visible
    upper = visible(env[name], len(left), [uuids[i] for i in left if i < len(uuids)])
    notes = lower.notes + upper.notes
    if lower.text is not None:
        text = f"{name} numbers only what ROCR_VISIBLE_DEVICES leaves: {counted(len(left), 'device')}"
        notes += (MaskNote("many-masks", text),)
    if upper.visible is None:
        return Mask(env[name], None, notes)
    return Mask(env[name], tuple(left[i] for i in upper.visible), notes)
