"""Renderers of known families, from the PyPI package `renderers`. Contract: what was sampled is never re-tokenised.

After a sampled turn the package extends its tokens (`bridge_to_next_turn`), or says that it cannot: an assistant
message that nobody sampled follows, or the family drops thinking at the next user turn. Then the conversation is
rendered whole, goes on where the text of its nodes is proven to begin that rendering, and forks where it is not.
Control tokens inside message text stay text, which the package by itself does not see to.
"""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inspan.errors import RequestError
from inspan.gateway.pieces import Pieces
from inspan.gateway.render import (
    Parsed,
    ParsedCall,
    Tools,
    byte_reader,
    control_pattern,
    leaves_thinking,
    plain_encoder,
    prefill_text,
    raw_arguments,
    token_bound,
)
from inspan.gateway.scribe import Laid
from inspan.gateway.template import as_known, shape
from inspan.trace.graph import Match, MessageGraph
from inspan.trace.records import Message, Tokens


class GuardedTokenizer:
    """The tokenizer that the package works with: where a message quotes a control token, a mark breaks it in two."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = name  # the package goes by it in what differs between models of one family
        self._control = control_pattern(tokenizer.backend_tokenizer)
        self.mark = ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # it must not look callable: the package would go round `encode`
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **_: Any) -> list[int]:
        """Ids of a text, in which each mark separates what must not become one token."""
        fast = self._tokenizer.backend_tokenizer
        parts = text.split(self.mark) if self.mark else [text]
        return [token for part in parts for token in fast.encode(part, add_special_tokens=False).ids]

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        """The text of ids, control tokens included."""
        return self._tokenizer.backend_tokenizer.decode(list(tokens), skip_special_tokens=False)

    def quote(self, text: str) -> str:
        """The text with a mark in each control token that it quotes; one of a single character is left out."""
        return self._control.sub(lambda found: found[0][:1] + self.mark + found[0][1:] if found[0][1:] else "", text)

    def choose_mark(self, messages: Sequence[Message]) -> None:
        """A mark that no message contains, of characters that JSON leaves as they are."""
        text = json.dumps(messages, ensure_ascii=False, default=str)
        self.mark = next(mark for mark in map("@{}@".format, range(10**9)) if mark not in text)


@dataclass(frozen=True, slots=True)
class Whole:
    """All ids of a conversation, generation prompt included, which begins at `opening`."""

    ids: Tokens
    opening: int


class PackagedRenderer:
    """A renderer of the package. `family` is its name there."""

    call_marker = ""  # each family spells calls and channels in its own way: nothing is shown before it is read

    def __init__(self, made: Any, tokenizer: GuardedTokenizer, family: str) -> None:
        self.name = f"renderers:{family}"
        self._made, self._tokenizer = made, tokenizer
        fast = tokenizer.backend_tokenizer
        self._plain = plain_encoder(fast)
        self._controls = {token for token, added in fast.get_added_tokens_decoder().items() if added.special}
        self.token_bytes = byte_reader(fast)
        self.fewest_tokens = token_bound(fast)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(made.get_stop_token_ids()))

    def render(self, messages: Sequence[Message]) -> Whole:
        """A conversation rendered whole. Raises `RequestError` if the package refuses it."""
        shaped, tools = self._shaped(messages, messages[0] if messages else {})
        try:
            context = self._made.render_ids(shaped, tools=tools)
            whole = self._made.render_ids(shaped, tools=tools, add_generation_prompt=True)
        except Exception as error:  # whatever the package makes of messages that a harness made up
            raise RequestError(f"the renderer {self.name} refuses the messages: {error}", param="messages") from error
        mere = whole[: len(context)] == context
        return Whole(tuple(whole), len(context) if mere else len(whole))

    def extend(self, prompt: Tokens, sampled: Tokens, new: Sequence[Message], told: Sequence[Message]) -> Whole | None:
        """What `prompt` and `sampled` become by new messages; None when the package cannot go on from there."""
        shaped, tools = self._shaped(new, told[0], told)
        try:
            made = self._made.bridge_to_next_turn(list(prompt), list(sampled), shaped, tools=tools)
        except Exception as error:  # as in `render`
            raise RequestError(f"the renderer {self.name} refuses the messages: {error}", param="messages") from error
        if made is None:
            return None
        ids, known = tuple(made.token_ids), len(prompt) + len(sampled)
        if ids[:known] != prompt + sampled:
            return None
        opening = len(ids)
        while opening > known and made.message_indices[opening - 1] < 0:
            opening -= 1
        return Whole(ids, opening)

    def seen(self, tokens: Sequence[int]) -> str:
        """The text of all tokens, control tokens included."""
        return self._tokenizer.decode(tokens)

    def controls(self, tokens: Sequence[int]) -> list[int]:
        """The control tokens among ids."""
        return [token for token in tokens if token in self._controls]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of sampled tokens, without the end of turn."""
        return self._tokenizer.decode([token for token in tokens if token not in self.stop_ids])

    def parse(self, tokens: Sequence[int], *, opening: Tokens = (), tools: Tools = ()) -> Parsed:
        """Read a sampled message back as the family writes it."""
        read = self._made.parse_response(list(tokens), tools=list(tools) or None, prompt_ids=list(opening) or None)
        calls = [self._call(call, tokens) for call in read.tool_calls]
        content = (read.content or "").strip("\n")
        kept = [content, *(call.arguments for call in calls if not call.name)]
        return Parsed(content, tuple(calls), "\n".join(filter(None, kept)), (read.reasoning_content or "").strip("\n"))

    def parse_text(self, text: str, *, opening: Tokens = (), tools: Tools = ()) -> Parsed:
        """Read text back, as `parse` does."""
        self._tokenizer.mark = ""
        return self.parse(self._tokenizer.encode(text), opening=opening, tools=tools)

    def prefill(self, message: Message, opening: Tokens, /) -> Tokens | None:
        """An unfinished message as it is written; None where the family would not read it back as content."""
        ids = self._plain(prefill_text(message, opened=leaves_thinking(self.seen(opening))))
        read = self.parse(ids, opening=opening).content.strip() == message["content"].strip()
        return ids if read else None

    def _shaped(
        self, messages: Sequence[Message], root: Message, told: Sequence[Message] = ()
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools as the package takes them."""
        self._tokenizer.choose_mark(messages)
        names = {call["id"]: call["name"] for said in told or messages for call in said.get("tool_calls") or ()}
        tools = [dict(tool) for tool in root.get("tools") or ()]
        out = []
        for message in messages:
            if message is root and tools and not message["content"]:
                continue  # the root that only carries tools is no message of the harness's
            shaped = shape(message, self._tokenizer.quote)
            if message.get("tool_call_id") in names:
                shaped["name"] = names[message["tool_call_id"]]
            if message.get("reasoning"):
                shaped["reasoning_content"] = self._tokenizer.quote(message["reasoning"])
            out.append(shaped)
        return out, tools or None

    def _call(self, call: Any, tokens: Sequence[int]) -> ParsedCall:
        """A call of the package's as one of ours: its arguments as they were written where they are JSON."""
        bare = call.status == "invalid_json" and isinstance(call.arguments, Mapping)  # a word where it expects JSON
        if not call.name or not (call.status == "ok" or bare):
            raw = self.decode(tokens[slice(*call.token_span)]) if call.token_span else call.raw
            return ParsedCall("", raw, f"the tool call cannot be read: {call.status}")
        if isinstance(call.arguments, Mapping):
            return ParsedCall(call.name, raw_arguments(call.raw, call.arguments))
        return ParsedCall(call.name, json.dumps(call.arguments, ensure_ascii=False), "arguments are not an object")


class PackagedScribe:
    """Lays requests onto the graph for a renderer of the package. Messages between two model calls share a delta."""

    def __init__(self, renderer: PackagedRenderer) -> None:
        self.renderer = renderer
        self._pieces = Pieces(renderer.seen)

    async def prepare(self, graph: MessageGraph, session: str, messages: Sequence[Message]) -> None:
        """Nothing to prepare: what follows a sampled turn depends on it. Lets other tasks run first."""
        await asyncio.sleep(0)

    def lay(self, graph: MessageGraph, session: str, messages: Sequence[Message], known: Match | None = None) -> Laid:
        """Match the messages, enter the new ones, and return where that leads."""
        match = graph.match(session, messages, known)
        path = graph.path(match.node)
        told = as_known(graph, path, messages)
        whole = self._extended(graph, path, told)
        if whole is None:
            whole = self.renderer.render(told)
            depth, done = self._proven_text(graph, path, whole)
        else:
            depth, done = _proven_ids(graph, path, whole)
        fork = match.fork if depth == len(path) else "rendering changed"
        node = path[depth - 1] if depth else None
        new, opening = told[depth:], max(done, whole.opening)
        for at, message in enumerate(new):
            tokens = whole.ids[done:opening] if at == len(new) - 1 else ()
            node, fork = graph.add_context(session, node, message, tokens, fork).id, None
        assert node is not None
        rest = whole.ids[opening if new else done :]
        return Laid(node, rest, graph.tokens(node, rest))

    def render_made_up(self, graph: MessageGraph, leaf: int, message: Message) -> Tokens:
        """The delta of a message under `leaf` that our engine did not sample (an outside model's answer)."""
        path = graph.path(leaf)
        whole = self.renderer.render([*as_known(graph, path, ()), message])
        depth, done = self._proven_text(graph, path, whole)
        return whole.ids[done if depth == len(path) else 0 : whole.opening]

    def _extended(self, graph: MessageGraph, path: Sequence[int], told: Sequence[Message]) -> Whole | None:
        """The path's last sampled turn, extended by what follows it, if nothing of that is an assistant's."""
        last = next((at for at in range(len(path) - 1, -1, -1) if graph.nodes[path[at]].sampled), None)
        if last is None:
            return None
        new = told[last + 1 :]
        if not new or any(message["role"] == "assistant" for message in new):
            return None
        node, tokens = graph.nodes[path[last]], graph.tokens(path[last])
        cut = len(tokens) - len(node.tokens) + node.start
        return self.renderer.extend(tokens[:cut], tokens[cut:], new, told)

    def _proven_text(self, graph: MessageGraph, path: Sequence[int], whole: Whole) -> tuple[int, int]:
        """How many nodes are proven to begin a whole rendering by their text, and where in its ids they end."""
        text = self.renderer.seen(whole.ids)
        depth, length = self._pieces.proven(graph, path, text)
        while depth:
            end = bisect_left(range(len(whole.ids)), length, key=lambda at: len(self.renderer.seen(whole.ids[:at])))
            ids, known = whole.ids[:end], graph.tokens(path[depth - 1])
            same = self.renderer.seen(ids) == text[:length]
            if same and self.renderer.controls(ids) == self.renderer.controls(known):
                return depth, end
            depth -= 1
            length -= len(self._pieces.of(graph, path)[depth])
        return 0, 0


def _proven_ids(graph: MessageGraph, path: Sequence[int], whole: Whole) -> tuple[int, int]:
    """How many nodes are proven to begin a rendering by their ids, and where they end."""
    end = 0
    for count, node in enumerate(path):
        tokens = graph.nodes[node].tokens
        if whole.ids[end : end + len(tokens)] != tokens:
            return count, end
        end += len(tokens)
    return len(path), end
