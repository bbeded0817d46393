"""The columns of the result table, shared by the terminal and the page. Contract: pure data and formatting.

An arm is a mapping with (some of) these keys; what is missing or not a number is shown as a dash, never as zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DASH = "–"


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of an arm. `better` is +1 when more is better, -1 when less is, 0 when it is neither."""

    key: str
    label: str
    digits: int
    better: int
    about: str

    def text(self, arm: Mapping[str, Any]) -> str:
        """The arm's figure as text."""
        number = numeric(arm.get(self.key))
        return DASH if number is None else f"{number:,.{self.digits}f}"


COLUMNS = (
    Column("n", "n", 0, 0, "held-out tasks"),
    Column("item_f1", "item F1", 3, 1, "item-level F1, rows aligned on their key columns"),
    Column("exact", "exact", 3, 1, "share of rows that are right in every cell"),
    Column("f1", "F1", 3, 1, "F1 of the ranked chunks against those that hold a fact of the question"),
    Column("output_recall", "output recall", 3, 1, "share of the facts that a chunk of the answer holds"),
    Column("precision", "precision", 3, 1, "share of the answer's chunks that hold a fact"),
    Column("trajectory_recall", "trajectory recall", 3, 1, "share of the facts that were seen at any time"),
    Column("answer_found", "answer found", 3, 1, "share of answers with a chunk that holds the answer itself"),
    Column("prune_accuracy", "prune accuracy", 3, 1, "share of the pruned chunks that hold no fact"),
    Column("ndcg", "nDCG", 3, 1, "ranking of the answer's chunks, a fact counted once"),
    Column("tool_calls_per_turn", "calls a turn", 2, 0, "tool calls of a turn that calls tools"),
    Column("turns", "turns", 1, 0, "model calls a rollout"),
    Column("critical_steps", "critical steps", 1, -1, "steps on the longest path: Σ own + slowest sub-agent"),
    Column("parallel_width", "parallel width", 2, 0, "assigned tasks / stages that assign"),
    Column("tool_calls", "tool calls", 1, 0, "tool calls a rollout, sub-agents included"),
    Column("spawn_rate", "spawn rate", 2, 0, "share of rollouts that assign a task"),
    Column("invalid_calls", "invalid calls", 2, -1, "tool calls that do not parse or fit their schema, a rollout"),
    Column("recovery", "recovery", 2, 1, "share of failed tool calls that a later one of the session made good"),
    Column("failed", "failed", 2, -1, "share of rollouts in which the harness raised or ran out of time"),
    Column("critical_path_s", "critical path s", 2, -1, "time along the critical path on declared latencies"),
)

OF_TABLES = ("item_f1", "exact", "parallel_width", "spawn_rate", "critical_path_s")
OF_RETRIEVAL = (
    "f1", "output_recall", "precision", "trajectory_recall", "answer_found", "prune_accuracy", "ndcg",
    "tool_calls_per_turn", "turns",
)  # fmt: skip
KINDS = ("wide", "deep", "mixed", "long", "narrow")
ARMS = ("warm_start", "single_agent", "trained")


def shown(arms: Mapping[str, Mapping[str, Any]]) -> list[Column]:
    """The columns to show: those of tables or of retrieval, whichever the arms have; `recovery` only where a tool
    failed, `failed` only where a harness did."""

    def told(column: Column) -> bool:
        found = [numeric(arm.get(column.key)) for arm in arms.values()]
        return any(found) if column.key == "failed" else any(one is not None for one in found)

    absent = OF_TABLES if any("f1" in arm for arm in arms.values()) else OF_RETRIEVAL
    return [c for c in COLUMNS if c.key not in absent and (c.key not in ("recovery", "failed") or told(c))]


def numeric(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def title(name: str) -> str:
    """A key as a person reads it: "warm_start" → "warm start"."""
    return name.replace("_", " ")


def tables(group: Any, order: tuple[str, ...]) -> dict[str, Mapping[str, Any]]:
    """The named tables of a group: those in `order` first, then the others, non-tables left out."""
    if not isinstance(group, Mapping):
        return {}
    names = [n for n in order if n in group] + [n for n in group if n not in order]
    return {str(n): group[n] for n in names if isinstance(group[n], Mapping)}


def duration(seconds: float) -> str:
    """Seconds as a person reads them: 47 s, 3 min 20 s, 2 h 5 min."""
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
