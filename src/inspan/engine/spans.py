"""Where to cut the decode block for attention. Contract: pure; a span's keys are read as far as its longest row needs.

Attention over a block of rows reads every row as far as the longest one; it is bound by memory, so with uneven rows
half of what is read may be padding. Cutting the block into spans of neighbours saves reading, each cut costs a call.
"""

from __future__ import annotations

import numpy as np

CALL_BYTES = 400_000
"""What one more attention call costs, in bytes of keys and values that could be read instead (some 25 µs)."""


def cut(lengths: np.ndarray, cost: float) -> np.ndarray:
    """Starts of spans of `lengths` (first is 0), so that Σ rows · longest + cost · spans is small.

    Cuts in two wherever that saves most, and goes on with the halves: within some 10 % of the optimum on uneven rows,
    and fast enough to repeat.
    """
    starts: list[int] = []
    work = [(0, len(lengths))]
    while work:
        first, last = work.pop()
        starts.append(first)
        part = lengths[first:last]
        count = last - first
        whole = count * part.max()
        if count < 2 or whole <= cost:
            continue
        left = np.maximum.accumulate(part)[:-1]
        right = np.maximum.accumulate(part[::-1])[::-1][1:]
        before = np.arange(1, count)
        total = before * left + (count - before) * right
        at = int(total.argmin())
        if total[at] + cost < whole:
            middle = first + at + 1
            starts.pop()
            work += [(middle, last), (first, middle)]
    return np.array(starts, dtype=np.int64)
