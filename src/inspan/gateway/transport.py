"""Two ways to the gateway: in-process without a socket, and a loopback server. Same handlers, same bytes.

In-process, a request runs in the task of the client that makes it: cancelling the client cancels the request, as a
closed connection would.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from typing import Any, Final
from urllib.parse import unquote

import httpx2
import uvicorn

from inspan.errors import InfrastructureError, InputError, RequestError
from inspan.gateway.app import CANCELS
from inspan.gateway.dialects import dialect_of

_EXTENSIONS: Final = {CANCELS: {}}
IN_PROCESS_URL: Final = "http://inspan"
App = Callable[..., Awaitable[None]]


class InProcessTransport(httpx2.AsyncBaseTransport):
    """Hands requests to an ASGI application. Streams piece by piece; closing a response early ends its request."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Serve one request. What the application raises is raised here."""
        body = await request.aread()
        exchange = _Exchange(self._app, _scope(request, body), body)
        if request.headers.get("accept") == "text/event-stream" or b'"stream"' in body:
            return await exchange.streamed()
        return await exchange.whole()


class _Exchange:
    """One call of the application."""

    def __init__(self, app: App, scope: dict[str, Any], body: bytes) -> None:
        self._app, self._scope, self._body = app, scope, body
        self._status = 500
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._news = asyncio.Event()
        self._ended = False

    async def whole(self) -> httpx2.Response:
        await self._app(self._scope, self._receive, self._send)
        return self._response(httpx2.ByteStream(b"".join(self._parts)))

    async def streamed(self) -> httpx2.Response:
        task = asyncio.ensure_future(self._app(self._scope, self._receive, self._send))
        task.add_done_callback(lambda _: self._end())
        try:
            await self._news.wait()
        except BaseException:
            task.cancel()
            raise
        if task.done() and not self._headers:
            await task  # it raised before it answered
        return self._response(_Stream(self._pieces(task), task))

    async def _pieces(self, task: asyncio.Task[None]) -> AsyncIterator[bytes]:
        while True:
            parts, self._parts = self._parts, []
            for part in parts:
                yield part
            if self._ended and not self._parts:
                await task
                return
            self._news.clear()
            if not self._parts and not self._ended:
                await self._news.wait()

    def _end(self) -> None:
        self._ended = True
        self._news.set()

    def _response(self, stream: httpx2.AsyncByteStream | httpx2.ByteStream) -> httpx2.Response:
        return httpx2.Response(self._status, headers=self._headers, stream=stream)

    async def _receive(self) -> MutableMapping[str, Any]:
        body, self._body = self._body, b""
        return {"type": "http.request", "body": body, "more_body": False}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = list(message["headers"])
        elif message.get("body"):
            self._parts.append(message["body"])
            self._news.set()


class _Stream(httpx2.AsyncByteStream):
    def __init__(self, pieces: AsyncIterator[bytes], task: asyncio.Task[None]) -> None:
        self._pieces, self._task = pieces, task

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._pieces:
            yield piece

    async def aclose(self) -> None:
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait((self._task,))


def _scope(request: httpx2.Request, body: bytes) -> dict[str, Any]:
    raw = request.url.raw_path
    path, _, query = raw.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": unquote(path.decode("ascii")),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "server": ("inspan", 80),
        "client": ("in-process", 0),
        "extensions": _EXTENSIONS,
    }


def in_process_client(app: App, **options: Any) -> httpx2.AsyncClient:
    """A client whose requests reach the application without a socket; hand it to `openai.AsyncOpenAI(http_client=…)`.

    Its base URL is `IN_PROCESS_URL` + the grant's `base_path`.
    """
    return httpx2.AsyncClient(transport=InProcessTransport(app), timeout=None, **options)


# ---- over a socket ----------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serve(
    app: App, host: str = "127.0.0.1", port: int = 0, *, key: str | None = None, open_to_others: bool = False
) -> AsyncIterator[str]:
    """Serve an application in this event loop while the context lasts; yields the base URL, without a slash.

    Port 0 lets the system pick. A host that others can reach needs a `key`: then every request must carry it as API
    key, beside the key in its path; or the application is `open_to_others` because it asks for keys itself. Raises
    `InputError` when the port is in use or the host may not be bound.
    """
    if key is None and not open_to_others and not is_loopback(host):
        raise InputError(f"{host} can be reached from other machines", where="gateway",
                         hint="bind 127.0.0.1, or give a key that every request must carry")  # fmt: skip
    with _bind(host, port) as listening:
        config = uvicorn.Config(
            app if key is None else _Keyed(app, key),
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_S,
            backlog=2048,
        )
        server = _Server(config)
        task = asyncio.ensure_future(server.serve(sockets=[listening]))
        try:
            while not server.started:
                if task.done():
                    await task
                    raise InfrastructureError("the server ended as it started", where=f"{host}:{port}")
                await asyncio.sleep(0.001)
            shown = f"[{host}]" if ":" in host else host
            yield f"http://{shown}:{listening.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            await asyncio.wait((task,))


_KEEP_ALIVE_S: Final = 3600  # a connection that is closed while a client's tool runs may break its next request


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone: Ctrl-C belongs to the program around it."""
        yield


class _Keyed:
    """Lets only requests with the server's key through."""

    def __init__(self, app: App, key: str) -> None:
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"").partition(b" ")[2].strip() or headers.get(b"x-api-key", b"")
        if hmac.compare_digest(given, self._key):
            await self._app(scope, receive, send)
            return
        fault = RequestError("the server's API key is missing or wrong", status=401, code="invalid_api_key")
        body = dialect_of(scope["path"], headers).error(fault)
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is named; without it each answer waits 40 ms for an ACK
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(2048)
    except (OSError, OverflowError) as error:
        listening.close()
        hint = "give another port, or 0 to let the system pick one"
        raise InputError(f"cannot listen on {host}:{port}: {error}", where="gateway", hint=hint) from error
    return listening
