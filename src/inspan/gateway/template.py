"""Chat templates that only render whole conversations. Contract: what was sampled is never re-tokenised.

A template gives no deltas, so each request is rendered whole, as text. Where the text of a path of nodes is proven to
begin that rendering, the path stays as it is and only the rest is tokenised; where it is not (a template that drops
earlier thinking, writes a tool call otherwise than the model did, or prints the date), the conversation forks at the
deepest message that is. Control tokens inside message text stay text.
"""

from __future__ import annotations

import asyncio
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import normalizers

from inspan.errors import ModelError, RequestError
from inspan.gateway.pieces import Pieces
from inspan.gateway.render import (
    Parsed,
    Tools,
    byte_reader,
    control_pattern,
    leaves_thinking,
    parse_hermes,
    plain_encoder,
    prefill_text,
    token_bound,
    with_thinking,
)
from inspan.gateway.scribe import Laid
from inspan.trace.graph import Match, MessageGraph
from inspan.trace.records import Message, Tokens


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation as text: literal runs, and runs that quote a control token (`True`) and must stay text."""

    runs: tuple[tuple[str, bool], ...]

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(text for text, _ in self.runs)

    def after(self, length: int) -> Rendering:
        """What follows the first `length` characters."""
        rest: list[tuple[str, bool]] = []
        for text, quoted in self.runs:
            if length < len(text):
                rest.append((text[length:], quoted))
            length = max(0, length - len(text))
        return Rendering(tuple(rest))


class TemplateRenderer:
    """Renders with the chat template of a transformers tokenizer; raises `ModelError` when it has none."""

    def __init__(self, tokenizer: Any) -> None:
        self.name = "template"
        self.call_marker = "<tool_call>"
        if not tokenizer.chat_template:
            raise ModelError("no chat template", where=tokenizer.name_or_path, hint="use a chat model")
        self._tokenizer = tokenizer
        self._fast = tokenizer.backend_tokenizer
        named = (key for key in ("reasoning_content", "reasoning", "thinking") if key in str(tokenizer.chat_template))
        self._thinks_as = next(named, None)  # the key under which the template looks for thinking
        self._composes = isinstance(self._fast.normalizer, normalizers.NFC)
        self._control = control_pattern(self._fast)
        self._plain = plain_encoder(self._fast)
        self.token_bytes = byte_reader(self._fast)
        self.fewest_tokens = token_bound(self._fast)
        self.stop_ids = self._find_stop_ids()

    def render(self, messages: Sequence[Message], *, opening: bool) -> Rendering:
        """The conversation as text, with the generation prompt if asked. Raises `RequestError` if the template does."""
        mark = _unused_character(messages)
        quotes: list[str] = []

        def quote(found: re.Match[str]) -> str:
            quotes.append(found[0])
            return f"{mark}{len(quotes) - 1}{mark}"

        shaped = [self._shape(message, lambda text: self._control.sub(quote, text)) for message in messages]
        tools = [dict(tool) for tool in messages[0].get("tools") or ()] if messages else []
        if tools and not messages[0]["content"]:
            shaped = shaped[1:]  # the root that only carries tools is no message of the harness's
        try:
            text = self._tokenizer.apply_chat_template(
                shaped, tools=tools or None, add_generation_prompt=opening, tokenize=False
            )
        except Exception as error:  # templates raise whatever Jinja raises
            raise RequestError(f"the chat template refuses the messages: {error}", param="messages") from error
        if self._composes:  # so that it is the text of its ids
            text = unicodedata.normalize("NFC", text)
        parts = text.split(mark)
        return Rendering(tuple(
            (quotes[int(part)], True) if at % 2 else (part, False) for at, part in enumerate(parts) if part
        ))  # fmt: skip

    def encode(self, rendering: Rendering) -> Tokens:
        """Token ids; only what the template wrote can be a control token."""
        ids: list[int] = []
        for text, quoted in rendering.runs:
            ids += self._plain(text) if quoted else self._fast.encode(text, add_special_tokens=False).ids
        return tuple(ids)

    def seen(self, tokens: Sequence[int]) -> str:
        """The text of all tokens, control tokens included."""
        return self._fast.decode(list(tokens), skip_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of sampled tokens, without the end of turn."""
        return self._fast.decode([t for t in tokens if t not in self.stop_ids], skip_special_tokens=False)

    def parse(self, tokens: Sequence[int], *, opening: Tokens = (), tools: Tools = ()) -> Parsed:
        """Read a sampled message back (Hermes tool calls)."""
        return self.parse_text(self.decode(tokens), opening=opening)

    def parse_text(self, text: str, *, opening: Tokens = (), tools: Tools = ()) -> Parsed:
        """Read text back, as `parse` does."""
        return parse_hermes(text, opened=leaves_thinking(self.seen(opening)))

    def prefill(self, message: Message, opening: Tokens, /) -> Tokens | None:
        """An unfinished message as it is written."""
        return self._plain(prefill_text(message, opened=leaves_thinking(self.seen(opening))))

    def _shape(self, message: Message, quote: Any) -> dict[str, Any]:
        """A message as this template expects it."""
        shaped = shape(message, quote)
        if message.get("reasoning"):
            if self._thinks_as is None:
                shaped["content"] = quote(with_thinking(message))
            else:
                shaped[self._thinks_as] = quote(message["reasoning"])
        return shaped

    def _find_stop_ids(self) -> tuple[int, ...]:
        """The end-of-sequence id, and the control token that the template writes after an assistant's message."""
        ids = [] if self._tokenizer.eos_token_id is None else [self._tokenizer.eos_token_id]
        probe = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "Zq7"}]
        text = self.render(probe, opening=False).text
        found = self._control.match(text.partition("Zq7")[2].lstrip())
        if found is not None:
            ids.append(self._fast.token_to_id(found[0]))
        if not ids:
            raise ModelError("the tokenizer has no token that ends a turn", where=self._tokenizer.name_or_path,
                             hint="set its eos_token")  # fmt: skip
        return tuple(dict.fromkeys(ids))


