"""`gamma`: A_jt = (r_j - mean(r)) · γ^(T - t): the step nearest to the reward gets most of it (K2.5 report)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from inspan.credit.base import differ, rewards_of, turn_credit
from inspan.errors import RecipeError
from inspan.trace.records import ChainCredit, Rollout, Scored


def gamma(scored: Sequence[Scored], *, gamma: float = 1.0) -> list[ChainCredit]:
    """Reward minus the group's mean, decayed by `gamma` in (0, 1] a turn, counted back from the session's last turn.

    At 1.0 it is `group_mean`. A sub-agent that is trained too counts back from its own last turn.
    """
    if not 0.0 < gamma <= 1.0:
        raise RecipeError(f"gamma is {gamma}", where="train.gamma", hint="it decays: above 0, at most 1")
    rewards = rewards_of(scored)
    if not differ(rewards.values()):
        return []
    mean = fmean(rewards.values())

    def of_turn(index: int) -> Callable[[int], float]:
        to_go = turns_to_go(scored[index].rollout)
        return lambda turn: (rewards[index] - mean) * gamma ** to_go[turn]

    return turn_credit(scored, {index: of_turn(index) for index in rewards})


def turns_to_go(rollout: Rollout) -> dict[int, int]:
    """How many turns of its session come after each call that sampled something (by index of the call)."""
    turns: dict[str, list[int]] = {}
    for index, call in enumerate(rollout.calls):
        if call.node is not None:
            turns.setdefault(call.session, []).append(index)
    return {index: len(of) - 1 - place for of in turns.values() for place, index in enumerate(of)}
