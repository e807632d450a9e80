"""Texts that arrive as token ids: packed as the tokenizer would pack them, and checked, since an encoder trusts its ids."""

from __future__ import annotations

from collections.abc import Sequence

from anytorch.errors import InputError
from anytorch.text.embed.tokens import Tokens


def pack_ids(rows: Sequence[Sequence[int]], *, vocabulary: int, max_length: int) -> Tokens:
    """Token ids of one text per row, as the model's own tokenizer gives them (its special tokens included).

    Raises InputError for an id the model does not have, an empty row, and one longer than `max_length`: cutting it would
    lose the token that ends a text.

    >>> pack_ids([[101, 102]], vocabulary=30522, max_length=256).starts.tolist()
    [0, 2]
    """
    import numpy as np

    lengths = [len(row) for row in rows]
    for number, length in enumerate(lengths):
        if not 1 <= length <= max_length:
            raise InputError(
                f"text {number} has {length} token ids; the model takes 1 to {max_length}",
                hint="cut the ids into pieces, each with the special tokens the tokenizer adds",
            )
    starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    flat = [number for row in rows for number in row]
    for place, number in enumerate(flat):
        if type(number) is not int or not 0 <= number < vocabulary:
            text = int(np.searchsorted(starts, place, side="right")) - 1
            raise InputError(
                f"text {text} has the token id {str(number)[:40]}; the model's ids go from 0 to {vocabulary - 1}",
                hint="use the model's own tokenizer, or send texts",
            )
    return Tokens(np.array(flat, np.int32), starts, 0)
