"""Credit rules by name, and the crediting of groups. Contract: what yields no gradient is counted, with its reason."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from inspan.config.recipe import nearest
from inspan.credit.base import rewards_of
from inspan.credit.gamma import gamma
from inspan.credit.group_mean import group_mean
from inspan.credit.group_mean_std import group_mean_std
from inspan.credit.per_turn import per_turn
from inspan.errors import RecipeError
from inspan.trace.chains import trained_chains
from inspan.trace.records import ChainCredit, Scored

RULES: dict[str, Callable[..., list[ChainCredit]]] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "per_turn": per_turn,
    "gamma": gamma,
}
"""The credit rules that a recipe can name."""


class Dropped(StrEnum):
    """Why a group yields nothing."""

    TOO_FEW = "too_few"  # fewer than two members have a reward
    EQUAL = "equal"  # all have the same reward: there is no gradient
    UNTRAINED = "untrained"  # rewards differ, but no token is to be trained


@dataclass(slots=True)
class BatchCredit:
    """The credits of a batch: rollouts numbered through the batch, groups by their place in it."""

    credits: list[ChainCredit] = field(default_factory=list[ChainCredit])
    dropped: Counter[Dropped] = field(default_factory=Counter[Dropped])


def resolve(name: str) -> Callable[..., list[ChainCredit]]:
    """The rule of a name; RecipeError, naming the nearest, when there is none."""
    if name not in RULES:
        close = nearest(name, RULES)
        hint = f"did you mean {close!r}?" if close else f"known: {', '.join(RULES)}"
        raise RecipeError(f"unknown credit rule {name!r}", where="train.credit", hint=hint)
    return RULES[name]


def credit_group(
    rule: str,
    scored: Sequence[Scored],
    params: Mapping[str, Any] | None = None,
    *,
    group: int = 0,
    first_rollout: int = 0,
    keep: Collection[int] | None = None,
) -> tuple[list[ChainCredit], Dropped | None]:
    """Credit one group; the second value says why it was dropped, or is None.

    `keep` thins: only these members (indices) are trained, while all still count in the baseline. Members are numbered
    from `first_rollout`. Raises RecipeError for parameters that the rule does not take.
    """
    function = resolve(rule)
    known = list(inspect.signature(function).parameters)[1:]
    for key in params or {}:
        if key not in known:
            hint = f"it takes {', '.join(known) or 'none'}"
            raise RecipeError(f"unknown parameter {key!r}", where=f"credit {rule}", hint=hint)
    credits = function(scored, **(params or {}))
    if not credits:
        return [], _reason(scored)
    if keep is not None:
        credits = [credit for credit in credits if credit.rollout in keep]
    numbered = [dataclasses.replace(c, rollout=first_rollout + c.rollout, group=group) for c in credits]
    return numbered, None if numbered else Dropped.UNTRAINED


def credit_batch(
    rule: str,
    groups: Sequence[Sequence[Scored]],
    params: Mapping[str, Any] | None = None,
    *,
    keep: Sequence[Collection[int] | None] | None = None,
) -> BatchCredit:
    """Credit the groups of an update; `keep` gives the kept members of each group (None: all)."""
    batch = BatchCredit()
    first = 0
    for index, scored in enumerate(groups):
        kept = None if keep is None else keep[index]
        credits, reason = credit_group(rule, scored, params, group=index, first_rollout=first, keep=kept)
        batch.credits += credits
        if reason is not None:
            batch.dropped[reason] += 1
        first += len(scored)
    return batch


def _reason(scored: Sequence[Scored]) -> Dropped:
    counted = rewards_of(scored)
    if not counted:
        return Dropped.TOO_FEW
    if not any(trained_chains(scored[index].rollout) for index in counted):
        return Dropped.UNTRAINED
    return Dropped.EQUAL
