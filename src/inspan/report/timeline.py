"""A swarm's timeline: one lane a session over critical steps. Contract: a pure layout, then SVG; bad input shortens the
picture and never raises.

The layout follows the definition of critical steps (Kimi K2.5, arXiv 2602.02276): a turn costs max(1, direct
tool calls) and then the slowest child of each wave of at most `width` children, in the order of their tool calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

LABEL, FULL, LANE, GAP, HEAD = 118, 720, 16, 6, 20


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of a lane, in steps: a `turn` of the session itself, or a `wait` for its children."""

    kind: str
    start: int
    end: int
    text: str


@dataclass(slots=True)
class Lane:
    """One session."""

    label: str
    root: bool
    bars: list[Bar] = field(default_factory=list)


def turns(session: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The assistant messages of a session."""
    messages = session.get("messages")
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, Mapping) and message.get("role") == "assistant":
            yield message


def calls(message: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """A message's tool calls as (id, name, arguments), from the internal or the OpenAI form."""
    out = []
    listed = message.get("tool_calls")
    for call in listed if isinstance(listed, list) else []:
        if isinstance(call, Mapping):
            function = call.get("function")
            inner = function if isinstance(function, Mapping) else call
            out.append((str(call.get("id", "")), str(inner.get("name", "")), str(inner.get("arguments", ""))))
    return out


def children_of(sessions: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Sessions by the tool call that they answer."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for session in sessions:
        if session.get("parent_call"):
            found.setdefault(str(session["parent_call"]), []).append(session)
    return found


def layout(sessions: Sequence[Mapping[str, Any]], width: int = 0) -> tuple[list[Lane], int]:
    """The lanes, root first, and the critical steps of the whole. `width` 0: no limit on concurrent children."""
    lanes: list[Lane] = []
    total = 0
    children = children_of(sessions)
    for root in [s for s in sessions if not s.get("parent_call")][:1]:
        total = _place(root, 0, children, width or len(sessions) or 1, lanes, frozenset())
    return lanes, total


def _place(
    session: Mapping[str, Any],
    start: int,
    children: Mapping[str, list[Mapping[str, Any]]],
    width: int,
    lanes: list[Lane],
    above: frozenset[str],
) -> int:
    """Place a session and what hangs under it; returns the step at which it ends."""
    lane = Lane(str(session.get("agent") or "session"), root=not above)
    lanes.append(lane)
    above = above | {str(session.get("id"))}
    now = start
    for message in turns(session):
        made = calls(message)
        hung = [child for call, _, _ in made for child in children.get(call, []) if str(child.get("id")) not in above]
        direct = sum(1 for call, _, _ in made if call not in children)
        begun, now = now, now + max(1, direct)
        lane.bars.append(Bar("turn", begun, now, _caption(message, made)))
        for at in range(0, len(hung), width):
            ends = [_place(child, now, children, width, lanes, above) for child in hung[at : at + width]]
            lane.bars.append(Bar("wait", now, max(ends), f"waits for {len(ends)} sub-agent{'s' * (len(ends) > 1)}"))
            now = max(ends)
    return now


def _caption(message: Mapping[str, Any], made: Sequence[tuple[str, str, str]]) -> str:
    text = "; ".join(f"{name} {arguments}" for _, name, arguments in made) or str(message.get("content") or "")
    return text if len(text) <= 240 else text[:239] + "…"


def draw(lanes: Sequence[Lane], total: int, budget: int | None = None) -> str:
    """The lanes as SVG, with step marks and the budget as a line."""
    if not lanes or total < 1:
        return ""
    reach = max(total, budget or 0)
    step = min(44.0, (FULL - LABEL - 12) / reach)
    height = HEAD + len(lanes) * (LANE + GAP) + 2
    svg = [f'<svg class="timeline" viewBox="0 0 {FULL} {height}" role="img" aria-label="timeline over critical steps">']
    every = max(1, round(28 / step))
    for mark in range(0, reach + 1, every):
        x = round(LABEL + mark * step, 1)
        svg.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{HEAD - 4}" y2="{height}"/>')
        svg.append(f'<text class="tick" x="{x}" y="{HEAD - 8}" text-anchor="middle">{mark}</text>')
    if budget:
        x = round(LABEL + budget * step, 1)
        svg.append(f'<line class="budget" x1="{x}" x2="{x}" y1="{HEAD - 4}" y2="{height}"><title>budget</title></line>')
    number = 0
    for row, lane in enumerate(lanes):
        y = HEAD + row * (LANE + GAP)
        number += not lane.root
        label = lane.label if lane.root else f"{lane.label} {number}"
        svg.append(f'<text class="lane" x="0" y="{y + LANE - 4}">{escape(label[:18])}</text>')
        for bar in lane.bars:
            x, w = round(LABEL + bar.start * step, 1), round((bar.end - bar.start) * step, 1)
            classes = f"{bar.kind} {'root' if lane.root else 'child'}"
            gap = 1.2 if bar.kind == "turn" else 0
            top, tall = (y, LANE) if bar.kind == "turn" else (y + LANE / 2 - 1.5, 3)
            svg.append(
                f'<rect class="{classes}" x="{x}" y="{top}" width="{max(1.0, round(w - gap, 1))}" height="{tall}" '
                f'rx="2.5"><title>{escape(bar.text)}</title></rect>'
            )
    svg.append("</svg>")
    return "".join(svg)
