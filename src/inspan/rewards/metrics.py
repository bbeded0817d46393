"""What tables and curves show of a rollout. Contract: pure; a figure that is undefined for a rollout is left out.

Metrics are no rewards: they never enter the loss, and are the same for every recipe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from inspan.rewards.exact_match import row_accuracy
from inspan.rewards.item_f1 import item_score
from inspan.rewards.r_finish import finish_rate
from inspan.rewards.retrieval import retrieval_figures
from inspan.trace.records import Rollout, Terminal
from inspan.trace.steps import critical_path_s, measure

SECONDS_PER_TURN = 1.0
"""Declared model time of a turn on the critical path [D]: the ratio to tool latencies is what matters."""


def rollout_metrics(
    rollout: Rollout, *, width: int | None = None, seconds_per_turn: float = SECONDS_PER_TURN
) -> dict[str, float]:
    """The figures of one rollout; `width` is the limit on concurrent sub-agents (None: no limit).

    `failed` (1.0 if the harness raised or ran out of time); `item_f1`, `exact` (exact row accuracy) in [0, 1], or of
    a retrieval task what `retrieval_figures` gives;
    `critical_steps`; `parallel_width` (mean width of the root's stages, 0 when nothing was assigned); `spawned`
    (assigned sub-tasks); `tool_calls`; `invalid_calls`; `turns`; `critical_path_s` (seconds on declared latencies);
    `finish_rate` where something was assigned; `recovery` where a tool failed: the share of failed executions after
    which one succeeded in the same session.
    """
    steps = measure(rollout.sessions, rollout.calls, width=width)
    figures = {
        "failed": float(rollout.terminal in (Terminal.FAILED, Terminal.TIMED_OUT)),
        "critical_steps": float(steps.critical_steps),
        "parallel_width": steps.parallel_width,
        "spawned": float(steps.assigned),
        "tool_calls": float(steps.tool_calls),
        "invalid_calls": float(steps.invalid_calls),
        "turns": float(steps.turns),
        "critical_path_s": critical_path_s(
            rollout.sessions, rollout.calls, rollout.tool_events, seconds_per_turn=seconds_per_turn, width=width
        ),
    }
    found, mended = retrieval_figures(rollout), recovery(rollout)
    score, rows = item_score(rollout), row_accuracy(rollout)
    if found:  # what is asked for is the evidence, not the answer
        figures |= found
    elif score is not None and rows is not None:
        figures |= {"item_f1": score.f1, "exact": rows}
    if steps.assigned:
        figures["finish_rate"] = finish_rate(rollout)
    if mended is not None:
        figures["recovery"] = mended
    return figures


def recovery(rollout: Rollout) -> float | None:
    """Share of failed tool executions that a successful one followed in the same session; None when none failed."""
    owner = {tool_call.id: call.session for call in rollout.calls for tool_call in call.tool_calls}
    sessions = [owner.get(event.call, event.session) for event in rollout.tool_events]
    worked_later: set[str] = set()
    mended: list[bool] = []
    for event, session in zip(reversed(rollout.tool_events), reversed(sessions), strict=True):
        if event.ok:
            worked_later.add(session)
        else:
            mended.append(session in worked_later)
    return fmean(mended) if mended else None


def mean_metrics(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each figure over the rollouts that have it."""
    columns: dict[str, list[float]] = {}
    for row in figures:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in columns.items()}


def summarise(rollouts: Sequence[Rollout], *, width: int | None = None) -> dict[str, float]:
    """One row of a result table: the mean figures of the rollouts that are scored, `n` (their number) and `spawn_rate`
    (share that assigned at least one sub-task). Without any it is `{"n": 0}`."""
    counted = [rollout for rollout in rollouts if rollout.terminal.scored]
    if not counted:
        return {"n": 0}
    figures = [rollout_metrics(rollout, width=width) for rollout in counted]
    return {"n": len(counted), **mean_metrics(figures), "spawn_rate": fmean(row["spawned"] > 0 for row in figures)}