class TemplateScribe:
    """Lays requests onto the graph for a template. Messages between two model calls share the delta of the last."""

    def __init__(self, renderer: TemplateRenderer) -> None:
        self.renderer = renderer
        self._pieces = Pieces(renderer.seen)

    async def prepare(self, graph: MessageGraph, session: str, messages: Sequence[Message]) -> None:
        """Nothing to prepare: a whole rendering cannot be kept for later. Lets other tasks run first."""
        await asyncio.sleep(0)

    def lay(self, graph: MessageGraph, session: str, messages: Sequence[Message], known: Match | None = None) -> Laid:
        """Match the messages, enter the new ones, and return where that leads."""
        match = graph.match(session, messages, known)
        path = graph.path(match.node)
        told = as_known(graph, path, messages)
        whole = self.renderer.render(told, opening=True)
        text, context = whole.text, self.renderer.render(told, opening=False)
        depth, seen = self._pieces.proven(graph, path, text)
        fork = match.fork if depth == len(path) else "rendering changed"
        node = path[depth - 1] if depth else None
        if not text.startswith(context.text) or seen > len(context.text):
            context = Rendering(())  # the generation prompt is no mere addition: it carries all that is new
        new = told[depth:]
        done = max(seen, len(context.text)) if new else seen
        delta = self.renderer.encode(context.after(seen))
        for at, message in enumerate(new):
            tokens = delta if at == len(new) - 1 else ()
            node, fork = graph.add_context(session, node, message, tokens, fork).id, None
        assert node is not None
        opening = self.renderer.encode(whole.after(done))
        return Laid(node, opening, graph.tokens(node, opening))

    def render_made_up(self, graph: MessageGraph, leaf: int, message: Message) -> Tokens:
        """The delta of a message that our engine did not sample."""
        path = graph.path(leaf)
        text = self.renderer.render([*as_known(graph, path, ()), message], opening=False)
        depth, seen = self._pieces.proven(graph, path, text.text)
        return self.renderer.encode(text.after(seen) if depth == len(path) else text)


def as_known(graph: MessageGraph, path: Sequence[int], messages: Sequence[Message]) -> list[Message]:
    """The messages of a request, those that are known as they are known: with the thinking that was not sent back."""
    return [*(graph.nodes[node].message for node in path), *messages[len(path) :]]


def _unused_character(messages: Sequence[Message]) -> str:
    text = json.dumps(messages, ensure_ascii=False, default=str)
    return next(mark for mark in map(chr, range(0xE000, 0xF8FF)) if mark not in text)


def shape(message: Message, quote: Any) -> dict[str, Any]:
    """A message as templates expect it."""
    shaped: dict[str, Any] = {"role": message["role"], "content": quote(message["content"])}
    if "tool_call_id" in message:
        shaped["tool_call_id"] = message["tool_call_id"]
    if message.get("tool_calls"):
        shaped["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": quote(call["name"]), "arguments": _arguments(quote(call["arguments"]))},
            }
            for call in message["tool_calls"]
        ]
    return shaped


def _arguments(text: str) -> Mapping[str, Any] | str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
