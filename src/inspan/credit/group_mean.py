"""`group_mean`: A_j = r_j - mean(r). K2.5 (arXiv 2602.02276), Composer 2 (arXiv 2603.24477), Dr. GRPO (2503.20783)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from inspan.credit.base import constant_credit, differ, rewards_of
from inspan.trace.records import ChainCredit, Scored


def group_mean(scored: Sequence[Scored]) -> list[ChainCredit]:
    """Reward minus the group's mean, for every token of the rollout; no division by the deviation."""
    rewards = rewards_of(scored)
    if not differ(rewards.values()):
        return []
    mean = fmean(rewards.values())
    return constant_credit(scored, {index: reward - mean for index, reward in rewards.items()})
