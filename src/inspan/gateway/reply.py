"""The OpenAI Chat Completions dialect, out: replies, stream chunks and errors as bytes. Contract: pure.

Log-probs are of the sampling distribution. In a stream they come in one chunk before the finish chunk, since an engine
reports them when a sample is done; the chunk has the shape that clients know. `bytes` tells what a token is where it
is not whole characters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from inspan.engine.base import Sample
from inspan.errors import EngineOverloaded, InspanError, RequestError
from inspan.trace.records import ToolCall

_dump: Final = json.JSONEncoder(separators=(",", ":")).encode
_NO_LOGPROB: Final = -9999.0  # what the dialect says for a probability of zero
DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled answer as the harness is to see it. `calls` are those that have a name."""

    index: int
    content: str
    calls: tuple[ToolCall, ...]
    finish: str
    logprobs: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; `cached` of the prompt's came from the prefix cache."""

    prompt: int
    completion: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: Usage


def encode_reply(reply: Reply) -> bytes:
    """The body of a reply that is not streamed."""
    return _encode(
        {
            "id": reply.id,
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


def _encode(body: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError:  # a lone surrogate in what the model wrote
        return _dump(body).encode()


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
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
    }


class Chunks:
    """The chunks of one streamed reply."""

    def __init__(self, id: str, created: int, model: str, *, include_usage: bool) -> None:
        head = {"id": id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._head = "data: " + _dump(head)[:-1]
        self._include_usage = include_usage
        self._tail = ',"usage":null}\n\n' if include_usage else "}\n\n"

    def role(self, index: int) -> bytes:
        """The chunk that begins a choice."""
        return self._chunk(index, {"role": "assistant", "content": "", "refusal": None})

    def text(self, index: int, piece: str) -> bytes:
        """A piece of content."""
        return self._chunk(index, {"content": piece})

    def calls(self, choice: Choice) -> bytes:
        """The tool calls of a choice, whole."""
        return b"".join(
            self._chunk(choice.index, {"tool_calls": [{"index": at, **_call(call)}]})
            for at, call in enumerate(choice.calls)
        )

    def end(self, choice: Choice) -> bytes:
        """Log-probs, if they were asked for, and the finish reason."""
        first = b""
        if choice.logprobs is not None:
            first = self._chunk(choice.index, {}, logprobs={"content": choice.logprobs, "refusal": None})
        return first + self._chunk(choice.index, {}, finish=choice.finish)

    def close(self, usage: Usage) -> bytes:
        """The usage chunk, if it was asked for, and the end of the stream."""
        if not self._include_usage:
            return DONE
        return f'{self._head},"choices":[],"usage":{_dump(_usage(usage))}}}\n\n'.encode() + DONE

    def whole(self, reply: Reply) -> bytes:
        """A reply that is there already, as a stream."""
        parts = []
        for choice in reply.choices:
            parts.append(self.role(choice.index))
            if choice.content:
                parts.append(self.text(choice.index, choice.content))
            parts += [self.calls(choice), self.end(choice)]
        return b"".join([*parts, self.close(reply.usage)])

    def _chunk(self, index: int, delta: Any, finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return f'{self._head},"choices":[{_dump(choice)}]{self._tail}'.encode()


def logprob_entries(
    sample: Sample, token_bytes: Callable[[int], bytes | None], stop_ids: Sequence[int]
) -> list[dict[str, Any]]:
    """The log-probs of a sample's tokens (the end of turn left out) in the dialect's shape."""
    entries = []
    for at, token in enumerate(sample.tokens):
        if token in stop_ids:
            continue
        entry = _entry(token_bytes(token), sample.logprobs[at])
        top = sample.top[at] if at < len(sample.top) else ()
        entry["top_logprobs"] = [_entry(token_bytes(other), logprob) for other, logprob in top]
        entries.append(entry)
    return entries


def _entry(raw: bytes | None, logprob: float) -> dict[str, Any]:
    text = "" if raw is None else raw.decode("utf-8", "replace")
    spelled = None if raw is None else list(raw)
    return {"token": text, "logprob": logprob if math.isfinite(logprob) else _NO_LOGPROB, "bytes": spelled}


_TYPES: Final = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
                 404: "not_found_error", 429: "rate_limit_error"}  # fmt: skip


def error_status(error: BaseException) -> int:
    """The HTTP status of an error."""
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, EngineOverloaded):
        return 429
    return 503 if isinstance(error, InspanError) else 500


def encode_error(error: BaseException) -> bytes:
    """The body of an error in the dialect's shape. Faults of our own name no internals beyond their message."""
    status = error_status(error)
    param = code = None
    message = str(error) if isinstance(error, InspanError) else "the gateway failed"
    if isinstance(error, RequestError):
        param, code = error.param, error.code
    elif status == 429:
        code = "overloaded"
    elif status == 503:
        code = "infrastructure"
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return _encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def encode_models(names: Sequence[str], created: int) -> bytes:
    """The body of `/v1/models`."""
    models = [{"id": name, "object": "model", "created": created, "owned_by": "inspan"} for name in names]
    return _encode({"object": "list", "data": models})
