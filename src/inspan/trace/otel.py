"""Rollouts as OpenTelemetry spans, by the GenAI conventions. Contract: pure; OTLP's JSON, which every collector takes.

A session is an `invoke_agent` span, a model call a `chat` span in it, a tool call an `execute_tool` span beside it, and
a sub-agent's session hangs under the tool call that it answers. Ids derive from the rollout, so exporting again gives
the same spans. What was said is left out unless it is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from inspan.trace.records import Call, Node, Rollout, Session, ToolCall

_INTERNAL, _CLIENT, _ERROR = 1, 3, 2
_FINISHES: Final = {"tool_calls": "tool_call"}  # where the conventions have a word of their own
_PROVIDER: Final = "inspan"


class Fault(NamedTuple):
    """Why a span failed: one of few kinds (`error.type`), and what was said."""

    kind: str
    text: str


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
        told = (node.message for node in rollout.nodes if node.message["role"] == "tool")
        self.results = {one.get("tool_call_id"): str(one.get("content") or "") for one in told}

    def all(self) -> Iterator[dict[str, Any]]:
        for session in self.rollout.sessions:
            calls = self.calls[session.id]
            if calls:
                yield self._agent(session, calls)
                for at, call in enumerate(calls):
                    yield self._chat(session, call)
                    after = calls[at + 1].started if at + 1 < len(calls) else self._end(session.id)
                    for tool in call.tool_calls:
                        if tool.name:
                            yield self._tool(session, call, tool, after)

    def _end(self, session: str) -> float:
        """When a session was over: its own last call's end, or that of the sub-agents it waited for."""
        own = max((call.ended for call in self.calls[session]), default=0.0)
        below = [self._end(one.id) for one in self.rollout.sessions if one.parent == session]
        return max([own, *below])

    def _agent(self, session: Session, calls: Sequence[Call]) -> dict[str, Any]:
        told: dict[str, Any] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.agent.name": session.agent,
            "gen_ai.agent.id": session.id,
            "gen_ai.agent.version": self.rollout.fingerprint or None,
            "gen_ai.conversation.id": self.rollout.id,
            "gen_ai.request.model": session.policy,
            "gen_ai.usage.input_tokens": sum(call.prompt_tokens for call in calls),
            "gen_ai.usage.output_tokens": sum(call.completion_tokens for call in calls),
            "inspan.trainable": session.trainable,
        }
        if session.parent is None:
            told |= {"inspan.terminal": self.rollout.terminal.value, "inspan.group": self.rollout.group}
        above = None if session.parent is None else self._tool_id(session.parent, session.parent_call or "")
        if self.content and (tools := self._tools(calls)):
            told["gen_ai.tool.definitions"] = json.dumps(tools, ensure_ascii=False)
        failed = Fault(self.rollout.terminal.value, self.rollout.error) if self.rollout.error else None
        return self._span(
            f"invoke_agent {session.agent}", self._session_id(session.id), above, _INTERNAL,
            min(call.started for call in calls), self._end(session.id), told, None if session.parent else failed,
        )  # fmt: skip

    def _tools(self, calls: Sequence[Call]) -> list[dict[str, Any]]:
        """The tools that a session's newest conversation was offered, as the conventions spell them."""
        context = next((call.context for call in reversed(calls) if call.context is not None), None)
        if context is None:
            return []
        offered = self._path(self.nodes[context])[0].message.get("tools") or ()
        return [{"type": "function", **tool.get("function", tool)} for tool in offered]

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
            answer = _message(node) | {"finish_reason": _FINISHES.get(call.finish, call.finish)}
            told["gen_ai.output.messages"] = json.dumps([answer], ensure_ascii=False)
        span = f"{session.id} {call.id}"
        return self._span(
            f"chat {session.policy}", _id(8, self.rollout.id, "call", span), self._session_id(session.id), _CLIENT,
            call.started, call.ended, told, None if call.error is None else Fault(call.finish, call.error),
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
            told["gen_ai.tool.call.result"] = self.results.get(tool.id)
        fault = None
        if tool.error is not None:
            fault = Fault("invalid_call", tool.error)
        elif event is not None and not event.ok:
            fault = Fault("tool_error", event.detail)
        below = [self._end(one.id) for one in self.rollout.sessions if one.parent_call == tool.id]
        return self._span(
            f"execute_tool {tool.name}", self._tool_id(session.id, tool.id), self._session_id(session.id), _INTERNAL,
            call.ended, max([call.ended, after, *below]), told, fault,
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
        fault: Fault | None,
    ) -> dict[str, Any]:
        span = {
            "traceId": self.trace,
            "spanId": own,
            "name": name,
            "kind": kind,
            "startTimeUnixNano": str(int(started * 1e9)),
            "endTimeUnixNano": str(int(max(started, ended) * 1e9)),
            "attributes": _attributes({**told, **({"error.type": fault.kind} if fault else {})}),
        }
        if above is not None:
            span["parentSpanId"] = above
        if fault:
            span["status"] = {"code": _ERROR, "message": fault.text}
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
        made = {"type": "tool_call", "id": call["id"], "name": call["name"]}
        parts.append(made | {"arguments": _arguments(call["arguments"])})
    return {"role": message["role"], "parts": parts}


def _arguments(text: Any) -> Any:
    """Arguments as the object that they are, or the text that the model wrote."""
    try:
        read = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return text
    return read if isinstance(read, dict) else text


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
