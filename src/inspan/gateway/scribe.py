"""Lays a request onto the message graph and renders what is new. Contract: no I/O; deltas are rendered once and cached.

Two scribes with one interface: `DeltaScribe` for renderers whose deltas stand on their own (ChatML), `TemplateScribe`
for chat templates that only render whole conversations.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from inspan.gateway.render import Reader, Renderer, Tail
from inspan.trace.graph import Match, MessageGraph, identity
from inspan.trace.records import Message, Tokens

_CACHED: Final = 2048
_CACHED_CHARS: Final = 4096  # longer messages are rendered each time: they would crowd the cache out
LARGE: Final = 262144  # a request of more characters is rendered in a thread beforehand


@dataclass(frozen=True, slots=True)
class Laid:
    """A request on the graph: its last context node, the generation prompt, and all ids that the engine is to go on.

    `prefill` is the end of `opening` that continues the unfinished assistant message with which the request ends.
    """

    leaf: int
    opening: Tokens
    prompt: Tokens
    prefill: Tokens = ()

    @property
    def generation_prompt(self) -> Tokens:
        """The opening without the prefill."""
        return self.opening[: len(self.opening) - len(self.prefill)]


class Scribe(Protocol):
    """Lays a message list onto a session."""

    @property
    def renderer(self) -> Reader:
        """What reads samples back."""
        ...

    def lay(self, graph: MessageGraph, session: str, messages: Sequence[Message], known: Match | None = None) -> Laid:
        """Match the messages (`known`: where the first of them led before), enter the new ones; where that leads."""
        ...

    async def prepare(self, graph: MessageGraph, session: str, messages: Sequence[Message]) -> None:
        """Render what is large and new in a thread, so that `lay` does not hold up the event loop."""
        ...

    def render_made_up(self, graph: MessageGraph, leaf: int, message: Message) -> Tokens:
        """The delta of a message under `leaf` that our engine did not sample (an outside model's answer)."""
        ...


def lay_prefilled(
    scribe: Scribe, graph: MessageGraph, session: str, messages: Sequence[Message], known: Match | None
) -> Laid | None:
    """Lay a request that ends with an unfinished assistant message, for the model to go on with it.

    The message becomes part of the generation prompt, so that the node holds it whole, as the harness will return it.
    A message that was sampled here keeps its sampled tokens. None when there is no such message, or the renderer
    cannot continue it: then it is context like any other.
    """
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls") or len(messages) == 1:
        return None
    if not last["content"] and not last.get("reasoning"):
        return None
    laid = scribe.lay(graph, session, messages[:-1], known if known and known.depth < len(messages) else None)
    prefill = _sampled_as(graph, session, laid, last, scribe.renderer.stop_ids)
    if prefill is None:
        prefill = scribe.renderer.prefill(last, laid.opening)
    if prefill is None:
        return None
    return Laid(laid.leaf, laid.opening + prefill, laid.prompt + prefill, prefill)


def _sampled_as(
    graph: MessageGraph, session: str, laid: Laid, message: Message, stop_ids: Collection[int]
) -> Tokens | None:
    """The tokens after the generation prompt of a sampled message that reads so, without what ended the turn."""
    for node in graph.children(session, laid.leaf):
        begun = node.tokens[: len(laid.opening)] == laid.opening
        if node.sampled and begun and identity(node.message) == identity(message):
            tokens = node.tokens[len(laid.opening) :]
            return tokens[:-1] if tokens[-1] in stop_ids else tokens
    return None


_ints: list[int] = []


def shared(tokens: Collection[int]) -> Tokens:
    """The same ids as objects that all traces share: a fraction of the memory, and of the time to copy them."""
    try:
        return tuple(map(_ints.__getitem__, tokens))
    except IndexError:
        _ints.extend(range(len(_ints), max(tokens) + 1))
        return tuple(map(_ints.__getitem__, tokens))


class DeltaScribe:
    """For renderers whose deltas depend on nothing but how the path ends."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self._stop_ids = frozenset(renderer.stop_ids)
        self._openings: dict[Tail, Tokens] = {}
        self._deltas: OrderedDict[Hashable, Tokens] = OrderedDict()
        self._prepared: dict[Hashable, Tokens] = {}

    def lay(self, graph: MessageGraph, session: str, messages: Sequence[Message], known: Match | None = None) -> Laid:
        """Match the messages, enter the new ones, and return where that leads."""
        match = graph.match(session, messages, known)
        leaf, fork = match.node, match.fork
        tail: Tail = graph.tail(leaf, self._stop_ids)
        for message in messages[match.depth :]:
            leaf = graph.add_context(session, leaf, message, self._delta(message, tail), fork).id
            fork, tail = None, "context"
        if leaf is None:
            raise ValueError("there are no messages")
        opening = self._openings.get(tail)
        if opening is None:
            opening = self._openings[tail] = shared(self.renderer.opening(after=tail))
        return Laid(leaf, opening, graph.tokens(leaf, opening))

    def render_made_up(self, graph: MessageGraph, leaf: int, message: Message) -> Tokens:
        """The delta of a message that our engine did not sample."""
        return self.renderer.context(message, after=graph.tail(leaf, self._stop_ids))

    async def prepare(self, graph: MessageGraph, session: str, messages: Sequence[Message]) -> None:
        """Render what is large and new in a thread."""
        match = graph.match(session, messages)
        tail: Tail = graph.tail(match.node, self._stop_ids)
        for message in messages[match.depth :]:
            if len(message["content"]) > _CACHED_CHARS:
                delta = await asyncio.to_thread(self.renderer.context, message, after=tail)
                self._prepared[tail, identity(message), message.get("reasoning")] = delta
            tail = "context"

    def _delta(self, message: Message, tail: Tail) -> Tokens:
        if len(message["content"]) > _CACHED_CHARS:
            prepared = self._prepared.pop((tail, identity(message), message.get("reasoning")), None)
            return prepared if prepared is not None else shared(self.renderer.context(message, after=tail))
        key = (tail, identity(message), message.get("reasoning"))
        delta = self._deltas.get(key)
        if delta is None:
            delta = self._deltas[key] = shared(self.renderer.context(message, after=tail))
            if len(self._deltas) > _CACHED:
                self._deltas.popitem(last=False)
        else:
            self._deltas.move_to_end(key)
        return delta
