"""Rendering: messages to token deltas and sampled tokens back to messages. Contract: a delta is rendered once.

What was sampled is never re-tokenised: a renderer only ever renders *new* messages, given how the turn before ended.
`ChatML` renders the Hermes tool-calling format for every tokenizer with `<|im_start|>` and `<|im_end|>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

from tokenizers import decoders

from inspan.errors import ModelError
from inspan.trace.records import Message, Tokens

Tools = Sequence[Mapping[str, Any]]
Tail = Literal["context", "stopped", "cut"]
"""How the path so far ends: with a context message, a sampled turn that the model ended, or one that was cut off."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call as the model wrote it; `error` says why it cannot be executed (bad JSON, no name)."""

    name: str
    arguments: str  # JSON text as written, or the raw text when it does not parse
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Parsed:
    """A sampled assistant message, read back: the text around its calls, the calls, and the thinking before them.

    `shown` is what a harness sees as content: `content` with the text of calls that have no name left in its place.
    """

    content: str
    calls: tuple[ParsedCall, ...] = ()
    shown: str = ""
    reasoning: str = ""


class Reader(Protocol):
    """Reads what a model sampled.

    `opening` is the generation prompt before it, which may have opened the thinking; `tools` are the request's schemas.
    """

    name: str
    stop_ids: tuple[int, ...]
    call_marker: str
    """Opens a tool call: what follows is held back from a stream until it is parsed. Empty: everything is."""

    def parse(self, tokens: Sequence[int], *, opening: Tokens = (), tools: Tools = ()) -> Parsed:
        """Read a sampled message back; never raises on what a model may write."""
        ...

    def parse_text(self, text: str, *, opening: Tokens = (), tools: Tools = ()) -> Parsed:
        """Read the text of a sampled message back (when a stop string cut it short)."""
        ...

    def prefill(self, message: Message, opening: Tokens, /) -> Tokens | None:
        """What of an unfinished assistant message follows the generation prompt; None when it cannot be continued."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of sampled tokens without the end-of-turn token (for streaming and stop strings)."""
        ...

    def token_bytes(self, token: int, /) -> bytes | None:
        """The bytes that a token stands for, which need not be whole characters; None when they are not known."""
        ...

    def fewest_tokens(self, characters: int, /) -> int:
        """A lower bound of the tokens that a text of so many characters has."""
        ...


class Renderer(Reader, Protocol):
    """Turns messages into token deltas. `after` says how the path so far ends: a cut-off turn is closed first."""

    def context(self, message: Message, *, after: Tail = "context") -> Tokens:
        """The delta of a message that nobody samples (also assistant messages that a harness made up)."""
        ...

    def opening(self, *, after: Tail = "context") -> Tokens:
        """The generation prompt."""
        ...


