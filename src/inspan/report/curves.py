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


CURVES = (
    Curve(
        "Reward", (r"(rewards?)(_mean)?", r"reward_(std|min|max)"), "weighted sum of the terms, mean of the rollouts"
    ),
    Curve(
        "Item F1", (r"(eval/)?(item_)?f1(/.+)?", r"(eval/)?exact(_match)?(/.+)?"), "on training tasks; eval: held-out"
    ),
    Curve("Reward terms", (r"(reward_)?terms?/.+",), "each before its weight"),
    Curve(
        "Weights of the terms",
        (r"weights?/(?!item_f1$|exact_match$).+", r"lambda.*", r"λ.*"),
        "of λ1 and λ2 nothing is left at the end",
    ),
    Curve("Parallel width", (r"(eval/)?(parallel_)?width(/.+)?",), "assigned tasks / stages that assign"),
    Curve("Critical steps", (r"(eval/)?critical_steps(/.+)?",), "steps on the longest path"),
    Curve(
        "Spawn rate", (r"(eval/)?(spawn_rate|multi_spawn_rate|spawns)(/.+)?",), "share of rollouts that assign a task"
    ),
    Curve("Tool calls", (r"(eval/)?tool_calls(/.+)?",), "a rollout, sub-agents included"),
    Curve("Invalid calls", (r"(eval/)?(invalid_calls|tool_errors)(/.+)?",), "a rollout; they are kept as negatives"),
    Curve("Entropy", (r"entropy(/.+)?",), "of the policy, nats a token"),
    Curve("Ratio", (r"ratio(_mean|_max)?",), "policy / behaviour", zero=False),
    Curve("Clipped and masked", (r"clip_share", r"masked_share", r"clip.*"), "share of trained tokens"),
    Curve("Distance", (r"kl(_.+)?", r"logp_gap"), "from the behaviour policy, nats a token"),
    Curve("Staleness", (r"staleness(_.+)?",), "versions between sampling and training"),
    Curve("Tokens a second", (r"(.+_)?(tokens_per_s|tok_s)",)),
    Curve("Critical path", (r"(eval/)?critical_path_s(/.+)?",), "seconds on declared latencies"),
    Curve(
        "Dropped groups",
        (r"(dropped|equal|stale|skipped)_groups|groups_(dropped|equal|stale)",),
        "all rewards equal, or too old",
    ),
    Curve(
        "Share of None",
        (r"none(_share|_rate)?(/.+)?", r"infrastructure(_share)?", r"incomplete(_share)?"),
        "rollouts without a reward",
    ),
    Curve("Loss and gradient", (r"loss", r"grad_norm"), zero=False),
    Curve("Time of an update", (r"(.+_)?(seconds|_s|wall_s)",), "seconds"),
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
            main.append(chart(curve.title, lines, about=curve.about, zero=curve.zero))
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
    if re.match(r"(reward_)?terms?/|weights?/", name):
        return name.split("/", 1)[1]
    return name.replace("_", " ").replace("/", " · ")
