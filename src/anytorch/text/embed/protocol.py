"""The interface of an encoder: token ids of many texts in, one pooled vector per text out.

**Texts come packed.** `ids` is int32[total]: the tokens of all texts one after the other, no padding, special tokens
included. `starts` is int32[n + 1]: text i is `ids[starts[i]:starts[i + 1]]`, at least one token long and at most the
spec's `max_positions`. The result is float32[n, width], C-contiguous, row i for text i; it is not normalised and belongs
to the caller (never a view of memory that the next call overwrites).

**A token budget** (`batch_tokens`) is how much one call of `run` may hold, in tokens, so that memory per call is bounded
whatever the texts' lengths. For an encoder that computes on packed tokens (`padded` False) a batch costs the sum of
its lengths; for one that pads, the number of texts times the longest. A batch always holds at least one text, even one
longer than the budget. `batches` below is the one place that counts.

**A text's vector must not depend on its neighbours** in the batch: bit-identical on the CPU path.

Pooling is named as sentence-transformers names it, one or several (their vectors are then joined): "cls", "mean", "max",
"mean_sqrt_len_tokens", "weightedmean" (weights 1, 2, 3, …), "lasttoken". `width` is the sum over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from anytorch.text.checkpoints.checkpoint import Floats, Ints

POOLINGS = ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


@runtime_checkable
class Encoder(Protocol):
    """One model on one device. `run` may be called from any thread, one call at a time (the engine holds a lock)."""

    # An encoder with a true attribute `normalize` gives rows of length 1.
    width: int  # features of one pooled vector
    padded: bool  # does a batch cost texts × longest (True), or the sum of its lengths (False)?

    def run(self, ids: Ints, starts: Ints) -> Floats:
        """Pooled vectors, float32[n, width], on the host. Raises an error `is_out_of_memory` knows when it is that."""
        ...

    def describe(self) -> dict[str, Any]:
        """For `explain()`: device, dtype, kernels, quantization, threads, weight_nbytes, … as plain JSON values."""
        ...

    def close(self) -> None:
        """Free the memory. May be called twice; `run` afterwards is an error."""
        ...


class Pending(Protocol):
    """A batch that a device is working on."""

    def result(self) -> Floats:
        """Wait for it; as `Encoder.run`. Called once."""
        ...


@runtime_checkable
class AsyncEncoder(Encoder, Protocol):
    """An encoder that can be given the next batch before the last one's answer is fetched (a GPU with streams).

    The engine keeps `in_flight` batches under way. `ids` and `starts` may be overwritten as soon as `submit` returns.
    `submit` and `result` may be called from several threads at once, and a result may be left unfetched for long.

    An encoder may take two more arguments, `submit(ids, starts, out, places)`: then text i's vector is written to row
    `places[i]` of `out`, float32[…, width], by the time `result` returns.
    """

    in_flight: int

    def submit(self, ids: Ints, starts: Ints) -> Pending: ...


def batches(lengths: Sequence[int], budget: int, *, padded: bool) -> list[range]:
    """Cut texts, in this order, into batches of at most `budget` tokens. Pure.

    >>> batches([3, 3, 3, 9, 1], 6, padded=False)
    [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    """
    found: list[range] = []
    begin = total = longest = 0
    for index, length in enumerate(lengths):
        cost = max(longest, length) * (index - begin + 1) if padded else total + length
        if index > begin and cost > budget:
            found.append(range(begin, index))
            begin, total, longest = index, 0, 0
        total += length
        longest = max(longest, length)
    if begin < len(lengths):
        found.append(range(begin, len(lengths)))
    return found