class ChatML:
    """ChatML with Hermes tool calls: `<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`.

    `compact` renders tool schemas as signatures (`search(query)`), for tiny models whose context is precious.
    Text that looks like a control token inside content is encoded as plain text, never as the control token.
    """

    def __init__(self, tokenizer: Any, *, compact: bool = False) -> None:
        self.name = "chatml-compact" if compact else "chatml"
        self.call_marker = "<tool_call>"
        self._tok = tokenizer
        self._compact = compact
        self._start = self._control("<|im_start|>")
        self._end = self._control("<|im_end|>")
        self.stop_ids = (self._end,)
        self._newline = self._encode("\n")
        self._roles: dict[str, Tokens] = {}
        self._encode_plain = plain_encoder(tokenizer)
        self.token_bytes = byte_reader(tokenizer)
        self.fewest_tokens = token_bound(tokenizer)

    def _control(self, text: str) -> int:
        token = self._tok.token_to_id(text)
        if token is None:
            raise ModelError(f"the tokenizer has no {text} token", hint="use a model with a ChatML chat template")
        return token

    def _encode(self, text: str) -> Tokens:
        return tuple(self._tok.encode(text, add_special_tokens=False).ids)

    def _role(self, role: str) -> Tokens:
        if role not in self._roles:
            self._roles[role] = (self._start, *self._encode(role), *self._newline)
        return self._roles[role]

    def _glue(self, after: Tail) -> Tokens:
        if after == "context":
            return ()
        return self._newline if after == "stopped" else (self._end, *self._newline)

    def context(self, message: Message, *, after: Tail = "context") -> Tokens:
        """The delta of one message that nobody sampled."""
        body = self._encode_plain(self.text(message))
        return (*self._glue(after), *self._role(message["role"]), *body, self._end, *self._newline)

    def opening(self, *, after: Tail = "context") -> Tokens:
        """The generation prompt."""
        return (*self._glue(after), *self._role("assistant"))

    def spoken(self, message: Message) -> Tokens:
        """What the model would have sampled to say a message, its end of turn included (for demonstrations)."""
        return (*self._encode_plain(self.text(message)), self._end)

    def prefill(self, message: Message, opening: Tokens, /) -> Tokens | None:
        """An unfinished message as it is written."""
        return self._encode_plain(prefill_text(message, opened=leaves_thinking(self.decode(opening))))

    def text(self, message: Message) -> str:
        """The text between the role line and the end of turn."""
        content = with_thinking(message)
        parts = [content] if content else []
        if message.get("tools"):
            parts.append(self._tools(message["tools"]))
        parts += [format_call(call["name"], call["arguments"]) for call in message.get("tool_calls") or ()]
        return "\n".join(parts)

    def _tools(self, tools: Sequence[Mapping[str, Any]]) -> str:
        functions = [tool.get("function", tool) for tool in tools]
        if self._compact:
            names = [f"{f['name']}({', '.join(f.get('parameters', {}).get('properties', {}))})" for f in functions]
            return "tools: " + " ".join(names)
        lines = "\n".join(json.dumps({"type": "function", "function": f}, ensure_ascii=False) for f in functions)
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{lines}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within "
            '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}'
            "\n</tool_call>"
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of sampled tokens, without the end of turn."""
        return self._tok.decode([t for t in tokens if t != self._end], skip_special_tokens=False)

    def parse(self, tokens: Sequence[int], *, opening: Tokens = (), tools: Tools = ()) -> Parsed:
        """Read a sampled message back: text before and between calls is content; each call is checked on its own."""
        return self.parse_text(self.decode(tokens), opening=opening)

    def parse_text(self, text: str, *, opening: Tokens = (), tools: Tools = ()) -> Parsed:
        """Read text back, as `parse` does."""
        return parse_hermes(text, opened=leaves_thinking(self.decode(opening)))


def control_pattern(tokenizer: Any) -> re.Pattern[str]:
    """What matches the text of any control token (special added token) of a `tokenizers.Tokenizer`."""
    texts = [
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special and token.content
    ]
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def plain_encoder(tokenizer: Any) -> Callable[[str], Tokens]:
    """An encoder for text in which control tokens must not appear: they are split, so that they stay text."""
    control = control_pattern(tokenizer)

    def encode(text: str) -> Tokens:
        found = control.search(text)
        if found is None:
            return tuple(tokenizer.encode(text, add_special_tokens=False).ids)
        ids: list[int] = []
        while found is not None:
            cut = found.start() + min(2, len(found[0]) - 1)
            if len(found[0]) == 1:  # cannot be split: it is left out
                ids += tokenizer.encode(text[: found.start()], add_special_tokens=False).ids
                text = text[found.end() :]
            else:
                ids += tokenizer.encode(text[:cut], add_special_tokens=False).ids
                text = text[cut:]
            found = control.search(text)
        return (*ids, *tokenizer.encode(text, add_special_tokens=False).ids)

    return encode


def byte_reader(tokenizer: Any) -> Callable[[int], bytes | None]:
    """What tells the bytes of a token: from its byte-level spelling, else from its text if that is whole."""
    added = {token: entry.content for token, entry in tokenizer.get_added_tokens_decoder().items()}
    byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)

    def read(token: int) -> bytes | None:
        if token in added:
            return added[token].encode()
        if byte_level:
            spelled = tokenizer.id_to_token(token)
            return None if spelled is None else bytes(_BYTE_OF[character] for character in spelled)
        text = tokenizer.decode([token], skip_special_tokens=False)
        return None if "\ufffd" in text else text.encode()

    return read


def token_bound(tokenizer: Any) -> Callable[[int], int]:
    """What bounds the tokens of a text from below, by the longest token; worked out at the first question.

    A normaliser may compose up to four characters into one.
    """

    @cache
    def longest() -> int:
        return 4 * max(map(len, tokenizer.get_vocab()))

    return lambda characters: characters // longest()


def byte_spelling() -> dict[int, str]:
    """The characters with which byte-level BPE spells bytes (GPT-2): printable ones stand for themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


