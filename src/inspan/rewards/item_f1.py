"""`item_f1`: item-level F1 of a table answer (WideSearch, arXiv 2508.07999), exact match of a string answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from inspan.errors import TaskError
from inspan.rewards.base import Term
from inspan.rewards.tables import Row, normalise, parse_table, truth_rows
from inspan.trace.records import Rollout


class ItemScore(NamedTuple):
    """Precision, recall and F1 over items, each in [0, 1]."""

    precision: float
    recall: float
    f1: float


def score_items(predicted: Sequence[Row], truth: Sequence[Row], keys: Sequence[int]) -> ItemScore:
    """Compare tables cell by cell. Rows are aligned on the cells at `keys`; a row is aligned at most once.

    An item is a cell beyond the key columns (any cell, where all columns are keys): keys stand in the question, and
    copying them earns nothing. Precision is over the items of the predicted rows, at least one row's worth each (a row
    of keys alone is not cheaper than a full one); recall is over the items of the truth.
    """
    if not predicted and not truth:
        return ItemScore(1.0, 1.0, 1.0)
    waiting: dict[Row, list[Row]] = {}
    for row in truth:
        waiting.setdefault(tuple(row[k] for k in keys), []).append(row)
    width = max((len(row) for row in truth), default=0)
    spared = 0 if width == len(keys) else len(keys)
    hits = said = 0
    for row in predicted:
        said += max(len(row), width) - spared
        key = tuple(row[k] if k < len(row) else "" for k in keys)
        if candidates := waiting.get(key):
            best = max(candidates, key=lambda true: _same(row, true))
            candidates.remove(best)
            hits += _same(row, best) - spared
    wanted = sum(len(row) - spared for row in truth)
    precision = hits / said if said else 0.0
    recall = hits / wanted if wanted else 0.0
    return ItemScore(precision, recall, 2 * precision * recall / (precision + recall) if hits else 0.0)


def _same(row: Row, true: Row) -> int:
    return sum(a == b for a, b in zip(row, true, strict=False))


def key_indices(columns: Sequence[str], keys: Sequence[str], *, where: str) -> list[int]:
    """Where the key columns stand; the first column when no key is named. Raises TaskError for an unknown key."""
    for key in keys:
        if key not in columns:
            raise TaskError(f"key {key!r} is no column", where=where, hint=f"columns: {', '.join(columns)}")
    return [list(columns).index(key) for key in keys] or [0]


def item_score(rollout: Rollout) -> ItemScore | None:
    """Item-level score of a rollout's answer; None when its task has no true answer."""
    task = rollout.task
    if task.answer is None:
        return None
    if isinstance(task.answer, str):
        same = rollout.answer is not None and normalise(rollout.answer) == normalise(task.answer)
        return ItemScore(*(float(same),) * 3)
    predicted = parse_table(rollout.answer or "", task.columns)
    return score_items(predicted, truth_rows(task.answer), key_indices(task.columns, task.keys, where=task.id))


def item_f1() -> Term:
    """Item-level F1 in [0, 1]."""

    def term(rollout: Rollout) -> float | None:
        score = item_score(rollout)
        return None if score is None else score.f1

    return term
