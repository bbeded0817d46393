"""What a dialect is: a way to spell requests, answers, streams and errors. Contract: pure; no I/O, no engine, no state
but that of one stream. Every dialect comes to the same `ModelRequest` and is served from the same `Reply`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from inspan.errors import EngineOverloaded, InspanError, RequestError
from inspan.gateway.reply import Choice, Piece, Reply
from inspan.gateway.request import ModelRequest


class Events(Protocol):
    """The events of one streamed answer, in order: `begin`, then pieces and ends of choices, then `close`."""

    keep_alive: bytes  # may come between any two events while there is nothing to say

    def begin(self) -> bytes:
        """What comes before anything is sampled; may be empty."""
        ...

    def piece(self, index: int, piece: Piece) -> bytes:
        """Some text of a choice. An empty text begins the choice."""
        ...

    def end(self, choice: Choice) -> bytes:
        """What a choice has beside its text, and that it is done. The rest of its text was given as pieces."""
        ...

    def close(self, reply: Reply) -> bytes:
        """The end of the stream."""
        ...

    def error(self, error: BaseException) -> bytes:
        """An error after the stream has begun: its last event."""
        ...


class Dialect(Protocol):
    """A protocol that harnesses speak."""

    name: str

    def parse(self, raw: bytes, before: ModelRequest | None = None) -> ModelRequest:
        """Check a request body; raises `RequestError` with the offending field.

        `before` is a request that this one may continue: messages that are equal to its own need no second look.
        """
        ...

    def encode(self, reply: Reply, request: ModelRequest) -> bytes:
        """The body of an answer that is not streamed."""
        ...

    def events(self, head: Reply, request: ModelRequest) -> Events:
        """The events of a streamed answer; `head` is the reply as far as it is known, without choices."""
        ...

    def error(self, error: BaseException) -> bytes:
        """The body of an error."""
        ...

    def status(self, error: BaseException) -> int:
        """The HTTP status of an error."""
        ...


def whole_stream(events: Events, reply: Reply) -> bytes:
    """A reply that is there already, as a stream."""
    parts = [events.begin()]
    for choice in reply.choices:
        parts.append(events.piece(choice.index, Piece("text", "")))
        if choice.reasoning:
            parts.append(events.piece(choice.index, Piece("reasoning", choice.reasoning)))
        if choice.content:
            parts.append(events.piece(choice.index, Piece("text", choice.content)))
        parts.append(events.end(choice))
    return b"".join([*parts, events.close(reply)])


def error_status(error: BaseException) -> int:
    """The HTTP status of an error, where the dialect has no other."""
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, EngineOverloaded):
        return 429
    return 503 if isinstance(error, InspanError) else 500


def error_message(error: BaseException) -> str:
    """What a client is told. Faults of our own name no internals beyond their message."""
    return str(error) if isinstance(error, InspanError) else "the gateway failed"


_TYPES: Final = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
                 404: "not_found_error", 429: "rate_limit_error"}  # fmt: skip


def openai_error(error: BaseException) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    status = error_status(error)
    param = code = None
    if isinstance(error, RequestError):
        param, code = error.param, error.code
    elif status == 429:
        code = "overloaded"
    elif status == 503:
        code = "infrastructure"
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"message": error_message(error), "type": kind, "param": param, "code": code}


Parse = Callable[[bytes, ModelRequest | None], ModelRequest]
Body = Mapping[str, Any]
