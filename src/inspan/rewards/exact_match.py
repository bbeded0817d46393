"""`exact_match`: all or nothing, and the exact row accuracy that reports show."""

from __future__ import annotations

from collections import Counter

from inspan.rewards.base import Term
from inspan.rewards.tables import normalise, parse_table, truth_rows
from inspan.trace.records import Rollout


def is_exact(rollout: Rollout) -> bool | None:
    """Whether the answer is the true one (a table: the same rows, in any order); None without a true answer."""
    truth = rollout.task.answer
    if truth is None:
        return None
    if rollout.answer is None:
        return False
    if isinstance(truth, str):
        return normalise(rollout.answer) == normalise(truth)
    return Counter(parse_table(rollout.answer, rollout.task.columns)) == Counter(truth_rows(truth))


def row_accuracy(rollout: Rollout) -> float | None:
    """Share of the true rows that the answer holds exactly (a string answer is one row); None without a true answer."""
    truth = rollout.task.answer
    if truth is None or isinstance(truth, str):
        exact = is_exact(rollout)
        return None if exact is None else float(exact)
    rows = Counter(truth_rows(truth))
    found = rows & Counter(parse_table(rollout.answer or "", rollout.task.columns))
    return found.total() / rows.total() if rows else 0.0


def exact_match() -> Term:
    """1.0 when the answer is the true one, else 0.0."""

    def term(rollout: Rollout) -> float | None:
        exact = is_exact(rollout)
        return None if exact is None else float(exact)

    return term
