"""The ASGI application. Contract: all answers, errors too, have the dialect's shape; no malformed request is a 500.

    POST /r/<key>/v1/chat/completions | responses | messages | messages/count_tokens
    GET  /r/<key>/v1/models, /r/<key>/v1/models/<name>

The same paths without `/r/<key>` take the key as bearer token or `x-api-key`. Between key and `v1` a path may say whose
call it is: `/as/<role>` and `/call/<tool call id>`, for programs that can be given a base URL and no header. A client
that goes away cancels what the engine samples for it. Over a socket that is heard from `receive`; in-process the
client's cancellation reaches the handler itself, which the transport says with the scope extension `CANCELS`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from inspan.errors import InspanError, RequestError
from inspan.gateway.dialects import DIALECTS, chat_out, dialect_of, messages_out
from inspan.gateway.dialects.messages import MESSAGES
from inspan.gateway.reply import encode
from inspan.gateway.retries import Ask

if TYPE_CHECKING:
    from inspan.gateway.dialects.base import Dialect
    from inspan.gateway.gateway import Gateway
    from inspan.gateway.live import LiveRollout
    from inspan.gateway.request import ModelRequest

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = dict[bytes, bytes]

CANCELS: Final = "inspan.cancels"
_BIG: Final = 1 << 20  # bodies from this size are parsed in a thread
_PATIENCE_S: Final = 0.02  # how long a request may run before its client is watched
_COUNT: Final = "messages/count_tokens"
_JSON: Final = (b"content-type", b"application/json")
_EVENTS: Final = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_RETRY: Final = (429, 529)
_log = logging.getLogger("inspan.gateway")


class _Gone(Exception):
    """The client went away."""


@dataclass(frozen=True, slots=True)
class Address:
    """What a path says: the key, whose call it is, and the endpoint (what follows `/v1/`)."""

    endpoint: str
    key: str | None = None
    role: str | None = None
    parent_call: str | None = None


def read_path(path: str) -> Address | None:
    """The address that a path gives; None when it is none of the gateway's."""
    parts = path.split("/")
    said: dict[str, str] = {}
    at = 1
    while at + 1 < len(parts) and parts[at] in _SAYS and parts[at + 1]:
        said[_SAYS[parts[at]]] = parts[at + 1]
        at += 2
    if at >= len(parts) or parts[at] != "v1":
        return None
    return Address("/".join(parts[at + 1 :]), **said)


_SAYS: Final = {"r": "key", "as": "role", "call": "parent_call"}


