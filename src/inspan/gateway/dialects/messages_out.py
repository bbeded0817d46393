"""The Anthropic Messages dialect, out: messages, their events and errors. Contract: pure.

Blocks come in the order thinking, text, tool use; a thinking block's signature stands for what was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from inspan.errors import EngineOverloaded, RequestError
from inspan.gateway.dialects.base import error_message, error_status
from inspan.gateway.reply import Choice, Piece, Reply, Usage, dump, encode
from inspan.trace.records import ToolCall

_STOPS: Final = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


def encode_message(reply: Reply) -> bytes:
    """The body of a message that is not streamed."""
    choice = reply.choices[0]
    body = _message(reply, _blocks(choice), _ended(choice), _usage(reply.usage))
    return encode(body)


def _message(reply: Reply, content: list[Any], ended: Mapping[str, Any], usage: Mapping[str, Any]) -> dict[str, Any]:
    head = {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": reply.model}
    return {**head, "content": content, **ended, "usage": usage}


def _ended(choice: Choice) -> dict[str, Any]:
    if choice.stopped_by is not None and choice.finish == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stopped_by}
    return {"stop_reason": _STOPS.get(choice.finish, "end_turn"), "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.reasoning:
        blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": choice.reasoning_id})
    if choice.content:
        blocks.append({"type": "text", "text": choice.content})
    return blocks + [_tool_use(call, json.loads(call.arguments)) for call in choice.calls]


def _tool_use(call: ToolCall, given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


class MessageEvents:
    """The events of one streamed message."""

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, head: Reply) -> None:
        self._head = head
        self._index = -1  # of the last block
        self._open: str | None = None  # the kind of piece of the block that is open

    def begin(self) -> bytes:
        """The message, without content."""
        nothing = {"stop_reason": None, "stop_sequence": None}
        message = _message(self._head, [], nothing, _usage(self._head.usage))
        return _event("message_start", message=message) + self.keep_alive

    def piece(self, index: int, piece: Piece) -> bytes:
        """A piece of text or thinking."""
        if not piece.text:
            return b""
        out = b""
        thinking = piece.kind == "reasoning"
        if self._open != piece.kind:
            empty: dict[str, Any] = (
                {"type": "thinking", "thinking": "", "signature": ""} if thinking else {"type": "text", "text": ""}
            )
            out = self._close() + self._start(empty)
            self._open = piece.kind
        delta = (
            {"type": "thinking_delta", "thinking": piece.text}
            if thinking
            else {"type": "text_delta", "text": piece.text}
        )
        return out + self._delta(delta)

    def end(self, choice: Choice) -> bytes:
        """Ends the open block; the tool calls, whole; why the message ends."""
        parts = [self._close()]
        for call in choice.calls:
            parts.append(self._start(_tool_use(call, {})))
            parts.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
            parts.append(_event("content_block_stop", index=self._index))
        self._ended = _ended(choice)
        return b"".join(parts)

    def close(self, reply: Reply) -> bytes:
        """Why the message ended, what it used, and the end of the stream."""
        return _event("message_delta", delta=self._ended, usage=_usage(reply.usage)) + _event("message_stop")

    def error(self, error: BaseException) -> bytes:
        """An error in mid-stream."""
        return _event("error", **_error(error))

    def _start(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open == "reasoning":
            signed = self._delta({"type": "signature_delta", "signature": self._head.thinking_id})
        self._open = None
        return signed + _event("content_block_stop", index=self._index)


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {dump({'type': kind, **fields})}\n\n".encode()


def encode_count(tokens: int) -> bytes:
    """The body of a token count."""
    return encode({"input_tokens": tokens})


def encode_models(names: Sequence[str], created: int) -> bytes:
    """The body of `/v1/models`."""
    models = [model_object(name, created) for name in names]
    ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
    return encode({"data": models, "has_more": False, **ends})


def model_object(name: str, created: int) -> dict[str, Any]:
    """One model, as `/v1/models/<name>` shows it."""
    made = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": made}


_TYPES: Final = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
                 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
                 529: "overloaded_error"}  # fmt: skip


def message_status(error: BaseException) -> int:
    """The HTTP status of an error."""
    return 529 if isinstance(error, EngineOverloaded) else error_status(error)


def encode_error(error: BaseException) -> bytes:
    """The body of an error."""
    return encode({"type": "error", **_error(error)})


def _error(error: BaseException) -> dict[str, Any]:
    status = message_status(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = error_message(error)
    if isinstance(error, RequestError) and error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # the words by which clients know it
    return {"error": {"type": kind, "message": message}}
