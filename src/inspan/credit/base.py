"""What the credit rules share. Contract: a rule turns one scored group into chains with per-token advantages.

Invariants of every rule
- A rollout counts once in the baseline, however many chains it has; one without a reward, or not trainable, not at all.
- A group with fewer than two members left, or without any difference between them, yields nothing.
- Each trained token has weight 1.0 in exactly one chain; every other token has advantage and weight 0.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from inspan.trace.chains import trained_chains
from inspan.trace.records import Chain, ChainCredit, Scored

EQUAL = 1e-9
"""Rewards that differ by no more are equal."""


class Rule(Protocol):
    """A credit rule: one group in, its chains with advantages out. Keyword parameters come from the recipe."""

    def __call__(self, scored: Sequence[Scored], /) -> list[ChainCredit]:
        """Credit one group; `ChainCredit.rollout` is the index in `scored`, `group` is 0."""
        ...


def rewards_of(scored: Sequence[Scored]) -> dict[int, float]:
    """The rewards that count, by index in the group; empty when fewer than two do."""
    found = {i: one.reward for i, one in enumerate(scored) if one.reward is not None and one.rollout.trainable}
    return found if len(found) >= 2 else {}


def differ(values: Iterable[float]) -> bool:
    """Whether there is any difference to learn from."""
    known = list(values)
    return bool(known) and max(known) - min(known) > EQUAL


def constant_credit(scored: Sequence[Scored], advantages: Mapping[int, float]) -> list[ChainCredit]:
    """Every trained token of a rollout gets the rollout's advantage."""
    return turn_credit(scored, {index: _always(value) for index, value in advantages.items()})


def turn_credit(scored: Sequence[Scored], advantages: Mapping[int, Callable[[int], float]]) -> list[ChainCredit]:
    """Every trained token gets the advantage of its turn (the index of its call in the rollout)."""
    credits: list[ChainCredit] = []
    for index, of_turn in advantages.items():
        for chain in trained_chains(scored[index].rollout):
            known = {
                turn: of_turn(turn) for turn in {t for t, on in zip(chain.turns, chain.trained, strict=True) if on}
            }
            values = tuple(known[t] if on else 0.0 for t, on in zip(chain.turns, chain.trained, strict=True))
            credits.append(ChainCredit(chain, values, tuple(map(float, chain.trained)), rollout=index, group=0))
    return credits


def trained_turns(chain: Chain) -> set[int]:
    """The calls (by index in the rollout) whose tokens a chain trains."""
    return {turn for turn, on in zip(chain.turns, chain.trained, strict=True) if on}


def _always(value: float) -> Callable[[int], float]:
    return lambda _: value
