"""`r_finish`: share of assigned sub-tasks that ended validated; cures spurious parallelism (arXiv 2602.02276).

Validated [D]: at least one successful tool call, a result that can be read, no limit hit. It is never compared with the
truth. A result can be read when the sub-agent's last call ended of itself, without tool calls, in some text, and its
parent was not told of an error.
"""

from __future__ import annotations

from inspan.rewards.base import Term, process
from inspan.trace.records import Call, Rollout, Session


def finish_rate(rollout: Rollout) -> float:
    """Share of assigned sub-tasks that ended validated; 0 when none was assigned."""
    assigned = [session for session in rollout.sessions if session.parent_call is not None]
    if not assigned:
        return 0.0
    ok = {event.call for event in rollout.tool_events if event.ok}
    bad = {event.call for event in rollout.tool_events if not event.ok} - ok
    texts = {node.id: str(node.message.get("content") or "") for node in rollout.nodes}
    told = {node.message.get("tool_call_id"): texts[node.id] for node in rollout.nodes}
    calls: dict[str, list[Call]] = {}
    for call in rollout.calls:
        calls.setdefault(call.session, []).append(call)

    def validated(session: Session) -> bool:
        mine = calls.get(session.id, [])
        if not mine or session.parent_call in bad or told.get(session.parent_call, "").startswith("error:"):
            return False
        last = mine[-1]
        worked = any(tool_call.id in ok for call in mine for tool_call in call.tool_calls)
        stopped = last.finish == "stop" and not last.tool_calls and all(call.finish != "limit" for call in mine)
        return worked and stopped and last.node is not None and bool(texts.get(last.node, "").strip())

    return sum(validated(session) for session in assigned) / len(assigned)


def r_finish() -> Term:
    """Share of assigned sub-tasks that ended validated, in [0, 1]."""

    @process
    def term(rollout: Rollout) -> float:
        return finish_rate(rollout)

    return term
