"""A request served as server-sent events. Contract: nothing is sent before the engine has answered with something, so
that a fault before that has its own HTTP status; a choice's last chunk is sent after its call is committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from inspan.gateway.chat import ChatRequest
from inspan.gateway.exchange import Exchange, Listener, give_up
from inspan.gateway.reply import Choice, Chunks, Reply

_Piece = tuple[int, str | None]  # the choice, and a piece of its content; None: it is done


def stream_reply(reply: Reply, request: ChatRequest) -> bytes:
    """A reply that is there already, as a stream."""
    return Chunks(reply.id, reply.created, reply.model, include_usage=request.include_usage).whole(reply)


async def stream_exchange(
    exchange: Exchange, created: int, answer: asyncio.Future[Reply]
) -> AsyncGenerator[bytes, None]:
    """Serve an exchange piece by piece; `answer` gets the whole reply before the last piece is sent."""
    chunks = Chunks(exchange.reply_id, created, exchange.model, include_usage=exchange.request.include_usage)
    pieces: asyncio.Queue[_Piece] = asyncio.Queue()
    tasks: list[asyncio.Task[Choice]] = []
    listeners: list[Listener] = []
    for index in range(exchange.request.n):
        listener = exchange.listener(lambda piece, index=index: pieces.put_nowait((index, piece)))
        assert listener is not None
        listeners.append(listener)
        task = asyncio.ensure_future(exchange.choice(index, listener))
        task.add_done_callback(lambda _, index=index: pieces.put_nowait((index, None)))
        tasks.append(task)
    begun: set[int] = set()
    try:
        done: dict[int, Choice] = {}
        while len(done) < len(tasks):
            index, piece = await pieces.get()
            if piece is None:
                done[index] = choice = tasks[index].result()
                piece = listeners[index].remainder(choice.content)
            first = b"" if index in begun else chunks.role(index)
            begun.add(index)
            text = chunks.text(index, piece) if piece else b""
            end = chunks.calls(done[index]) + chunks.end(done[index]) if index in done else b""
            if len(done) < len(tasks):
                yield first + text + end
                continue
            reply = exchange.reply([done[index] for index in range(len(tasks))], created)
            answer.set_result(reply)
            yield first + text + end + chunks.close(reply.usage)
    finally:
        await give_up(tasks)
