"""Detectors of degenerate behaviour: the swarm's part of the failure zoo. Contract: pure; a finding names its evidence.

A *window* is a list of rows, one an update, as `observe` makes them; detectors compare its first and its last third.
A detector needs at least three updates, and says nothing where the rows lack what it looks at.
Thresholds are our defaults [D]. Runs of `recipes/zoo` confirm all but that of `entropy_collapse` (docs/swarm.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from inspan.rewards.metrics import mean_metrics, rollout_metrics
from inspan.trace.records import ChainCredit, Rollout, Scored

Row = Mapping[str, float]

TINY_SPREAD = 0.05
"""A group whose rewards differ by less holds next to no signal."""
LARGE_LIFT = 5.0
"""Advantages spread this many times wider than the rewards: small differences are blown up."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A behaviour that was seen: what it is, the figures that show it, and what cures it."""

    name: str
    what: str
    evidence: dict[str, float]
    remedy: str


def observe(
    groups: Sequence[Sequence[Scored]],
    credits: Sequence[ChainCredit],
    *,
    entropy: float | None = None,
    wide: Collection[str] = ("wide", "mixed"),
    narrow: Collection[str] = ("narrow",),
) -> dict[str, float]:
    """The row of an update. `credits` are those of the same groups (`ChainCredit.group` is the index in `groups`);
    `entropy` is the policy's mean token entropy (nats). `wide` and `narrow` name the kinds of tasks on which
    parallel work pays, and never pays.

    Keys: all of `rollout_metrics` (means), `spawn_rate`, `wide_parallel_rate` (share of wide rollouts with two or more
    sub-tasks at once), `narrow_multi_spawn` (share of narrow ones with more than one sub-task), `repeat_rate` (share of
    sub-tasks assigned before in the same words), `tiny_share` (share of groups with tiny differences blown up).
    """
    rollouts = [scored.rollout for group in groups for scored in group if scored.reward is not None]
    figures = [rollout_metrics(rollout) for rollout in rollouts]
    row = mean_metrics(figures)
    if figures:
        row["spawn_rate"] = fmean(one["spawned"] > 0 for one in figures)
    pairs = list(zip(rollouts, figures, strict=True))
    widths = [one["parallel_width"] for rollout, one in pairs if rollout.task.kind in wide]
    spawns = [one["spawned"] for rollout, one in pairs if rollout.task.kind in narrow]
    if widths:
        row["wide_parallel_rate"] = fmean(width > 1 for width in widths)
    if spawns:
        row["narrow_multi_spawn"] = fmean(spawned > 1 for spawned in spawns)
    repeats = [repeat for rollout in rollouts for repeat in _repeats(rollout)]
    if repeats:
        row["repeat_rate"] = fmean(repeats)
    if groups:
        row["tiny_share"] = fmean(_tiny(group, index, credits) for index, group in enumerate(groups))
    if entropy is not None:
        row["entropy"] = entropy
    return row


def _repeats(rollout: Rollout) -> list[bool]:
    """For each delegated call: whether one with the same arguments came before it."""
    delegated = {session.parent_call for session in rollout.sessions}
    seen: set[tuple[str, str]] = set()
    repeats: list[bool] = []
    for call in rollout.calls:
        for tool_call in call.tool_calls:
            if tool_call.id in delegated:
                repeats.append((tool_call.name, tool_call.arguments) in seen)
                seen.add((tool_call.name, tool_call.arguments))
    return repeats


def _tiny(group: Sequence[Scored], index: int, credits: Sequence[ChainCredit]) -> bool:
    """Whether a group's rewards hardly differ while its advantages do."""
    rewards = [scored.reward for scored in group if scored.reward is not None]
    values = [
        advantage
        for credit in credits
        if credit.group == index
        for advantage, weight in zip(credit.advantages, credit.weights, strict=True)
        if weight > 0
    ]
    if not values or not rewards:
        return False
    spread = max(rewards) - min(rewards)
    return 0 < spread <= TINY_SPREAD and max(values) - min(values) >= LARGE_LIFT * spread


