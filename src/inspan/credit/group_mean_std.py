"""`group_mean_std`: A_j = (r_j - mean(r)) / (std(r) + ε). GRPO (arXiv 2402.03300), the baseline that others mend.

Dividing by the deviation makes a group with tiny differences weigh as much as any: see the zoo.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from inspan.credit.base import constant_credit, differ, rewards_of
from inspan.trace.records import ChainCredit, Scored


def group_mean_std(scored: Sequence[Scored], *, eps: float = 1e-6) -> list[ChainCredit]:
    """Reward minus the group's mean, over the group's standard deviation (of the population) plus `eps`."""
    rewards = rewards_of(scored)
    if not differ(rewards.values()):
        return []
    mean, std = fmean(rewards.values()), pstdev(rewards.values())
    return constant_credit(scored, {index: (reward - mean) / (std + eps) for index, reward in rewards.items()})
