"""Trajectories to read. Contract: whatever a model wrote is shown as text and never as markup.

A tool call, its result and the sub-agent that it started stand together, so that a transcript reads from top to bottom.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from inspan.report import timeline
from inspan.report.columns import DASH, numeric, title

MOST_CHARS = 6000
MOST_TRAJECTORIES = 60


def text(value: Any, most: int = MOST_CHARS) -> str:
    """Any value as escaped text, cut at `most` characters with a note of how much is missing."""
    raw = (
        value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    )
    if len(raw) <= most:
        return escape(raw)
    return escape(raw[:most]) + f'<span class="cut"> … {len(raw) - most:,} more characters</span>'


def show(item: Mapping[str, Any], *, budget: int | None, width: int, opened: bool = False) -> str:
    """One trajectory: its head line, and inside the task, the answer, the timeline and the sessions."""
    task = _table(item.get("task"))
    sessions = [s for s in _list(item.get("sessions")) if isinstance(s, Mapping)]
    lanes, steps = timeline.layout(sessions, width)
    reward = numeric(item.get("reward"))
    counted = numeric(item.get("critical_steps"))
    shown_steps = str(round(counted)) if counted is not None else str(steps) if steps else DASH
    chips = [
        ("arm", title(str(item.get("arm") or DASH))),
        ("update", str(item.get("update", DASH))),
        ("kind", str(task.get("kind") or DASH)),
        ("steps", shown_steps),
        ("sub-agents", str(max(0, len(lanes) - 1))),
    ]
    state = str(item.get("terminal") or "")
    if state and state != "completed":
        chips.append(("ended", state))
    head = "".join(f'<span class="chip"><i>{escape(k)}</i>{text(v, 60)}</span>' for k, v in chips)
    score = f"{reward:.3f}" if reward is not None else "none"
    return (
        f'<details class="trajectory"{" open" if opened else ""}><summary><b class="score">{score}</b>'
        f'<span class="what">{text(_first_line(task.get("prompt")), 140)}</span>'
        f'<span class="chips">{head}</span></summary><div class="inside">'
        f"{_terms(item.get('terms'))}{timeline.draw(lanes, steps, budget)}"
        f'<div class="pair"><div><h4>Expected</h4>{_answer(task.get("answer"))}</div>'
        f"<div><h4>Answered</h4>{_answer(item.get('answer'))}</div></div>"
        f"{_transcripts(sessions)}</div></details>"
    )


def _terms(terms: Any) -> str:
    cells = "".join(
        f'<span class="chip"><i>{escape(str(name))}</i>{DASH if numeric(v) is None else f"{numeric(v):.3f}"}</span>'
        for name, v in _table(terms).items()
    )
    return f'<p class="terms">{cells}</p>' if cells else ""


def _answer(answer: Any) -> str:
    rows = _list(answer)
    if rows and all(isinstance(row, (list, tuple)) for row in rows):
        body = "".join("<tr>" + "".join(f"<td>{text(cell, 200)}</td>" for cell in row) + "</tr>" for row in rows)
        return f'<table class="rows">{body}</table>'
    return f"<pre>{text(answer)}</pre>" if answer not in (None, "") else '<p class="none">nothing</p>'


def _transcripts(sessions: Sequence[Mapping[str, Any]]) -> str:
    children = timeline.children_of(sessions)
    known = {call for s in sessions for m in timeline.turns(s) for call, _, _ in timeline.calls(m)}
    tops = [s for s in sessions if str(s.get("parent_call") or "") not in known]
    return "".join(_session(s, children, frozenset(), outer=True) for s in tops)


def _session(session: Mapping[str, Any], children: Mapping[str, list], above: frozenset[str], *, outer: bool) -> str:
    name = f"{text(session.get('agent'), 40)} <small>{text(session.get('policy'), 60)}</small>"
    above = above | {str(session.get("id"))}
    messages = [m for m in _list(session.get("messages")) if isinstance(m, Mapping)]
    made = {call for m in messages for call, _, _ in timeline.calls(m)}
    results = {str(m.get("tool_call_id")): m.get("content") for m in messages if m.get("role") == "tool"}
    body = "".join(
        _message(m, results, children, above)
        for m in messages
        if not (m.get("role") == "tool" and str(m.get("tool_call_id")) in made)
    )
    return f'<details class="session"{" open" if outer else ""}><summary>{name}</summary>{body}</details>'


def _message(
    message: Mapping[str, Any], results: Mapping[str, Any], children: Mapping[str, list], above: frozenset[str]
) -> str:
    role = str(message.get("role") or "?")
    parts = [f"<pre>{text(message.get('content'))}</pre>"] if message.get("content") else []
    for call, name, arguments in timeline.calls(message):
        inner = "".join(
            _session(child, children, above, outer=False)
            for child in children.get(call, [])
            if str(child.get("id")) not in above
        )
        result = f'<pre class="result">{text(results[call])}</pre>' if call in results else ""
        parts.append(f'<div class="call"><code><b>{text(name, 80)}</b> {text(arguments)}</code>{inner}{result}</div>')
    tools = _list(message.get("tools"))
    if tools:
        parts.append(f'<p class="none">{len(tools)} tools offered</p>')
    kind = role if role in ("system", "user", "assistant", "tool") else "other"
    return f'<div class="message {kind}"><span class="role">{text(role, 20)}</span><div>{"".join(parts)}</div></div>'


def _first_line(value: Any) -> str:
    return " ".join(str(value or "").split())


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []
