"""`per_turn`: the outcome for all tokens, per-turn terms for the tokens of their own turn.

A_jt = (o_j - mean(o)) + (c_jt - mean(c)) / max(std(c), 1), where c_jt is what turn t of rollout j earned by per-turn
terms, o_j = r_j - Σ_t c_jt the rest of its reward, and mean(c), std(c) run over all trained turns of the group. The
deviation never divides by less than 1 [D]: normalising must not blow up tiny differences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, pstdev

from inspan.credit.base import differ, rewards_of, trained_turns, turn_credit
from inspan.trace.chains import trained_chains
from inspan.trace.records import ChainCredit, Scored


def per_turn(scored: Sequence[Scored]) -> list[ChainCredit]:
    """Outcome minus the group's mean, plus the turn's own terms normalised over the group's trained turns."""
    rewards = rewards_of(scored)
    outcomes = {i: reward - sum(scored[i].turn_rewards.values()) for i, reward in rewards.items()}
    earned = [
        scored[i].turn_rewards.get(turn, 0.0)
        for i in rewards
        for turn in sorted({t for chain in trained_chains(scored[i].rollout) for t in trained_turns(chain)})
    ]
    if not differ(outcomes.values()) and not differ(earned):
        return []
    outcome_mean, mean = fmean(outcomes.values()), fmean(earned) if earned else 0.0
    scale = max(pstdev(earned), 1.0) if earned else 1.0

    def of_turn(index: int) -> Callable[[int], float]:
        base, parts = outcomes[index] - outcome_mean, scored[index].turn_rewards
        return lambda turn: base + (parts.get(turn, 0.0) - mean) / scale

    return turn_credit(scored, {index: of_turn(index) for index in outcomes})
