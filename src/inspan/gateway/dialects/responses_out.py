"""The OpenAI Responses dialect, out: responses and their events. Contract: pure.

Output items come in the order reasoning, message, calls. Thinking is shown as `reasoning_text`, as the servers of open
models do, and is sealed into `encrypted_content` where the request includes it.
"""

from __future__ import annotations

import base64
import json
from typing import Any, Final

from inspan.gateway.dialects.base import error_message, openai_error
from inspan.gateway.reply import Choice, Piece, Reply, Usage, dump, encode
from inspan.gateway.request import ModelRequest
from inspan.trace.records import ToolCall

_ECHOED: Final = (
    "instructions", "max_output_tokens", "metadata", "previous_response_id", "reasoning", "service_tier", "store",
    "temperature", "text", "tool_choice", "tools", "top_p", "truncation", "user",
)  # fmt: skip
_DEFAULTS: Final = {"metadata": {}, "tool_choice": "auto", "tools": [], "text": {"format": {"type": "text"}}}


def encode_response(reply: Reply, request: ModelRequest) -> bytes:
    """The body of a response that is not streamed."""
    return encode(_response(reply, request, _output(reply.choices[0], reply, request)))


def _response(
    reply: Reply, request: ModelRequest, output: list[Any], status: str | None = None, error: Any = None
) -> dict[str, Any]:
    cut = bool(reply.choices) and reply.choices[0].finish == "length"
    done = status is None
    body = {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "status": status or ("incomplete" if cut else "completed"),
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": reply.model,
        "output": output,
        "parallel_tool_calls": request.body.get("parallel_tool_calls") is not False,
        "usage": _usage(reply.usage) if done else None,
    }
    for name in _ECHOED:
        given = request.body.get(name)
        body[name] = _DEFAULTS.get(name) if given is None else given
    return body


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


def _output(choice: Choice, reply: Reply, request: ModelRequest) -> list[dict[str, Any]]:
    """All output items of a choice."""
    items = []
    if choice.reasoning:
        items.append(_reasoning(choice, request))
    if choice.content or not choice.calls:
        items.append(_message(f"msg_{reply.id}", choice.content, choice.logprobs))
    return items + [_call(call, request) for call in choice.calls]


def _reasoning(choice: Choice, request: ModelRequest) -> dict[str, Any]:
    item = {
        "id": choice.reasoning_id,
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": choice.reasoning}],
    }
    if "reasoning.encrypted_content" in (request.body.get("include") or ()):
        held = json.dumps({"id": choice.reasoning_id, "text": choice.reasoning})
        item["encrypted_content"] = base64.urlsafe_b64encode(held.encode()).decode()
    return item


def _message(id: str, text: str, logprobs: Any = None, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}
    return {"id": id, "type": "message", "status": status, "role": "assistant", "content": [part]}


def _call(call: ToolCall, request: ModelRequest) -> dict[str, Any]:
    head = {"id": "fc_" + call.id.removeprefix("call_"), "call_id": call.id, "name": call.name, "status": "completed"}
    if call.name in request.custom:
        return {"type": "custom_tool_call", **head, "input": _free_text(call.arguments)}
    return {"type": "function_call", **head, "arguments": call.arguments}


def _free_text(arguments: str) -> str:
    """The text of a custom tool's call; arguments of another shape go as they are."""
    try:
        given = json.loads(arguments)
    except ValueError:
        return arguments
    text = given.get("input") if isinstance(given, dict) and len(given) == 1 else None
    return text if isinstance(text, str) else arguments


class ResponseEvents:
    """The events of one streamed response."""

    keep_alive = b": keep-alive\n\n"

    def __init__(self, head: Reply, request: ModelRequest) -> None:
        self._head, self._request = head, request
        self._serial = 0
        self._output: list[dict[str, Any]] = []
        self._open: str | None = None  # the kind of piece of the item that is open
        self._text: list[str] = []

    def begin(self) -> bytes:
        """The response, without output."""
        begun = _response(self._head, self._request, [], "in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def piece(self, index: int, piece: Piece) -> bytes:
        """A piece of text or thinking."""
        if not piece.text:
            return b""
        out = b""
        if self._open != piece.kind:
            out = self._opened(piece.kind)
        self._text.append(piece.text)
        more = {"logprobs": []} if piece.kind == "text" else {}
        return out + self._event(f"response.{_PART[piece.kind]}.delta", **self._place(), delta=piece.text, **more)

    def end(self, choice: Choice) -> bytes:
        """What is open ends; then the calls, whole."""
        parts = []
        items = _output(choice, self._head, self._request)
        said = [item for item in items if item["type"] in ("reasoning", "message")]
        if self._open is not None:
            parts.append(self._closed(choice))
        if len(self._output) < len(said):  # an empty message
            parts += [self._opened("text"), self._closed(choice)]
        for item in items[len(said) :]:
            parts.append(self._called(item))
        return b"".join(parts)

    def close(self, reply: Reply) -> bytes:
        """The whole response."""
        whole = _response(reply, self._request, self._output)
        return self._event(f"response.{whole['status']}", response=whole)

    def error(self, error: BaseException) -> bytes:
        """A failed response."""
        told = openai_error(error)
        fault = {"code": told["code"] or told["type"], "message": error_message(error)}
        failed = _response(self._head, self._request, self._output, "failed", fault)
        return self._event("response.failed", response=failed)

    # ---- inside -------------------------------------------------------------------------------------------------

    def _opened(self, kind: str) -> bytes:
        out = b"" if self._open is None else self._closed(None)
        self._open, self._text = kind, []
        item: dict[str, Any]
        if kind == "text":
            item = {**_message(self._item_id(), "", status="in_progress"), "content": []}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"id": self._item_id(), "type": "reasoning", "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        out += self._event("response.output_item.added", output_index=len(self._output), item=item)
        return out + self._event("response.content_part.added", **self._place(), part=part)

    def _closed(self, choice: Choice | None) -> bytes:
        """The open item ends; its whole form is that of the response without a stream."""
        text, kind = "".join(self._text), self._open
        assert kind is not None
        place = self._place()
        if kind == "text":
            item = _message(self._item_id(), text, choice.logprobs if choice is not None else None)
            more = {"logprobs": item["content"][0]["logprobs"]}
        else:
            thought = Choice(0, "", (), "stop", reasoning=text, reasoning_id=self._head.thinking_id)
            item, more = _reasoning(thought, self._request), {}
        out = self._event(f"response.{_PART[kind]}.done", **place, text=text, **more)
        out += self._event("response.content_part.done", **place, part=item["content"][0])
        out += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None
        return out

    def _called(self, item: dict[str, Any]) -> bytes:
        at = {"item_id": item["id"], "output_index": len(self._output)}
        field, name = (
            ("arguments", "function_call_arguments")
            if item["type"] == "function_call"
            else ("input", "custom_tool_call_input")
        )
        text = item[field]
        out = self._event(
            "response.output_item.added",
            output_index=len(self._output),
            item={**item, field: "", "status": "in_progress"},
        )
        out += self._event(f"response.{name}.delta", **at, delta=text)
        out += self._event(f"response.{name}.done", **at, **{field: text}, name=item["name"])
        out += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return out

    def _item_id(self) -> str:
        return f"msg_{self._head.id}" if self._open == "text" else self._head.thinking_id

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id(), "output_index": len(self._output), "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._serial, **fields}
        self._serial += 1
        return f"event: {kind}\ndata: {dump(body)}\n\n".encode()


_PART: Final = {"text": "output_text", "reasoning": "reasoning_text"}