_BYTE_OF = {character: byte for byte, character in byte_spelling().items()}


def format_call(name: str, arguments: str) -> str:
    """One Hermes tool call around the arguments' JSON text, kept as it was written."""
    return f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n</tool_call>'


THINK, END_THINK = "<think>", "</think>"


def leaves_thinking(opening: str) -> bool:
    """Whether the text of a generation prompt opens a block of thinking that the sample goes on with."""
    return opening.rfind(THINK) > opening.rfind(END_THINK)


def with_thinking(message: Message) -> str:
    """A message's content, its thinking (if it has any) in a block before it."""
    content, reasoning = message.get("content") or "", message.get("reasoning")
    return f"{THINK}\n{reasoning}\n{END_THINK}\n\n{content}" if reasoning else content


def prefill_text(message: Message, *, opened: bool) -> str:
    """An unfinished message after a generation prompt that has opened its thinking, or has not."""
    if not opened:
        return with_thinking(message)
    reasoning, content = message.get("reasoning") or "", message.get("content") or ""
    return f"{reasoning}\n{END_THINK}\n\n{content}" if content else reasoning


def split_thinking(text: str, *, opened: bool = False) -> tuple[str, str]:
    """Thinking and the rest: a block that leads the text or that the generation prompt opened; unclosed, it is all."""
    lead = text.lstrip()
    if not opened and not lead.startswith(THINK):
        return "", text
    reasoning, _, rest = (text if opened else lead.removeprefix(THINK)).partition(END_THINK)
    return reasoning.strip("\n"), rest


def parse_hermes(text: str, *, opened: bool = False) -> Parsed:
    """Split text into thinking, content and tool calls. An unclosed or unparseable call keeps its text, with an error.

    `opened` says that the generation prompt has opened the thinking.
    """
    content: list[str] = []
    shown: list[str] = []
    calls: list[ParsedCall] = []
    reasoning, rest = split_thinking(text, opened=opened)
    while True:
        before, begun, after = rest.partition("<tool_call>")
        content.append(before.strip("\n"))
        shown.append(content[-1])
        if not begun:
            said, seen = "\n".join(filter(None, content)), "\n".join(filter(None, shown))
            return Parsed(said, tuple(calls), seen, reasoning)
        body, closed, rest = after.partition("</tool_call>")
        calls.append(_parse_call(body.strip(), closed=bool(closed)))
        if not calls[-1].name:
            shown.append(begun + body + closed)


def _parse_call(body: str, *, closed: bool) -> ParsedCall:
    if not closed:
        return ParsedCall("", body, "the tool call is not closed")
    try:
        data = json.loads(body)
    except ValueError as error:
        return ParsedCall("", body, f"the tool call is not JSON: {error}")
    except RecursionError:
        return ParsedCall("", body, "the tool call is nested too deeply")
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return ParsedCall("", body, "the tool call has no name")
    arguments = data.get("arguments", {})
    if not isinstance(arguments, dict):
        return ParsedCall(data["name"], json.dumps(arguments, ensure_ascii=False), "arguments are not an object")
    return ParsedCall(data["name"], raw_arguments(body, arguments))


def raw_arguments(body: str, arguments: Mapping[str, Any]) -> str:
    """The arguments' text exactly as written when it can be cut out, else re-serialised."""
    at = body.find('"arguments":')
    if at >= 0:
        raw = body[at + len('"arguments":') :].strip()
        if raw.endswith("}"):
            raw = raw[:-1].strip()
            try:
                if json.loads(raw) == arguments:
                    return raw
            except ValueError:
                return json.dumps(arguments, ensure_ascii=False)
    return json.dumps(arguments, ensure_ascii=False)
