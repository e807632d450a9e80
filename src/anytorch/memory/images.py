"""A block as one run of bytes: which tensor lies where, and which parts of which files hold it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anytorch.memory.sizes import ALIGNMENT, PAGE, round_up
from anytorch.safetensors_files import StoredTensor

if TYPE_CHECKING:
    import torch

MERGED_GAP = 64 * 1024  # bytes between two tensors that are read along rather than begun anew
VECTOR = 16  # bytes a device loads at once: a tensor that starts off such a boundary gets a run of its own


@dataclass(frozen=True)
class View:
    """One tensor of an image."""

    name: str
    dtype: str  # torch's name for it: "bfloat16"
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Piece:
    """A run of bytes of a file and where in the image it belongs.

    `checksums`: of its MiB-long parts (files we wrote ourselves), or None.
    `direct`: file offset and image offset agree modulo the page size, so that it can be read in place past the page cache.
    """

    path: str
    file_offset: int
    nbytes: int
    image_offset: int
    checksums: tuple[int, ...] | None = None
    direct: bool = True


@dataclass(frozen=True)
class Image:
    """`nbytes` is the length of a buffer that holds it, a whole number of pages."""

    name: str
    nbytes: int
    views: tuple[View, ...]
    pieces: tuple[Piece, ...] = ()


def packed(name: str, tensors: Mapping[str, torch.Tensor]) -> Image:
    """An image for tensors in memory, every one on a boundary that suits any device."""
    views, end = [], 0
    for key, tensor in tensors.items():
        start = round_up(end, ALIGNMENT)
        views.append(View(key, dtype_name(tensor.dtype), tuple(tensor.shape), start, tensor.nbytes))
        end = start + tensor.nbytes
    return Image(name, round_up(end, PAGE), tuple(views))


def from_files(name: str, tensors: Iterable[StoredTensor], *, in_place: bool) -> Image:
    """An image whose bytes come from files.

    `in_place`: reads land in the image itself, so offsets agree with the file's modulo the page. Otherwise a device copies
    them from staging buffers, and every run begins where the device's kernels like it.
    """
    views: list[View] = []
    pieces: list[Piece] = []
    end = 0
    for run, direct in runs(tensors, in_place=in_place):
        first = run[0]
        length = run[-1].offset + run[-1].nbytes - first.offset
        if in_place and direct:
            start = round_up(end, PAGE) + first.offset % PAGE
            end = round_up(start + length, PAGE)  # the read covers whole pages: nothing else may lie in them
        else:
            start = round_up(end, ALIGNMENT)
            end = start + length
        sums = first.checksums if first.offset == first.data_start else None
        pieces.append(Piece(first.path, first.offset, length, start, sums, direct))
        views.extend(View(t.name, t.dtype, t.shape, start + t.offset - first.offset, t.nbytes) for t in run)
    return Image(name, round_up(end, PAGE), tuple(views), tuple(pieces))


def runs(tensors: Iterable[StoredTensor], *, in_place: bool) -> list[tuple[list[StoredTensor], bool]]:
    """Neighbours in a file, read together; with whether each run can be read directly."""
    found: list[tuple[list[StoredTensor], bool]] = []
    for tensor in sorted(tensors, key=lambda t: (t.path, t.offset)):
        itemsize = tensor.itemsize
        direct = not in_place or tensor.offset % itemsize == 0
        if found and direct and found[-1][1]:
            last = found[-1][0][-1]
            gap = tensor.offset - (last.offset + last.nbytes)
            aligned = in_place or (tensor.offset - found[-1][0][0].offset) % max(VECTOR, itemsize) == 0
            if tensor.path == last.path and 0 <= gap <= MERGED_GAP and aligned:
                found[-1][0].append(tensor)
                continue
        found.append(([tensor], direct))
    return found


def views_of(image: Image, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """The image's tensors as views of a uint8 buffer that holds it."""
    import torch

    return {
        view.name: buffer[view.offset : view.offset + view.nbytes].view(getattr(torch, view.dtype)).view(view.shape)
        for view in image.views
    }


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
