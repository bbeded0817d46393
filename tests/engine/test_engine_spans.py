"""Cutting the decode block: never worse than leaving it whole, and good where rows are uneven."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inspan.engine.spans import cut


def price(lengths: list[int], starts: list[int], cost: float) -> float:
    """Keys read, padding included, plus the calls."""
    edges = [*starts, len(lengths)]
    return sum((b - a) * max(lengths[a:b]) + cost for a, b in pairwise(edges))


def optimum(lengths: list[int], cost: float) -> float:
    """The best price of all, by dynamic programming."""
    best = [0.0]
    for last in range(1, len(lengths) + 1):
        best.append(min(best[i] + cost + (last - i) * max(lengths[i:last]) for i in range(last)))
    return best[-1]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.sampled_from([1, 50, 400, 5000]))
def test_cuts_cover_the_block_and_never_cost_more_than_none(lengths, cost):
    starts = cut(np.array(lengths), cost).tolist()
    assert starts[0] == 0 and starts == sorted(set(starts)) and starts[-1] < len(lengths)
    assert optimum(lengths, cost) <= price(lengths, starts, cost) <= price(lengths, [0], cost)


def test_a_long_neighbour_is_cut_off_and_equal_rows_stay_together():
    assert cut(np.array([10, 11, 900, 12, 10]), 50).tolist() == [0, 2, 3]
    assert cut(np.full(64, 300), 50).tolist() == [0]


def test_cuts_come_near_the_optimum_on_uneven_rows():
    rng = np.random.default_rng(0)
    found = best = 0.0
    for _ in range(30):
        lengths = rng.integers(100, 1000, 32)
        found += price(lengths.tolist(), cut(lengths, 300).tolist(), 300)
        best += optimum(lengths.tolist(), 300)
    assert found <= 1.15 * best
