"""`r_parallel`: pays for parallel sub-agents; cures serial collapse (K2.5 report, arXiv 2602.02276).

It scores concurrency, clip((W - 1) / (W_max - 1), 0, 1) with W = assigned tasks / stages with an assignment, not the
number of assignments: a count lets serial spawning earn it, as `r_parallel_count` is there to show.
"""

from __future__ import annotations

from inspan.errors import RecipeError
from inspan.rewards.base import Term, process
from inspan.trace.records import Rollout
from inspan.trace.steps import measure


def r_parallel(*, w_max: float = 8.0) -> Term:
    """0 when nothing, or never more than one task at a time, was assigned; 1 from a mean width of `w_max` on [D: 8]."""
    if w_max <= 1:
        raise RecipeError(f"w_max is {w_max}", where="r_parallel", hint="give the mean width that earns 1: above 1")

    @process
    def term(rollout: Rollout) -> float:
        width = measure(rollout.sessions, rollout.calls).parallel_width
        return min(max((width - 1.0) / (w_max - 1.0), 0.0), 1.0)

    return term


def r_parallel_count(*, n_max: float = 8.0) -> Term:
    """Pays for the *number* of assigned tasks, up to `n_max`: the faulty form, for the zoo's spawn farming only."""
    if n_max < 1:
        raise RecipeError(f"n_max is {n_max}", where="r_parallel_count", hint="give at least 1")

    @process
    def term(rollout: Rollout) -> float:
        return min(measure(rollout.sessions, rollout.calls).assigned / n_max, 1.0)

    return term
