"""The gateway on a loopback port, for harnesses that reach the model over a socket. Contract: one port, 127.0.0.1 only.

The server shares the caller's event loop and leaves signals alone, so that Ctrl-C reaches the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from inspan.errors import InspanError


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ctrl-C belongs to the run."""
        yield


class Loopback:
    """An ASGI app served on 127.0.0.1; `port` 0 takes a free one."""

    def __init__(self, app: Any, port: int = 0) -> None:
        self._app, self._port = app, port
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._url = ""

    async def url(self) -> str:
        """The base URL, without a trailing slash; starts the server at the first call."""
        async with self._lock:
            if self._task is None:
                await self._start()
        return self._url

    async def _start(self) -> None:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", self._port))
        except OSError as error:
            sock.close()
            raise InspanError(
                f"port {self._port} is in use", where="gateway", hint="give another port, or 0 for any free one"
            ) from error
        config = uvicorn.Config(self._app, log_level="warning", access_log=False, lifespan="off", backlog=2048)
        self._server = _Server(config)
        self._url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self._task = asyncio.create_task(self._server.serve(sockets=[sock]), name="gateway loopback")
        while not self._server.started:
            if self._task.done():
                await self._task
                raise InspanError("the loopback server ended as it started", where=self._url)
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Stop serving; open connections are closed."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            await self._task
            self._task = None
