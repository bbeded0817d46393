"""Which metric belongs into which chart. Contract: no metric is lost; what no chart claims goes under "more".

Names are those of docs/run-directory.md. A name may carry a suffix by kind or term ("critical_steps/wide").
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inspan.report.chart import Line, chart

_MAX_LINES = 6


@dataclass(frozen=True, slots=True)
class Curve:
    """A chart: its title and the metrics (regular expressions on whole names) that it draws."""

    title: str
    names: tuple[str, ...]
    about: str = ""
    zero: bool = True
    smooth: bool = True


_KIND = r"(_by_kind)?(/.+)?"
CURVES = (
    Curve(
        "Reward", (r"(rewards?)(_mean)?", r"reward_(std|min|max)"), "weighted sum of the terms, mean of the rollouts"
    ),
    Curve(
        "Item F1", (r"(item_)?f1", r"exact(_match)?", r"(item_)?f1_by_kind/.+"), "on the training tasks of the update"
    ),
    Curve(
        "Evidence",
        (r"(output|trajectory)_recall", r"precision", r"answer_found", r"prune_accuracy"),
        "found, seen and pruned, on the training tasks of the update",
    ),
    Curve("Held-out", (r"(eval|held_out)/.*(f1|exact)" + _KIND,), "item F1 and exact rows"),
    Curve("Reward terms", (r"(reward_)?terms?/.+",), "each before its weight"),
    Curve(
        "Weights of the terms",
        (r"weights?/(?!item_f1$|exact_match$|retrieval$).+", r"lambda.*", r"λ.*"),
        "λ1, λ2 and the like",
        smooth=False,
    ),
    Curve("Parallel width", (r"(eval/)?(parallel_)?width" + _KIND,), "assigned tasks / stages that assign"),
    Curve("Critical steps", (r"(eval/)?critical_steps" + _KIND,), "steps on the longest path"),
    Curve("Spawn rate", (r"(eval/)?(spawn_rate|spawns)" + _KIND,), "share of rollouts that assign a task"),
    Curve("More than one sub-agent", (r"(eval/)?multi_spawn_rate" + _KIND,), "share of rollouts"),
    Curve("Tool calls", (r"(eval/)?tool_calls" + _KIND,), "a rollout, sub-agents included"),
    Curve("Invalid calls", (r"(eval/)?(invalid_calls|tool_errors)" + _KIND,), "a rollout; they are kept as negatives"),
    Curve("Recovery", (r"(eval/)?recovery" + _KIND,), "share of failed tool calls that a later one made good"),
    Curve("Critical path", (r"(eval/)?critical_path_s" + _KIND,), "seconds on declared latencies"),
    Curve("Entropy", (r"entropy(/.+)?",), "of the policy, nats a token"),
    Curve("Ratio", (r"ratio(_mean|_max)?",), "policy / behaviour", zero=False),
    Curve("Clipped and masked", (r"clip_share", r"masked_share", r"clip.*"), "share of trained tokens"),
    Curve("Distance", (r"kl(_.+)?", r"logp_gap"), "from the behaviour policy, nats a token"),
    Curve("Staleness", (r"(.+_)?staleness(_.+)?",), "versions between sampling and training"),
    Curve("Tokens a second", (r"(.+[_/])?(tokens_per_s|tok_s)",)),
    Curve(
        "Dropped groups",
        (r"(dropped|equal|stale|skipped)_groups", r"(dropped_|groups_)?dropped(_groups)?(/.+)?"),
        "by reason",
    ),
    Curve("Share of None", (r"(.+/)?none(_share|_rate)?(/.+)?", r"incomplete(_share)?"), "rollouts without a reward"),
    Curve("Loss and gradient", (r"loss", r"grad_norm"), zero=False),
    Curve("Time of an update", (r"(.+[_/])?(seconds|wall_s)", r"(rollout|learn|eval)_s", r"times?/.+"), "seconds"),
)


def draw(series: Mapping[str, Mapping[int, float]]) -> tuple[list[str], list[str]]:
    """The charts of a run, and those of the metrics that belong to none of them."""
    left = dict(series)
    main: list[str] = []
    more: list[str] = []
    for curve in CURVES:
        claimed = _claim(left, curve.names)
        for start in range(0, len(claimed), _MAX_LINES):
            part = claimed[start : start + _MAX_LINES]
            lines = [Line(_label(name, curve), left[name]) for name in part]
            main.append(chart(curve.title, lines, about=curve.about, zero=curve.zero, smooth=curve.smooth))
        for name in claimed:
            del left[name]
    for name in sorted(left):
        more.append(chart(name, [Line(name, left[name])]))
    return [c for c in main if c], [c for c in more if c]


def _claim(series: Mapping[str, Mapping[int, float]], patterns: Sequence[str]) -> list[str]:
    found: list[str] = []
    for pattern in patterns:
        found.extend(n for n in series if n not in found and re.fullmatch(pattern, n))
    return found


def _label(name: str, curve: Curve) -> str:
    """The short name in the legend: the suffix of terms and weights, else the metric's own words."""
    if re.match(r"(reward_)?terms?/|weights?/|dropped/", name):
        return name.split("/", 1)[1]
    name = name.replace("_by_kind", "")
    return name.replace("_", " ").replace("/", " · ")
