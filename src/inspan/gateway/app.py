"""The ASGI application. Contract: every answer, errors too, has the OpenAI shape; a malformed request is never a 500.

    POST /r/<key>/v1/chat/completions      POST /v1/chat/completions (Authorization: Bearer, or x-api-key)
    GET  /r/<key>/v1/models                GET  /v1/models

A client that goes away cancels what the engine samples for it. Over a socket that is heard from `receive`; in-process
the client's cancellation reaches the handler itself, which the transport says with the scope extension `CANCELS`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from inspan.errors import InspanError, RequestError
from inspan.gateway.chat import ChatRequest, parse_request
from inspan.gateway.reply import encode_error, encode_models, encode_reply, error_status
from inspan.gateway.retries import Ask

if TYPE_CHECKING:
    from inspan.gateway.gateway import Gateway
    from inspan.gateway.live import LiveRollout

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

CANCELS: Final = "inspan.cancels"
_BIG: Final = 1 << 20  # bodies from this size are parsed in a thread
_PATIENCE_S: Final = 0.02  # how long a request may run before its client is watched
_CHAT: Final = ["v1", "chat", "completions"]
_JSON: Final = (b"content-type", b"application/json")
_EVENTS: Final = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_log = logging.getLogger("inspan.gateway")


class _Gone(Exception):
    """The client went away."""


class App(Starlette):
    """The application of a gateway. A chat request with its key in the path goes straight to its endpoint: what routing
    and middleware cost would be a fifth of the call."""

    def __init__(self, gateway: Gateway) -> None:
        self._chat = ChatCompletions(gateway)
        routes = [
            Route(prefix + path, endpoint, methods=[method])
            for prefix in ("/r/{key}/v1", "/v1")
            for path, endpoint, method in (
                ("/chat/completions", self._chat, "POST"),
                ("/models", Models(gateway), "GET"),
            )
        ]
        super().__init__(routes=routes, exception_handlers={HTTPException: _http_error})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["method"] == "POST" and not scope.get("root_path"):
            parts = scope["path"].split("/")
            if len(parts) == 6 and parts[1] == "r" and parts[2] and parts[3:] == _CHAT:
                scope["path_params"] = {"key": parts[2]}
                await self._chat(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    fault = RequestError(f"{error.detail}: the gateway serves /v1/chat/completions and /v1/models",
                         status=error.status_code)  # fmt: skip
    return Response(encode_error(fault), error.status_code, error.headers, "application/json")


class Models:
    """`/v1/models`: the roles of a key."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            live = self._gateway.authorise(_key(scope, _headers(scope)))
            await _send(send, 200, encode_models(self._gateway.models(live), int(self._gateway.clock())))
        except InspanError as error:
            await _send_error(send, error)


class ChatCompletions:
    """`/v1/chat/completions`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            headers = _headers(scope)
            live = self._gateway.authorise(_key(scope, headers))
            raw = await _body(headers, receive, self._gateway.max_body)
            ask = _ask(raw, headers)
            before = live.latest.get(ask.parent_call)
            if len(raw) < _BIG:
                request = parse_request(raw, before)
            else:
                request = await asyncio.to_thread(parse_request, raw, before)
            serve = self._stream if request.stream else self._reply
            work = serve(live, request, ask, send)
            if CANCELS in scope.get("extensions", ()):
                await work
            else:
                await _while_connected(receive, work)
        except _Gone:
            return
        except InspanError as error:
            await _send_error(send, error)
        except Exception as error:
            _log.exception("a request failed")
            await _send_error(send, error)

    async def _reply(self, live: LiveRollout, request: ChatRequest, ask: Ask, send: Send) -> None:
        await _send(send, 200, encode_reply(await self._gateway.reply(live, request, ask)))

    async def _stream(self, live: LiveRollout, request: ChatRequest, ask: Ask, send: Send) -> None:
        pieces = self._gateway.stream(live, request, ask)
        try:
            first = await anext(pieces)
            await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for piece in pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except Exception as error:  # the status is out: the error comes as an event
                if not isinstance(error, InspanError):
                    _log.exception("a stream failed")
                await send({"type": "http.response.body", "body": b"data: " + encode_error(error) + b"\n\n"})
                return
            await send({"type": "http.response.body", "body": b""})
        finally:
            await pieces.aclose()


def _headers(scope: Scope) -> dict[bytes, bytes]:
    return dict(scope["headers"])


def _key(scope: Scope, headers: dict[bytes, bytes]) -> str | None:
    """The key in the path, else the bearer token, else `x-api-key`."""
    key = scope["path_params"].get("key")
    if key is not None:
        return key
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        token = headers.get(b"x-api-key", b"")
    return token.strip().decode("latin-1")


def _ask(raw: bytes, headers: dict[bytes, bytes]) -> Ask:
    count = headers.get(b"x-stainless-retry-count", b"0")
    parent, key = headers.get(b"x-parent-call"), headers.get(b"idempotency-key")
    return Ask(
        (hash(raw), len(raw)),
        None if not parent else parent.decode("latin-1"),
        count.isdigit() and int(count[:9]) > 0,
        None if not key else key.decode("latin-1"),
    )


async def _body(headers: dict[bytes, bytes], receive: Receive, most: int) -> bytes:
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > most:
        raise _too_long(most)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            raise _too_long(most)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_long(most: int) -> RequestError:
    return RequestError(f"the body is longer than {most} bytes", status=413, code="body_too_large")


async def _while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Do the work, unless the client goes away first: then it is cancelled, and `_Gone` raised.

    Most work is done before anyone could go away, so the watch begins a little later.
    """
    task = asyncio.current_task()
    assert task is not None
    watching: list[asyncio.Task[None]] = []
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(_PATIENCE_S, lambda: watching.append(asyncio.ensure_future(watch())))
    try:
        await work
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise _Gone from None
        raise
    finally:
        timer.cancel()
        for watcher in watching:
            watcher.cancel()


async def _send(send: Send, status: int, body: bytes, extra: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    headers = [_JSON, (b"content-length", b"%d" % len(body)), *extra]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_error(send: Send, error: Exception) -> None:
    status = error_status(error)
    await _send(send, status, encode_error(error), ((b"retry-after", b"1"),) if status == 429 else ())