def serial_collapse(window: Sequence[Row]) -> Finding | None:
    """Wide tasks are worked on alone: late and sparse rewards make it locally best."""
    late = _late(window, "wide_parallel_rate")
    if late is None or late >= 0.2:
        return None
    evidence = {"wide_parallel_rate": late} | _some(window, "critical_steps", "item_f1")
    return Finding("serial_collapse", "wide tasks are worked on alone", evidence, "r_parallel, annealed to zero")


def spurious_parallelism(window: Sequence[Row]) -> Finding | None:
    """Sub-agents are started that do nothing of use: on narrow tasks, or without a validated result."""
    narrow, finish, rate = (_late(window, key) for key in ("narrow_multi_spawn", "finish_rate", "spawn_rate"))
    idle = finish is not None and rate is not None and rate >= 0.2 and finish < 0.5
    needless = narrow is not None and narrow >= 0.1
    if not idle and not needless:
        return None
    what = "sub-agents end without a validated result" if idle else "narrow tasks are split among sub-agents"
    evidence = _some(window, "narrow_multi_spawn", "finish_rate", "spawn_rate", "spawned")
    return Finding("spurious_parallelism", what, evidence, "r_finish, critical steps, annealing")


def spawn_farming(window: Sequence[Row]) -> Finding | None:
    """More and more sub-tasks while the outcome does not gain, or one after the other, or in the same words."""
    early, late = _early(window, "spawned"), _late(window, "spawned")
    if early is None or late is None or late < 2:
        return None
    f1_early, f1_late = _early(window, "item_f1"), _late(window, "item_f1")
    width, repeats = _late(window, "parallel_width"), _late(window, "repeat_rate")
    no_gain = f1_early is not None and f1_late is not None and f1_late <= f1_early + 0.01
    rising = late >= 1.25 * early + 0.25
    serial = width is not None and width < 1.5
    again = repeats is not None and repeats >= 0.3
    if not (rising and no_gain) and not serial and not again:
        return None
    evidence = {"spawned_early": early} | _some(window, "spawned", "item_f1", "parallel_width", "repeat_rate")
    if f1_early is not None:
        evidence["item_f1_early"] = f1_early
    what = "sub-tasks are assigned for their own sake"
    return Finding("spawn_farming", what, evidence, "anneal the weight; score concurrency, not the count")


def tiny_differences(window: Sequence[Row]) -> Finding | None:
    """Groups whose rewards hardly differ get advantages as large as any: division by a tiny deviation."""
    share = _late(window, "tiny_share")
    if share is None or share < 0.02:
        return None
    what = "tiny differences of reward are blown up"
    return Finding("tiny_differences", what, {"tiny_share": share}, "credit group_mean: no division by the deviation")


def entropy_collapse(window: Sequence[Row]) -> Finding | None:
    """The policy stops exploring: its entropy falls below three tenths of what it was."""
    early, late = _early(window, "entropy"), _late(window, "entropy")
    if early is None or late is None or late >= 0.3 * early:
        return None
    evidence = {"entropy_early": early, "entropy": late}
    return Finding("entropy_collapse", "the policy stops exploring", evidence, "cispo, which clips no token's gradient")


DETECTORS: dict[str, Callable[[Sequence[Row]], Finding | None]] = {
    "serial_collapse": serial_collapse,
    "spurious_parallelism": spurious_parallelism,
    "spawn_farming": spawn_farming,
    "tiny_differences": tiny_differences,
    "entropy_collapse": entropy_collapse,
}
"""The detectors by the name of the behaviour."""


def detect(window: Sequence[Row]) -> list[Finding]:
    """All that the detectors see in a window."""
    found = (detector(window) for detector in DETECTORS.values())
    return [finding for finding in found if finding is not None]


def _mean(rows: Sequence[Row], key: str) -> float | None:
    values = [row[key] for row in rows if key in row]
    return fmean(values) if values else None


def _early(window: Sequence[Row], key: str) -> float | None:
    return _mean(window[: len(window) // 3], key)


def _late(window: Sequence[Row], key: str) -> float | None:
    return _mean(window[len(window) - len(window) // 3 :], key)


def _some(window: Sequence[Row], *keys: str) -> dict[str, float]:
    found = {key: _late(window, key) for key in keys}
    return {key: value for key, value in found.items() if value is not None}
