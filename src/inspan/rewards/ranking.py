"""Figures of a ranked list against facts, of which each is held by one or more items. Contract: pure; all in [0, 1].

A fact counts once, by the first item that holds it: listing all chunks that say the same earns no more than one. Where
each fact is held by one item these are the usual precision, recall, nDCG with binary gains, and reciprocal rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

Facts = Sequence[Collection[str]]


def recall(items: Collection[str], facts: Facts) -> float:
    """Share of the facts that an item holds; 0 without facts."""
    found = set(items)
    return sum(not found.isdisjoint(fact) for fact in facts) / len(facts) if facts else 0.0


def precision(items: Sequence[str], facts: Facts) -> float:
    """Share of the items that hold a fact; 0 of an empty list."""
    good = frozenset().union(*facts)
    return sum(item in good for item in items) / len(items) if items else 0.0


def f_beta(precision: float, recall: float, beta: float) -> float:
    """(1 + β²)·P·R / (β²·P + R): recall weighs β times as much as precision."""
    below = beta * beta * precision + recall
    return (1 + beta * beta) * precision * recall / below if below > 0 else 0.0


def ndcg(items: Sequence[str], facts: Facts) -> float:
    """Gain 1 at each place whose item holds a fact that none before it held; ideal: all facts at the top."""
    left = [set(fact) for fact in facts]
    gain = 0.0
    for place, item in enumerate(items):
        rest = [fact for fact in left if item not in fact]
        if len(rest) < len(left):
            gain += 1 / math.log2(place + 2)
            left = rest
    ideal = sum(1 / math.log2(place + 2) for place in range(len(facts)))
    return gain / ideal if ideal else 0.0


def reciprocal_rank(items: Sequence[str], facts: Facts) -> float:
    """1 / the place of the first item that holds a fact; 0 when none does."""
    good = frozenset().union(*facts)
    return next((1 / place for place, item in enumerate(items, 1) if item in good), 0.0)
