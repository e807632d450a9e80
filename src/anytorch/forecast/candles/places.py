"""The origin of candles, for messages: a file has lines and options, a table has rows and arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anytorch.errors import InputError
from anytorch.values import dataclass

MOST_NAMES, LONGEST_NAME = 12, 40  # of a list of columns in a message


@dataclass(frozen=True)
class Source:
    """`name` as a message begins; `unit` is what its rows are called; `in_memory`: the caller's own table, not a file."""

    name: str
    unit: str = "line"
    in_memory: bool = False

    @classmethod
    def of(cls, where: Source | str) -> Source:
        return where if isinstance(where, cls) else cls(str(where))

    def at(self, place: int, column: str = "") -> str:
        return f"{self.name}, {self.unit} {place}" + (f", column {column!r}" if column else "")

    def instrument(self, name: str) -> Source:
        return Source(f"{self.name}, {name}", self.unit, self.in_memory)

    @property
    def mend(self) -> str:
        if self.in_memory:
            return "correct the table, or repair it with repair=True, which reports each change"
        return "correct the file, or repair it with --repair (repair=True), which reports each change"

    def name_columns(self, fields: Sequence[str]) -> str:
        if self.in_memory:
            named = ", ".join(f"{field!r}: NAME" for field in fields)
            return f"rename its columns, or map them: read_candles(…, columns={{{named}}})"
        return f"name them: --columns {','.join(f'{field}=NAME' for field in fields)}"

    @property
    def zone_option(self) -> str:
        return "timezone=" if self.in_memory else "--timezone"


def refused(where: Source | str, place: int, column: str, words: str, hint: str = "") -> InputError:
    """The error for one cell."""
    return InputError(f"{Source.of(where).at(place, column)}: {words}", hint=hint)


def listed(names: Iterable[object]) -> str:
    """Names in quotes, cut short: a file that is no table can have thousands of columns."""
    every = [str(name) for name in names]
    shown = [repr(name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…") for name in every[:MOST_NAMES]]
    more = f" and {len(every) - MOST_NAMES} more" if len(every) > MOST_NAMES else ""
    return (", ".join(shown) or "none") + more
