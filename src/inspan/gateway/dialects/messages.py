"""The Anthropic Messages dialect, in. Contract: pure; a body becomes a `ModelRequest` or a `RequestError`.

A user's message with tool results comes to one tool message a result, and a user's message for the text beside them. A
last message of the assistant is continued (prefill). The signature of a thinking block stands for what was sampled.
Client tools that Anthropic defines (bash, text editor) are offered by their name; those that its servers run are not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from inspan.errors import RequestError
from inspan.gateway.dialects import checks
from inspan.gateway.dialects.messages_out import MessageEvents, encode_error, encode_message, message_status
from inspan.gateway.reply import Reply
from inspan.gateway.request import ModelRequest, begins, taken_up
from inspan.trace.graph import KeyedMessage

_HOSTED: Final = re.compile(r"(web_search|web_fetch|code_execution|tool_search_tool_\w+|mcp_toolset)(_\d+)?$")


class Messages:
    """The Messages API."""

    name = "messages"

    def parse(self, raw: bytes, before: ModelRequest | None = None) -> ModelRequest:
        """Check a request body. Raises `RequestError` with the offending parameter."""
        body = checks.load_body(raw)
        if body.get("max_tokens") is None:
            raise RequestError("is required", param="max_tokens")
        return self._read(body, before)

    def parse_count(self, raw: bytes) -> ModelRequest:
        """Check the body of a request for a token count, which needs no `max_tokens`."""
        return self._read(checks.load_body(raw), None)

    def _read(self, body: dict[str, Any], before: ModelRequest | None) -> ModelRequest:
        before = before if before is not None and before.dialect is self else None
        choice = _tool_choice(body.get("tool_choice"))
        tools = checks.tool_list(self.name, body.get("tools"), _tool) if choice != "none" else checks.NO_TOOLS
        found: list[KeyedMessage] = []
        system = body.get("system")
        if system is not None:
            text = system if isinstance(system, str) else checks.text_parts(system, "system")
            found.append(KeyedMessage(role="system", content=text))
        found += _messages(body.get("messages"))
        found = checks.with_tools(found, tools, lambda: KeyedMessage(role="system", content=""))
        last = found[-1]
        if last["role"] == "assistant" and last.get("tool_calls"):
            raise RequestError("the last message has tool calls without results", param="messages")
        taken = taken_up(found, before)
        return ModelRequest(
            dialect=self,
            model=checks.model(body.get("model")),
            messages=taken,
            tools=tools,
            tool_choice=choice,
            stop=checks.stop_strings(body.get("stop_sequences"), "stop_sequences"),
            stream=checks.boolean(body, "stream"),
            max_tokens=checks.integer(body, "max_tokens", 1),
            temperature=checks.number(body, "temperature", 0.0, 1.0),
            top_p=checks.number(body, "top_p", 0.0, 1.0),
            top_k=checks.integer(body, "top_k", 0),
            prefill=last["role"] == "assistant",
            body=body,
            continues=before.messages if before is not None and begins(taken, before.messages) else None,
        )

    def encode(self, reply: Reply, request: ModelRequest) -> bytes:
        """The body of an answer."""
        return encode_message(reply)

    def events(self, head: Reply, request: ModelRequest) -> MessageEvents:
        """The events of a streamed answer."""
        return MessageEvents(head)

    def error(self, error: BaseException) -> bytes:
        """The body of an error."""
        return encode_error(error)

    def status(self, error: BaseException) -> int:
        """The HTTP status of an error."""
        return message_status(error)


MESSAGES: Final = Messages()


# ---- messages ---------------------------------------------------------------------------------------------------


def _messages(messages: Any) -> list[KeyedMessage]:
    if not isinstance(messages, list) or not messages:
        raise RequestError("must be a non-empty list", param="messages")
    found: list[KeyedMessage] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise RequestError("must be an object", param=where)
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise checks.role_error(role, "user or assistant", where)
        if isinstance(content, str):
            found.append(KeyedMessage(role=role, content=content))
            continue
        if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
            raise RequestError("must be a string or a list of blocks", param=f"{where}.content")
        if role == "assistant":
            found.append(_assistant(content, f"{where}.content"))
        else:
            found += _user(role, content, f"{where}.content")
    return found


def _user(role: str, blocks: list[dict[str, Any]], where: str) -> list[KeyedMessage]:
    """Tool results, each a message, then what else the user says."""
    results = [_result(block, where) for block in blocks if block.get("type") == "tool_result"]
    rest = [block for block in blocks if block.get("type") != "tool_result"]
    if rest or not results:
        results.append(KeyedMessage(role=role, content=_texts(rest, where)))
    return results


def _texts(blocks: list[dict[str, Any]], where: str) -> str:
    for block in blocks:
        if block.get("type") not in ("text", "document") or not isinstance(_block_text(block), str):
            raise RequestError(f"only text is supported, not {block.get('type')!r:.80}", param=where)
    return "".join(_block_text(block) or "" for block in blocks)


def _block_text(block: Mapping[str, Any]) -> str | None:
    """The text of a text block, or of a document that is plain text."""
    if block.get("type") == "text":
        return block.get("text")
    source = block.get("source")
    if isinstance(source, Mapping) and source.get("type") == "text":
        return source.get("data")
    return None


def _result(block: Mapping[str, Any], where: str) -> KeyedMessage:
    call, content = block.get("tool_use_id"), block.get("content")
    if not isinstance(call, str):
        raise RequestError("must be a string", param=f"{where}.tool_use_id")
    if content is None or isinstance(content, str):
        text = content or ""
    elif isinstance(content, list) and all(isinstance(part, dict) for part in content):
        text = _texts(content, where)
    else:
        raise RequestError("must be a string or a list of blocks", param=f"{where}.content")
    return KeyedMessage(role="tool", content=text, tool_call_id=call)


def _assistant(blocks: list[dict[str, Any]], where: str) -> KeyedMessage:
    message = KeyedMessage(role="assistant", content="")
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, str]] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            _think(message, block, where)
        elif kind == "tool_use":
            calls.append(_call(block, where))
        elif kind != "redacted_thinking":
            texts.append(block)
    message["content"] = _texts(texts, where)
    if calls:
        message["tool_calls"] = calls
    return message


def _think(message: KeyedMessage, block: Mapping[str, Any], where: str) -> None:
    text, signature = block.get("thinking", ""), block.get("signature")
    if not isinstance(text, str):
        raise RequestError("must be a string", param=f"{where}.thinking")
    if text:
        message["reasoning"] = message.get("reasoning", "") + text
    if isinstance(signature, str) and signature:
        message["reasoning_id"] = signature


def _call(block: Mapping[str, Any], where: str) -> dict[str, str]:
    call, name = block.get("id"), block.get("name")
    if not isinstance(call, str) or not isinstance(name, str):
        raise RequestError("must have an id and a name", param=where)
    return {"id": call, "name": name, "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False)}


# ---- tools ------------------------------------------------------------------------------------------------------


def _tool(tool: Any, where: str) -> Mapping[str, Any] | None:
    if not isinstance(tool, dict):
        raise RequestError("must be an object", param=where)
    kind = tool.get("type")
    if isinstance(kind, str) and _HOSTED.match(kind):
        return None
    name, schema = checks.check_name(tool.get("name"), where), tool.get("input_schema")
    if schema is not None:
        checks.check_schema(schema, f"{where}.input_schema")
    elif kind in (None, "custom"):
        raise RequestError("is required", param=f"{where}.input_schema")
    return checks.function(name, tool.get("description"), schema)


def _tool_choice(choice: Any) -> str | None:
    if choice is None:
        return None
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind in ("auto", "none"):
        return str(kind)
    if kind == "any":
        return "required"
    if kind == "tool" and isinstance(choice.get("name"), str):
        return f"function:{choice['name']}"
    raise RequestError('its type must be "auto", "any", "none" or "tool" with a name', param="tool_choice")
