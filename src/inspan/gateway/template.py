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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inspan.errors import ModelError, RequestError
from inspan.gateway.render import THINK, Parsed, byte_reader, control_pattern, parse_hermes, plain_encoder, token_bound
from inspan.gateway.scribe import Laid
from inspan.trace.graph import ForkReason, Match, MessageGraph
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
        self.think_marks: tuple[str, str] | None = THINK
        if not tokenizer.chat_template:
            raise ModelError("no chat template", where=tokenizer.name_or_path, hint="use a chat model")
        self._tokenizer = tokenizer
        self._fast = tokenizer.backend_tokenizer
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

        shaped = [_shape(message, lambda text: self._control.sub(quote, text)) for message in messages]
        tools = [dict(tool) for tool in messages[0].get("tools") or ()] if messages else []
        if tools and not messages[0]["content"]:
            shaped = shaped[1:]  # the root that only carries tools is no message of the harness's
        try:
            text = self._tokenizer.apply_chat_template(
                shaped, tools=tools or None, add_generation_prompt=opening, tokenize=False
            )
        except Exception as error:  # templates raise whatever Jinja raises
            raise RequestError(f"the chat template refuses the messages: {error}", param="messages") from error
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

    def begun(self, message: Message) -> Tokens:
        """The text of a message that the model is to go on with."""
        return self._plain(message["content"])

    def seen(self, tokens: Sequence[int]) -> str:
        """The text of all tokens, control tokens included."""
        return self._fast.decode(list(tokens), skip_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of sampled tokens, without the end of turn."""
        return self._fast.decode([t for t in tokens if t not in self.stop_ids], skip_special_tokens=False)

    def parse(self, tokens: Sequence[int]) -> Parsed:
        """Read a sampled message back (Hermes tool calls)."""
        return parse_hermes(self.decode(tokens))

    def parse_text(self, text: str) -> Parsed:
        """Read text back, as `parse` does."""
        return parse_hermes(text)

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

    async def prepare(self, graph: MessageGraph, session: str, messages: Sequence[Message]) -> None:
        """Nothing to prepare: a whole rendering cannot be kept for later. Lets other tasks run first."""
        await asyncio.sleep(0)

    def lay(
        self,
        graph: MessageGraph,
        session: str,
        messages: Sequence[Message],
        known: Match | None = None,
        prefill: Message | None = None,
    ) -> Laid:
        """Match the messages, enter the new ones, and return where that leads."""
        whole = self.renderer.render(messages, opening=True)
        match = graph.match(session, messages, known)
        node, depth, fork, seen = self._proven(graph, match.node, match.depth, match.fork, whole.text)
        context = self.renderer.render(messages, opening=False)
        if not whole.text.startswith(context.text) or not context.text.startswith(seen):
            context = Rendering(())  # the generation prompt is no mere addition: it carries all that is new
        new = messages[depth:]
        done = max(len(seen), len(context.text)) if new else len(seen)
        delta = self.renderer.encode(context.after(len(seen)))
        for at, message in enumerate(new):
            tokens = delta if at == len(new) - 1 else ()
            node, fork = graph.add_context(session, node, message, tokens, fork).id, None
        assert node is not None
        opening = self.renderer.encode(whole.after(done))
        if prefill is not None:
            opening = (*opening, *self.renderer.begun(prefill))
        return Laid(node, opening, graph.tokens(node, opening))

    def render_made_up(self, graph: MessageGraph, leaf: int, message: Message) -> Tokens:
        """The delta of a message that our engine did not sample."""
        before = [graph.nodes[node].message for node in graph.path(leaf)]
        text = self.renderer.render([*before, message], opening=False)
        known = self.renderer.seen(graph.tokens(leaf))
        return self.renderer.encode(text.after(len(known)) if text.text.startswith(known) else text)

    def _proven(
        self, graph: MessageGraph, node: int | None, depth: int, fork: ForkReason | None, text: str
    ) -> tuple[int | None, int, ForkReason | None, str]:
        """The deepest node on the matched path whose text begins the rendering, and that text."""
        while node is not None:
            known = self.renderer.seen(graph.tokens(node))
            if text.startswith(known):
                return node, depth, fork, known
            node, depth, fork = graph.nodes[node].parent, depth - 1, "rendering changed"
        return None, 0, fork, ""


def _unused_character(messages: Sequence[Message]) -> str:
    text = json.dumps(messages, ensure_ascii=False, default=str)
    return next(mark for mark in map(chr, range(0xE000, 0xF8FF)) if mark not in text)


def _shape(message: Message, quote: Any) -> dict[str, Any]:
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
