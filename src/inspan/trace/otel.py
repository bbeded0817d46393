"""Rollouts as OpenTelemetry spans, by the GenAI conventions. Contract: pure; OTLP's JSON, which every collector takes.

A session is an `invoke_agent` span, a model call a `chat` span in it, a tool call an `execute_tool` span beside it, and
a sub-agent's session hangs under the tool call that it answers. Ids derive from the rollout, so exporting again gives
the same spans. What was said is left out unless it is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

from inspan.trace.records import Call, Node, Rollout, Session, ToolCall

_INTERNAL, _CLIENT, _ERROR = 1, 3, 2
_PROVIDER: Final = "inspan"


def otlp_requests(rollouts: Iterable[Rollout], *, content: bool = False) -> Iterator[dict[str, Any]]:
    """An `ExportTraceServiceRequest` as JSON for each rollout."""
    for rollout in rollouts:
        spans = list(_Spans(rollout, content).all())
        if spans:
            resource = {"attributes": _attributes({"service.name": "inspan"})}
            scope = {"scope": {"name": "inspan"}, "spans": spans}
            yield {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}


class _Spans:
    def __init__(self, rollout: Rollout, content: bool) -> None:
        self.rollout, self.content = rollout, content
        self.trace = _id(16, rollout.id)
        self.nodes = {node.id: node for node in rollout.nodes}
        self.calls: dict[str, list[Call]] = {session.id: [] for session in rollout.sessions}
        for call in rollout.calls:
            self.calls[call.session].append(call)
        self.events = {event.call: event for event in rollout.tool_events}

    def all(self) -> Iterator[dict[str, Any]]:
        for session in self.rollout.sessions:
            calls = self.calls[session.id]
            if calls:
                yield self._agent(session, calls)
                for at, call in enumerate(calls):
                    yield self._chat(session, call)
                    after = calls[at + 1].started if at + 1 < len(calls) else self._end(session)
                    for tool in call.tool_calls:
                        if tool.name:
                            yield self._tool(session, call, tool, after)

    def _end(self, session: Session) -> float:
        """When a session was over: its own last call's end, or that of the sub-agents it waited for."""
        own = max((call.ended for call in self.calls[session.id]), default=0.0)
        below = [self._end(one) for one in self.rollout.sessions if one.parent == session.id]
        return max([own, *below])

    def _agent(self, session: Session, calls: Sequence[Call]) -> dict[str, Any]:
        told: dict[str, Any] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.agent.name": session.agent,
            "gen_ai.agent.id": session.id,
            "gen_ai.conversation.id": self.rollout.id,
            "gen_ai.request.model": session.policy,
            "gen_ai.usage.input_tokens": sum(call.prompt_tokens for call in calls),
            "gen_ai.usage.output_tokens": sum(call.completion_tokens for call in calls),
            "inspan.trainable": session.trainable,
        }
        if session.parent is None:
            told |= {"inspan.terminal": self.rollout.terminal.value, "inspan.group": self.rollout.group}
        above = None if session.parent is None else self._tool_id(session.parent, session.parent_call or "")
        failed = self.rollout.error if session.parent is None else None
        return self._span(
            f"invoke_agent {session.agent}", self._session_id(session.id), above, _INTERNAL, calls[0].started,
            self._end(session), told, failed,
        )  # fmt: skip

    def _chat(self, session: Session, call: Call) -> dict[str, Any]:
        node = None if call.node is None else self.nodes[call.node]
        told: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.request.model": session.policy,
            "gen_ai.response.model": session.policy,
            "gen_ai.response.id": call.id,
            "gen_ai.response.finish_reasons": [call.finish],
            "gen_ai.usage.input_tokens": call.prompt_tokens,
            "gen_ai.usage.output_tokens": call.completion_tokens,
            "gen_ai.conversation.id": self.rollout.id,
        }
        if node is not None and node.versions:
            told["inspan.policy.version"] = node.versions[-1]
        if node is not None and node.fork:
            told["inspan.fork"] = node.fork
        if self.content and node is not None:
            path = self._path(node)
            told["gen_ai.input.messages"] = json.dumps([_message(one) for one in path[:-1]], ensure_ascii=False)
            told["gen_ai.output.messages"] = json.dumps([_message(node)], ensure_ascii=False)
        span = f"{session.id} {call.id}"
        return self._span(
            f"chat {session.policy}", _id(8, self.rollout.id, "call", span), self._session_id(session.id), _CLIENT,
            call.started, call.ended, told, call.error,
        )  # fmt: skip

    def _tool(self, session: Session, call: Call, tool: ToolCall, after: float) -> dict[str, Any]:
        event = self.events.get(tool.id)
        told: dict[str, Any] = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": tool.name,
            "gen_ai.tool.call.id": tool.id,
            "gen_ai.tool.type": "function",
        }
        if self.content:
            told["gen_ai.tool.call.arguments"] = tool.arguments
        fault = tool.error or (event.detail if event is not None and not event.ok else None)
        return self._span(
            f"execute_tool {tool.name}", self._tool_id(session.id, tool.id), self._session_id(session.id), _INTERNAL,
            call.ended, max(call.ended, after), told, fault,
        )  # fmt: skip

    def _span(
        self,
        name: str,
        own: str,
        above: str | None,
        kind: int,
        started: float,
        ended: float,
        told: Mapping[str, Any],
        fault: str | None,
    ) -> dict[str, Any]:
        span = {
            "traceId": self.trace,
            "spanId": own,
            "name": name,
            "kind": kind,
            "startTimeUnixNano": str(int(started * 1e9)),
            "endTimeUnixNano": str(int(max(started, ended) * 1e9)),
            "attributes": _attributes({**told, **({"error.type": "error"} if fault else {})}),
        }
        if above is not None:
            span["parentSpanId"] = above
        if fault:
            span["status"] = {"code": _ERROR, "message": fault}
        return span

    def _path(self, leaf: Node) -> list[Node]:
        path = [leaf]
        while path[-1].parent is not None:
            path.append(self.nodes[path[-1].parent])
        return path[::-1]

    def _session_id(self, session: str) -> str:
        return _id(8, self.rollout.id, "session", session)

    def _tool_id(self, session: str, tool: str) -> str:
        return _id(8, self.rollout.id, "tool", session, tool)


def _message(node: Node) -> dict[str, Any]:
    message = node.message
    parts: list[dict[str, Any]] = []
    if message.get("reasoning"):
        parts.append({"type": "reasoning", "content": str(message["reasoning"])})
    if message["role"] == "tool":
        result = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": message.get("content")}
        parts.append(result)
    elif message.get("content"):
        parts.append({"type": "text", "content": str(message["content"])})
    for call in message.get("tool_calls") or ():
        parts.append({"type": "tool_call", "id": call["id"], "name": call["name"], "arguments": call["arguments"]})
    return {"role": message["role"], "parts": parts}


def _attributes(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in told.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(one) for one in value]}}
    return {"stringValue": str(value)}


def _id(size: int, *parts: str) -> str:
    return blake2b("\0".join(parts).encode("utf-8", "replace"), digest_size=size).hexdigest()
