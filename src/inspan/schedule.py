"""Weight schedules. Contract: pure; a schedule is a function of *progress*, the share of the real updates that is done.

Progress is 0 at the first update and reaches 1 only after the last, so a schedule cannot run on a made-up number of
steps: an anneal that is off by mistake never ends, and a policy learns to farm what should have been annealed away
(seen in a public re-implementation of K2.5's swarm; recipes: λ1 = 0.3, λ2 = 0.2, to zero over 0.6 of the updates).

Invariants: `at` lies between `start` and `end`, moves in one direction, and is exactly `end` from `over` on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from inspan.errors import RecipeError

DEFAULT_OVER = 0.6
"""Share of the updates over which a weight anneals when the recipe does not say [C]."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A weight that goes linearly from `start` to `end` over the first `over` of the updates, then stays."""

    start: float
    end: float
    over: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and math.isfinite(self.end)):
            raise RecipeError(f"a weight goes from {self.start} to {self.end}", hint="give finite numbers")
        if not 0.0 < self.over <= 1.0:
            raise RecipeError(f"over is {self.over}", hint="it is a share of the updates: above 0, at most 1")

    def at(self, progress: float) -> float:
        """The weight at `progress` in [0, 1]; outside it raises ValueError."""
        if not 0.0 <= progress <= 1.0:
            raise ValueError(f"progress is {progress}, not a share of the updates in [0, 1]")
        if progress >= self.over:
            return self.end
        share = progress / self.over
        value = self.start * (1.0 - share) + self.end * share
        low, high = sorted((self.start, self.end))
        return min(max(value, low), high)

    @property
    def constant(self) -> bool:
        """Whether the weight never changes."""
        return self.start == self.end


def constant(value: float) -> Schedule:
    """A weight that never changes."""
    return Schedule(float(value), float(value))


def progress(update: int, updates: int) -> float:
    """The share of a run that is done before its `update`-th (0-based) of `updates` updates."""
    if updates < 1 or not 0 <= update <= updates:
        raise ValueError(f"update {update} of {updates}")
    return update / updates


def parse(value: Any, *, where: str = "weight") -> Schedule:
    """A schedule from a recipe: a number, `{ from, to, over }`, or an object with `from_`, `to` and `over`.

    Raises RecipeError that names the faulty key.
    """
    if isinstance(value, Schedule):
        return value
    if hasattr(value, "from_"):
        value = {"from": value.from_, "to": value.to, "over": value.over}
    number: dict[Any, Any] = {"from": value, "to": value, "over": 1.0}
    given = cast("Mapping[Any, Any]", value) if isinstance(value, Mapping) else number
    known = ("from", "to", "over")
    for key in given:
        if key not in known:
            raise RecipeError(f"unknown key {key!r}", where=where, hint=f"a weight has {', '.join(known)}")
    for key in ("from", "to"):
        if key not in given:
            raise RecipeError(f"{key!r} is missing", where=where, hint="e.g. { from = 0.3, to = 0.0, over = 0.6 }")
    numbers = [_number(given.get(key, DEFAULT_OVER), where, key) for key in known]
    return Schedule(*numbers)


def _number(value: Any, where: str, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecipeError(f"{key} is {value!r}", where=where, hint="give a number")
    return float(value)
