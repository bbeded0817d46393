"""Rollouts in the Agent Trajectory Interchange Format (ATIF v1.8, of the Harbor project). Contract: pure; one document
a rollout, which a validator of the format accepts.

The document is the root session along its last message. Other branches of a session (rollbacks, prunes, summaries) and
the sessions of sub-agents are embedded; steps that a branch shares with one before it are marked as copied, so that
nobody trains them twice. `metrics` hold the sampled ids with their log-probs, `extra.tokens` the ids that a step added.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from inspan.trace.records import Call, Node, Rollout, Session

VERSION: Final = "ATIF-v1.8"
_SOURCES: Final = {"system": "system", "assistant": "agent"}


def atif_documents(rollouts: Iterable[Rollout]) -> Iterator[dict[str, Any]]:
    """A document for each rollout in which something was said."""
    for rollout in rollouts:
        if rollout.nodes:
            yield _document(rollout)


def _document(rollout: Rollout) -> dict[str, Any]:
    made: dict[str, list[dict[str, Any]]] = {}
    children: dict[str, list[str]] = {}
    spoke = {node.session for node in rollout.nodes}
    for session in rollout.sessions:
        if session.parent_call and session.id in spoke:
            children.setdefault(session.parent_call, []).append(session.id)
    calls = {call.node: call for call in rollout.calls if call.node is not None}
    version = rollout.fingerprint or "unknown"
    for session in rollout.sessions:
        nodes = [node for node in rollout.nodes if node.session == session.id]
        made[session.id] = list(_branches(session, version, nodes, calls, children)) if nodes else []
    roots = [session.id for session in rollout.sessions if session.parent is None and made[session.id]]
    whole = made[roots[0]][-1]
    embedded = [one for name, branches in made.items() for one in branches if one is not whole and name in made]
    task = rollout.task if isinstance(rollout.task, Mapping) else {"id": getattr(rollout.task, "id", None)}
    return {
        "schema_version": VERSION,
        "session_id": rollout.id,
        **whole,
        "extra": {
            "group": rollout.group,
            "task": None if task.get("id") is None else str(task["id"]),
            "terminal": rollout.terminal.value,
            "answer": rollout.answer,
            "fingerprint": rollout.fingerprint,
            "attempt": rollout.attempt,
            "prompt_tokens": sum(call.prompt_tokens for call in rollout.calls),
            "completion_tokens": sum(call.completion_tokens for call in rollout.calls),
            **whole["extra"],
        },
        **({"subagent_trajectories": embedded} if embedded else {}),
    }


def _branches(
    session: Session,
    version: str,
    nodes: Sequence[Node],
    calls: Mapping[int, Call],
    children: Mapping[str, Sequence[str]],
) -> Iterator[dict[str, Any]]:
    """A trajectory for each leaf of a session, in the order of the leaves; its metrics count what it is the first to
    tell."""
    by_id = {node.id: node for node in nodes}
    parents = {node.parent for node in nodes}
    told: set[int] = set()
    leaves = [node for node in nodes if node.id not in parents]
    for at, leaf in enumerate(leaves):
        path = [leaf]
        while path[-1].parent is not None:
            path.append(by_id[path[-1].parent])
        path.reverse()
        tools = [dict(tool) for tool in path[0].message.get("tools") or ()]
        fork = next((node.fork for node in path if node.fork and node.id not in told), None)
        steps = list(_steps(path, calls, children, told))
        fresh = [step["metrics"] for step in steps if "metrics" in step and "is_copied_context" not in step]
        yield {
            "schema_version": VERSION,
            "trajectory_id": session.id if at == len(leaves) - 1 else f"{session.id}@{leaf.id}",
            "agent": {
                "name": session.agent,
                "version": version,
                "model_name": session.policy,
                **({"tool_definitions": tools} if tools else {}),
            },
            "steps": steps,
            "final_metrics": {
                "total_prompt_tokens": sum(one["prompt_tokens"] for one in fresh),
                "total_completion_tokens": sum(one["completion_tokens"] for one in fresh),
                "total_steps": len(steps),
            },
            "extra": {"fork": fork, "trainable": session.trainable},
        }
        told.update(node.id for node in path)


def _steps(
    path: Sequence[Node], calls: Mapping[int, Call], children: Mapping[str, Sequence[str]], told: set[int]
) -> Iterator[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    ids: set[str] = set()  # of the tool calls of the newest agent's step
    for node in path:
        message = node.message
        call_id = message.get("tool_call_id")
        if message["role"] == "tool" and call_id in ids:
            steps[-1].setdefault("observation", {"results": []})["results"].append(_result(message, children))
            steps[-1]["extra"]["tokens"] += node.tokens
            continue
        step: dict[str, Any] = {
            "step_id": len(steps) + 1,
            "source": _SOURCES.get(message["role"], "user"),
            "message": str(message.get("content") or ""),
            "extra": {"tokens": list(node.tokens), "node": node.id},
        }
        if node.id in told:
            step["is_copied_context"] = True
        if step["source"] == "agent":
            step |= _said(node, calls.get(node.id))
            ids = {one["tool_call_id"] for one in step.get("tool_calls", ())}
        else:
            ids = set()
        steps.append(step)
    return iter(steps)


def _said(node: Node, call: Call | None) -> dict[str, Any]:
    message = node.message
    out: dict[str, Any] = {}
    if message.get("reasoning"):
        out["reasoning_content"] = str(message["reasoning"])
    if message.get("tool_calls"):
        out["tool_calls"] = [_call(one) for one in message["tool_calls"]]
    if call is not None:
        if call.ended:
            out["timestamp"] = datetime.fromtimestamp(call.ended, UTC).isoformat()
        sampled = {"completion_token_ids": list(node.tokens[node.start :]), "logprobs": list(node.logprobs)}
        out["metrics"] = {
            "prompt_tokens": call.prompt_tokens,
            "completion_tokens": call.completion_tokens,
            **(sampled if node.sampled else {}),  # an outside model's ids are not known
            "extra": {"versions": list(node.versions), "finish": call.finish},
        }
        out["llm_call_count"] = 1
    return out


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    raw = str(call.get("arguments") or "{}")
    try:
        arguments = json.loads(raw)
    except (ValueError, RecursionError):
        arguments = None
    named = {"tool_call_id": str(call["id"]), "function_name": str(call["name"])}
    if isinstance(arguments, dict):
        return {**named, "arguments": arguments}
    return {**named, "arguments": {}, "extra": {"raw_arguments": raw}}


def _result(message: Mapping[str, Any], children: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    name = str(message["tool_call_id"])
    out: dict[str, Any] = {"source_call_id": name, "content": str(message.get("content") or "")}
    if name in children:
        out["subagent_trajectory_ref"] = [{"trajectory_id": child} for child in children[name]]
    return out
