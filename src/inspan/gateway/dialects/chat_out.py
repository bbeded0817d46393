"""The OpenAI Chat Completions dialect, out: replies, stream chunks and the list of models as bytes. Contract: pure.

Thinking is `reasoning_content`, as the servers of open models spell it. In a stream, log-probs come in one chunk before
the finish chunk, since an engine reports them when a sample is done; the chunk has the shape that clients know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from inspan.gateway.dialects.base import openai_error
from inspan.gateway.reply import Choice, Piece, Reply, Usage, dump, encode
from inspan.gateway.request import ModelRequest
from inspan.trace.records import ToolCall

DONE: Final = b"data: [DONE]\n\n"


def encode_reply(reply: Reply) -> bytes:
    """The body of a reply that is not streamed."""
    return encode(
        {
            "id": _id(reply),
            "object": "chat.completion",
            "created": reply.created,
            "model": reply.model,
            "choices": [
                {
                    "index": choice.index,
                    "message": _message(choice),
                    "logprobs": None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None},
                    "finish_reason": choice.finish,
                }
                for choice in reply.choices
            ],
            "usage": _usage(reply.usage),
        }
    )


def _id(reply: Reply) -> str:
    return f"chatcmpl-{reply.id}"


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["content"] = choice.content or None
        message["tool_calls"] = [_call(call) for call in choice.calls]
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


class ChatEvents:
    """The chunks of one streamed reply."""

    keep_alive = b": keep-alive\n\n"

    def __init__(self, head: Reply, *, include_usage: bool) -> None:
        fields = {"id": _id(head), "object": "chat.completion.chunk", "created": head.created, "model": head.model}
        self._head = "data: " + dump(fields)[:-1]
        self._include_usage = include_usage
        self._tail = ',"usage":null}\n\n' if include_usage else "}\n\n"
        self._begun: set[int] = set()

    def begin(self) -> bytes:
        """Nothing: a choice begins with its first piece."""
        return b""

    def piece(self, index: int, piece: Piece) -> bytes:
        """A piece of content or thinking, after the chunk that begins the choice."""
        first = b""
        if index not in self._begun:
            self._begun.add(index)
            first = self._chunk(index, {"role": "assistant", "content": "", "refusal": None})
        if not piece.text:
            return first
        return first + self._chunk(index, {"content" if piece.kind == "text" else "reasoning_content": piece.text})

    def end(self, choice: Choice) -> bytes:
        """The tool calls of a choice, whole; log-probs, if they were asked for, and the finish reason."""
        parts = [
            self._chunk(choice.index, {"tool_calls": [{"index": at, **_call(call)}]})
            for at, call in enumerate(choice.calls)
        ]
        if choice.logprobs is not None:
            parts.append(self._chunk(choice.index, {}, logprobs={"content": choice.logprobs, "refusal": None}))
        return b"".join([*parts, self._chunk(choice.index, {}, finish=choice.finish)])

    def close(self, reply: Reply) -> bytes:
        """The usage chunk, if it was asked for, and the end of the stream."""
        if not self._include_usage:
            return DONE
        return f'{self._head},"choices":[],"usage":{dump(_usage(reply.usage))}}}\n\n'.encode() + DONE

    def error(self, error: BaseException) -> bytes:
        """An error in mid-stream."""
        return b"data: " + encode({"error": openai_error(error)}) + b"\n\n"

    def _chunk(self, index: int, delta: Any, finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return f'{self._head},"choices":[{dump(choice)}]{self._tail}'.encode()


def encode_models(names: Sequence[str], created: int) -> bytes:
    """The body of `/v1/models`."""
    return encode({"object": "list", "data": [model_object(name, created) for name in names]})


def model_object(name: str, created: int) -> dict[str, Any]:
    """One model, as `/v1/models/<name>` shows it."""
    return {"id": name, "object": "model", "created": created, "owned_by": "inspan"}


def chat_body(request: ModelRequest) -> dict[str, Any]:
    """A request of any dialect as a Chat Completions body that is not streamed, for an outside model."""
    if request.dialect.name == "chat":
        return {key: value for key, value in request.body.items() if key not in ("stream", "stream_options")}
    body: dict[str, Any] = {"messages": [m for m in map(_sent, request.messages) if m is not None]}
    if request.tools:
        body["tools"] = list(request.tools)
        choice = request.tool_choice
        if choice is not None and choice.startswith("function:"):
            body["tool_choice"] = {"type": "function", "function": {"name": choice.removeprefix("function:")}}
        elif choice in ("auto", "required"):
            body["tool_choice"] = choice
    given = {
        "max_tokens": request.max_tokens, "temperature": request.temperature, "top_p": request.top_p,
        "stop": list(request.stop) or None,
    }  # fmt: skip
    return body | {key: value for key, value in given.items() if value is not None}


def _sent(message: Mapping[str, Any]) -> dict[str, Any] | None:
    if message["role"] == "system" and not message["content"]:
        return None  # it only carries the tools
    sent = {key: message[key] for key in ("role", "content", "tool_call_id") if key in message}
    if message.get("tool_calls"):
        sent["tool_calls"] = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for c in message["tool_calls"]
        ]
    return sent
