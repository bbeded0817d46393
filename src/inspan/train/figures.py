"""The figures of an update, from its scored groups. Contract: pure; a figure without rollouts is left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from inspan.rewards.metrics import mean_metrics, rollout_metrics
from inspan.trace.records import Rollout, Scored
from inspan.trace.steps import StepTree

SHOWN = (
    "item_f1",
    "exact",
    "f1",
    "output_recall",
    "precision",
    "trajectory_recall",
    "answer_found",
    "prune_accuracy",
    "pruned",
    "tool_calls_per_turn",
    "turns",
    "critical_steps",
    "parallel_width",
    "tool_calls",
    "invalid_calls",
    "critical_path_s",
    "failed",
)
BY_KIND = ("item_f1", "f1", "critical_steps", "parallel_width", "spawn_rate", "multi_spawn_rate")


def update_figures(groups: Sequence[Sequence[Scored]], *, width: int | None) -> dict[str, Any]:
    """Means over all scored rollouts of an update, by kind of task where that matters, and of each reward term."""
    scored = [one for group in groups for one in group if one.reward is not None]
    rows = [(one, _figures(one.rollout, width)) for one in scored]
    figures: dict[str, Any] = {"rollouts": sum(len(group) for group in groups), "scored": len(scored)}
    if not rows:
        return figures
    means = mean_metrics(row for _, row in rows)
    figures["reward"] = fmean(one.reward for one in scored if one.reward is not None)
    figures |= {name: means[name] for name in (*SHOWN, "spawn_rate", "multi_spawn_rate", "recovery") if name in means}
    figures["terms"] = mean_metrics({k: v for k, v in one.terms.items() if v is not None} for one in scored)
    by_kind: dict[str, list[Mapping[str, float]]] = defaultdict(list)
    for one, row in rows:
        by_kind[one.rollout.task.kind].append(row)
    for name in BY_KIND:
        kinds = {kind: mean_metrics(found).get(name) for kind, found in sorted(by_kind.items())}
        figures[f"{name}_by_kind"] = {kind: value for kind, value in kinds.items() if value is not None}
    return figures


def _figures(rollout: Rollout, width: int | None) -> dict[str, float]:
    row = rollout_metrics(rollout, width=width)
    return row | {"spawn_rate": float(row["spawned"] > 0), "multi_spawn_rate": float(row["spawned"] > 1)}


def rollout_success(rollout: Rollout, width: int | None = None) -> float | None:
    """How well a rollout did, in [0, 1], for the task sampler; None when its task has no true answer."""
    figures = rollout_metrics(rollout, width=width)
    return figures.get("f1", figures.get("item_f1"))


def trajectory(scored: Scored, *, update: int, arm: str, width: int | None) -> dict[str, Any]:
    """A rollout to read: what the report shows."""
    rollout = scored.rollout
    tree = StepTree(rollout.sessions, rollout.calls, width=width)
    return {
        "update": update,
        "arm": arm,
        "id": rollout.id,
        "task": {"prompt": rollout.task.prompt, "kind": rollout.task.kind, "answer": rollout.task.answer},
        "reward": scored.reward,
        "terms": scored.terms,
        "terminal": rollout.terminal.value,
        "answer": rollout.answer,
        "critical_steps": tree.total(),
        "sessions": [_session(rollout, session.id) for session in rollout.sessions],
    }


def _session(rollout: Rollout, id: str) -> dict[str, Any]:
    session = next(s for s in rollout.sessions if s.id == id)
    nodes = {node.id: node for node in rollout.nodes}
    last = max((node.id for node in rollout.nodes if node.session == id), default=None)
    messages: list[Mapping[str, Any]] = []
    at = last
    while at is not None:
        messages.append(nodes[at].message)
        at = nodes[at].parent
    return {
        "id": session.id,
        "agent": session.agent,
        "policy": session.policy,
        "parent": session.parent,
        "parent_call": session.parent_call,
        "messages": [{k: v for k, v in m.items() if k != "tools"} for m in reversed(messages)],
    }