class App:
    """The application of a gateway. It routes by itself: what a framework costs would be a fifth of the call."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"the gateway speaks http, not {scope['type']}")
        headers: Headers = dict(scope["headers"])
        try:
            address = read_path(scope["path"])
            if address is None:
                raise _not_found()
            dialect = DIALECTS.get(address.endpoint)
            if dialect is not None:
                _only(scope, "POST")
                await self._call(dialect, address, headers, scope, receive, send)
            elif address.endpoint == _COUNT:
                _only(scope, "POST")
                await self._count(address, headers, receive, send)
            elif address.endpoint == "models" or address.endpoint.startswith("models/"):
                _only(scope, "GET")
                await self._models(address, headers, send)
            else:
                raise _not_found()
        except _Gone:
            return
        except InspanError as error:
            await _send_error(send, dialect_of(scope["path"], headers), error)
        except Exception as error:
            _log.exception("a request failed")
            await _send_error(send, dialect_of(scope["path"], headers), error)

    async def _call(
        self, dialect: Dialect, address: Address, headers: Headers, scope: Scope, receive: Receive, send: Send
    ) -> None:
        live = self._gateway.authorise(_key(address, headers))
        live.meter.begin(self._gateway.monotonic())
        try:
            await self._answer(dialect, live, address, headers, scope, receive, send)
        finally:
            live.meter.end()

    async def _answer(
        self,
        dialect: Dialect,
        live: LiveRollout,
        address: Address,
        headers: Headers,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        raw = await _body(headers, receive, min(self._gateway.max_body, live.meter.pace.body or self._gateway.max_body))
        ask = _ask(raw, address, headers)
        before = live.latest.get(ask.parent_call)
        if len(raw) < _BIG:
            request = dialect.parse(raw, before)
        else:
            request = await asyncio.to_thread(dialect.parse, raw, before)
        serve = self._stream if request.stream else self._reply
        work = serve(live, request, ask, send)
        if CANCELS in scope.get("extensions", ()):
            await work
        else:
            await _while_connected(receive, work)

    async def _reply(self, live: LiveRollout, request: ModelRequest, ask: Ask, send: Send) -> None:
        reply = await self._gateway.reply(live, request, ask)
        await _send(send, 200, request.dialect.encode(reply, request))

    async def _stream(self, live: LiveRollout, request: ModelRequest, ask: Ask, send: Send) -> None:
        pieces = self._gateway.stream(live, request, ask)
        try:
            first = await anext(pieces)
            await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for piece in pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except Exception:  # the stream has told the client
                _log.exception("a stream failed")
            await send({"type": "http.response.body", "body": b""})
        finally:
            await pieces.aclose()

    async def _count(self, address: Address, headers: Headers, receive: Receive, send: Send) -> None:
        live = self._gateway.authorise(_key(address, headers))
        raw = await _body(headers, receive, self._gateway.max_body)
        request = await asyncio.to_thread(MESSAGES.parse_count, raw)
        tokens = await self._gateway.count(live, request, _ask(raw, address, headers))
        await _send(send, 200, messages_out.encode_count(tokens))

    async def _models(self, address: Address, headers: Headers, send: Send) -> None:
        names = self._gateway.models(self._gateway.authorise(_key(address, headers)))
        shape = messages_out if b"anthropic-version" in headers else chat_out
        created, _, name = int(self._gateway.clock()), *address.endpoint.partition("/")[1:]
        if not name:
            body = shape.encode_models(names, created)
        elif name in names:
            body = encode(shape.model_object(name, created))
        else:
            raise RequestError(f"there is no model {name!r:.80}", status=404, code="model_not_found")
        await _send(send, 200, body)


def _not_found() -> RequestError:
    serves = ", ".join(f"/v1/{tail}" for tail in (*DIALECTS, _COUNT, "models"))
    return RequestError(f"Not Found: the gateway serves {serves}", status=404)


def _only(scope: Scope, method: str) -> None:
    if scope["method"] != method:
        raise RequestError(f"Method Not Allowed: use {method}", status=405)


def _key(address: Address, headers: Headers) -> str | None:
    """The key in the path, else the bearer token, else `x-api-key`."""
    if address.key is not None:
        return address.key
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        token = headers.get(b"x-api-key", b"")
    return token.strip().decode("latin-1")


def _ask(raw: bytes, address: Address, headers: Headers) -> Ask:
    count = headers.get(b"x-stainless-retry-count", b"0")
    parent, key = headers.get(b"x-parent-call"), headers.get(b"idempotency-key")
    return Ask(
        blake2b(raw, digest_size=16).hexdigest(),
        address.parent_call if not parent else parent.decode("latin-1"),
        address.role,
        count.isdigit() and int(count[:9]) > 0,
        None if not key else key.decode("latin-1"),
        headers.get(b"user-agent", b"").decode("latin-1"),
    )


async def _body(headers: Headers, receive: Receive, most: int) -> bytes:
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


async def _send_error(send: Send, dialect: Dialect, error: Exception) -> None:
    status = dialect.status(error)
    wait = getattr(error, "retry_after", None) or (1.0 if status in _RETRY else None)
    extra = () if wait is None else ((b"retry-after", b"%d" % math.ceil(wait)),)
    await _send(send, status, dialect.error(error), extra)
