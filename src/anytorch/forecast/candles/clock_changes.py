"""Times in UTC when an exchange changes its clocks: all of its bars move by an hour, and no bar is missing or new.

With a time zone (`--timezone`) none of this is needed. Without one the past is moved to where the last days are: the
weekends and lunch breaks of before are still evidence, which they would not be if only the days since the change were kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytorch.forecast.candles.rhythm_words import DAY

if TYPE_CHECKING:
    import numpy as np

HOUR = DAY // 24
LAST, AGREE = 5, 3  # of so many last dates so many must have the same hours: one day may open and close an hour late


def whole_days(moments: np.ndarray) -> np.ndarray:
    """Midnight of each daily bar's date, each once.

    Where clocks changed around midnight (London's days in UTC begin at 00:00 and then at 23:00), the dates are those that
    the bars would have with the last one's clock time.
    """
    import numpy as np

    moved = (moments - moments[-1] + DAY // 2) % DAY - DAY // 2
    return np.unique(np.where(abs(moved) == HOUR, moments - moved, moments) // DAY * DAY)


def in_hours_of_today(moments: np.ndarray) -> np.ndarray:
    """The same bars, those before the last change of clocks moved to the hours after it.

    A change is seen where the first and the last bar of the dates before lie elsewhere by the same time, on most of them.
    """
    import numpy as np

    dates = moments // DAY
    begins = np.flatnonzero(np.diff(dates, prepend=dates[0] - 1))
    first, last = moments[begins] % DAY, moments[np.append(begins[1:], len(moments)) - 1] % DAY
    hours, counts = np.unique(np.stack([first, last], axis=1)[-LAST:], axis=0, return_counts=True)
    if counts.max() < AGREE:
        return moments
    today = hours[counts.argmax()]
    moved = np.where(first - today[0] == last - today[1], first - today[0], 0)
    if not moved.any():
        return moments
    change = int(np.flatnonzero(moved)[-1]) + 1  # the dates before this one have other hours
    shift = moved[change - 1]
    new = (first[change:] == today[0]) & (last[change:] == today[1])
    if change < AGREE or (moved[:change] == shift).sum() <= change / 2 or new.sum() < AGREE:
        return moments
    before = dates < dates[begins[change]]
    return np.unique(np.where(before, moments - shift, moments))
