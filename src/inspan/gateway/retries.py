"""Which answer a repeated request gets. Contract: only requests that are *marked* as repeated share an answer.

A mark is `x-stainless-retry-count` above 0 (the openai clients send it) or an idempotency key. An identical request
without a mark is a wish for another sample. Answers that failed are not shared: the retry is served afresh.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from inspan.errors import RequestError
from inspan.gateway.reply import Choice, Reply, Usage
from inspan.trace.records import Call, Node, Session

REMEMBERED: Final = 16  # answers of a session


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request says beside its body: the tool call that it is made for, and whether it repeats another.

    `body` tells bodies apart; `role` is the one that the path names, whatever the model's name; `client` is its
    user-agent header.
    """

    body: str
    parent_call: str | None = None
    role: str | None = None
    retry: bool = False
    idempotency_key: str | None = None
    client: str = ""

    @property
    def name(self) -> str:
        """What is recorded of the request, to know a retry of it by after a restart."""
        return self.body if self.idempotency_key is None else f"{self.body} {self.idempotency_key}"


class Replies:
    """The last answers of one session, and those to come."""

    def __init__(self) -> None:
        self._entries: OrderedDict[object, tuple[object, asyncio.Future[Reply] | Reply]] = OrderedDict()

    async def shared(self, ask: Ask) -> Reply | None:
        """The answer of the request that this one repeats, waiting for it if need be; None: serve it afresh.

        Raises `RequestError` when an idempotency key comes again with another body.
        """
        if not ask.retry and ask.idempotency_key is None:
            return None
        body, future = self._entries.get(_key(ask), (None, None))
        if future is None:
            return None
        if body != ask.body:
            raise RequestError("was used before with another body", param="Idempotency-Key")
        if isinstance(future, Reply):
            return future
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if future.cancelled() and not (task and task.cancelling()):
                return None  # the first attempt was given up, or failed
            raise

    def remember(self, name: str, reply: Reply) -> None:
        """Take in the answer of a request before the gateway was started again; `name` is its `Ask.name`."""
        body, _, key = name.partition(" ")
        self._entries[_key(Ask(body, idempotency_key=key or None))] = (body, reply)
        if len(self._entries) > REMEMBERED:
            self._entries.popitem(last=False)

    def begin(self, ask: Ask) -> asyncio.Future[Reply]:
        """Remember a request. Set the future's result when it is answered; cancel it when it failed."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        key = _key(ask)
        self._entries[key] = (ask.body, future)
        self._entries.move_to_end(key)
        if len(self._entries) > REMEMBERED:
            self._entries.popitem(last=False)
        return future


def recorded_replies(session: Session, nodes: Sequence[Node], calls: Sequence[Call]) -> Iterator[tuple[str, Reply]]:
    """The answers that a session's records hold, with the names of their requests; the newest of a name comes last.

    An answer with log-probs, of several choices, or that continued an unfinished message was not recorded in full: its
    calls have no name.
    """
    messages = {node.id: node.message for node in nodes}
    for call in calls:
        if call.session != session.id or call.node is None or not call.ask:
            continue
        message = messages[call.node]
        named = tuple(one for one in call.tool_calls if one.name)
        reasoning = str(message.get("reasoning", ""))
        choice = Choice(
            0, str(message["content"]), named, call.finish, None, reasoning, str(message.get("reasoning_id", ""))
        )
        usage = Usage(call.prompt_tokens, call.completion_tokens)
        yield call.ask, Reply(call.id, 0, session.agent, (choice,), usage, choice.reasoning_id)


def _key(ask: Ask) -> object:
    return ask.body if ask.idempotency_key is None else ("key", ask.idempotency_key)
