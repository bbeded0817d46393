"""Two ways to the gateway: in-process without a socket, and a loopback server. Same handlers, same bytes.

In-process, a request runs in the task of the client that makes it: cancelling the client cancels the request, as a
closed connection would.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, Final
from urllib.parse import unquote

import httpx2

from inspan.gateway.app import CANCELS

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
