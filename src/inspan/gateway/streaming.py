"""A request served as server-sent events. Contract: nothing is sent before the engine has answered with something, so
that a fault before that has its own HTTP status, unless that takes longer than a client may wait: then the stream
begins, and is kept alive. A choice's last event is sent after its call is committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from inspan.errors import InspanError
from inspan.gateway.dialects.base import whole_stream
from inspan.gateway.exchange import Exchange, Listener, give_up
from inspan.gateway.reply import Choice, Piece, Reply
from inspan.gateway.request import ModelRequest

KEEP_ALIVE_S: Final = 15.0
_BEGIN: Final = Piece("text", "")
_Heard = tuple[int, Piece | None]  # the choice, and a piece of it; None: it is done


def stream_reply(reply: Reply, request: ModelRequest) -> bytes:
    """A reply that is there already, as a stream."""
    return whole_stream(request.dialect.events(reply, request), reply)


async def stream_exchange(
    exchange: Exchange, created: int, answer: asyncio.Future[Reply], keep_alive_s: float = KEEP_ALIVE_S
) -> AsyncGenerator[bytes, None]:
    """Serve an exchange piece by piece; `answer` gets the whole reply before the last piece is sent.

    An error after the first piece is sent as the dialect's last event, and raised.
    """
    events = exchange.request.dialect.events(exchange.head(created), exchange.request)
    heard: asyncio.Queue[_Heard] = asyncio.Queue()
    tasks: list[asyncio.Task[Choice]] = []
    listeners: list[Listener] = []
    for index in range(exchange.request.n):
        listener = exchange.listener(lambda piece, index=index: heard.put_nowait((index, piece)))
        assert listener is not None
        listeners.append(listener)
        task = asyncio.ensure_future(exchange.choice(index, listener))
        task.add_done_callback(lambda _, index=index: heard.put_nowait((index, None)))
        tasks.append(task)
    begun = False
    try:
        done: dict[int, Choice] = {}
        while True:
            news = await _next(heard, keep_alive_s)
            out = b"" if begun else events.begin()
            if news is None:
                begun = True
                yield out + events.keep_alive
                continue
            index, piece = news
            if piece is None:
                done[index] = choice = tasks[index].result()
                out += events.piece(index, _BEGIN)
                out += b"".join(events.piece(index, rest) for rest in listeners[index].remainder(choice))
                out += events.end(choice)
            else:
                out += events.piece(index, piece)
            if len(done) == len(tasks):
                reply = exchange.reply([done[index] for index in range(len(tasks))], created)
                answer.set_result(reply)
                yield out + events.close(reply)
                return
            begun = True
            yield out
    except Exception as error:
        if not begun:
            raise
        yield events.error(error)
        if not isinstance(error, InspanError):
            raise
    finally:
        await give_up(tasks)


async def _next(heard: asyncio.Queue[_Heard], patience_s: float) -> _Heard | None:
    """What is heard next; None when nothing was for so long."""
    try:
        async with asyncio.timeout(patience_s):
            return await heard.get()
    except TimeoutError:
        return None
