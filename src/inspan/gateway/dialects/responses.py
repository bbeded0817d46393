"""The OpenAI Responses dialect, in. Contract: pure; a body becomes a `ModelRequest` or a `RequestError`.

Input items come to the messages of the internal form: the reasoning, text and calls of one assistant turn are one
message. Tools of type "custom" take free text and are offered as functions with one string; those of other types, which
OpenAI's servers run or only its models know how to call, are not offered. `instructions` are the root.
Encrypted reasoning is ours to read: it holds the text and the id of what was sampled.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, Final

from inspan.errors import RequestError
from inspan.gateway.dialects import checks
from inspan.gateway.dialects.base import error_status, openai_error
from inspan.gateway.dialects.responses_out import ResponseEvents, encode_response
from inspan.gateway.reply import Reply, encode
from inspan.gateway.request import ModelRequest, begins, taken_up
from inspan.trace.graph import KeyedMessage

_FREE_TEXT: Final = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_CALLS: Final = ("function_call", "custom_tool_call")
_RESULTS: Final = ("function_call_output", "custom_tool_call_output")


class Responses:
    """The Responses API."""

    name = "responses"

    def parse(self, raw: bytes, before: ModelRequest | None = None) -> ModelRequest:
        """Check a request body. Raises `RequestError` with the offending parameter."""
        body = checks.load_body(raw)
        before = before if before is not None and before.dialect is self else None
        choice = _tool_choice(body.get("tool_choice"))
        tools = checks.tool_list(self.name, body.get("tools"), _tool) if choice != "none" else checks.NO_TOOLS
        previous = _text(body, "previous_response_id")
        if body.get("conversation") is not None:
            raise RequestError("is not supported; send the items or previous_response_id", param="conversation")
        if checks.boolean(body, "background"):
            raise RequestError("is not supported", param="background")
        messages = _messages(body.get("input"), goes_on=previous is not None)
        instructions = _text(body, "instructions")
        if instructions is not None:
            messages.insert(0, KeyedMessage(role="system", content=instructions, instructions=True))
        found = checks.with_tools(messages, tools, lambda: KeyedMessage(role="system", content="", instructions=True))
        taken = taken_up(found, before) if previous is None else found
        include = body.get("include")
        logprobs = isinstance(include, list) and "message.output_text.logprobs" in include
        return ModelRequest(
            dialect=self,
            model=checks.model(body.get("model")),
            messages=taken,
            tools=tools,
            tool_choice=choice,
            stream=checks.boolean(body, "stream"),
            logprobs=logprobs or bool(body.get("top_logprobs")),
            top_logprobs=checks.integer(body, "top_logprobs", 0, checks.MAX_TOP_LOGPROBS) or 0,
            max_tokens=checks.integer(body, "max_output_tokens", 1),
            temperature=checks.number(body, "temperature", 0.0, 2.0),
            top_p=checks.number(body, "top_p", 0.0, 1.0),
            custom=frozenset(_custom_names(body.get("tools"))),
            previous=previous,
            body=body,
            continues=before.messages if before is not None and begins(taken, before.messages) else None,
        )

    def encode(self, reply: Reply, request: ModelRequest) -> bytes:
        """The body of an answer."""
        return encode_response(reply, request)

    def events(self, head: Reply, request: ModelRequest) -> ResponseEvents:
        """The events of a streamed answer."""
        return ResponseEvents(head, request)

    def error(self, error: BaseException) -> bytes:
        """The body of an error."""
        return encode({"error": openai_error(error)})

    def status(self, error: BaseException) -> int:
        """The HTTP status of an error."""
        return error_status(error)


RESPONSES: Final = Responses()


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is None or isinstance(value, str):
        return value
    raise RequestError("must be a string", param=name)


# ---- input items ------------------------------------------------------------------------------------------------


def _messages(items: Any, *, goes_on: bool) -> list[KeyedMessage]:
    if isinstance(items, str):
        return [KeyedMessage(role="user", content=items)]
    if not isinstance(items, list) or not (items or goes_on):
        raise RequestError("must be a string or a non-empty list of items", param="input")
    turns = _Turns()
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise RequestError("must be an object", param=where)
        kind = item.get("type", "message")
        if kind == "message":
            _message(item, where, turns)
        elif kind == "reasoning":
            turns.think(*_reasoning(item, where))
        elif kind in _CALLS:
            turns.call(_call(item, kind, where))
        elif kind in _RESULTS:
            turns.add(_result(item, where))
        else:
            raise RequestError(f"items of type {kind!r:.80} are not supported", param=f"{where}.type")
    return turns.done()


class _Turns:
    """Joins the items of an assistant's turn, which come in the order reasoning, text, calls."""

    def __init__(self) -> None:
        self._messages: list[KeyedMessage] = []
        self._open: KeyedMessage | None = None
        self._rank = 0  # of the last item of the open turn

    def add(self, message: KeyedMessage) -> None:
        """A message of someone else: the turn is over."""
        self._close()
        self._messages.append(message)

    def think(self, text: str, id: str) -> None:
        turn = self._turn(1)
        if text:
            turn["reasoning"] = text
        if id:
            turn["reasoning_id"] = id

    def say(self, text: str) -> None:
        self._turn(2)["content"] = text

    def call(self, call: dict[str, str]) -> None:
        self._turn(3, repeats=True).setdefault("tool_calls", []).append(call)

    def done(self) -> list[KeyedMessage]:
        self._close()
        return self._messages

    def _turn(self, rank: int, *, repeats: bool = False) -> KeyedMessage:
        if self._open is None or rank < self._rank or (rank == self._rank and not repeats):
            self._close()
            self._open = KeyedMessage(role="assistant", content="")
        self._rank = rank
        return self._open

    def _close(self) -> None:
        if self._open is not None:
            self._messages.append(self._open)
            self._open = None


def _message(item: Mapping[str, Any], where: str, turns: _Turns) -> None:
    role, content = item.get("role"), item.get("content")
    text = content if isinstance(content, str) else checks.text_parts(content, f"{where}.content")
    if role == "assistant":
        turns.say(text)
    elif role == "user":
        turns.add(KeyedMessage(role="user", content=text))
    elif role in ("system", "developer"):
        turns.add(KeyedMessage(role="system", content=text))
    else:
        raise checks.role_error(role, "system, developer, user or assistant", where)


def _reasoning(item: Mapping[str, Any], where: str) -> tuple[str, str]:
    """The text and the id of reasoning: of what was encrypted, else of what is shown."""
    sealed = item.get("encrypted_content")
    if sealed is not None:
        try:
            held = json.loads(base64.urlsafe_b64decode(sealed))
            return str(held["text"]), str(held["id"])
        except (TypeError, ValueError, KeyError, binascii.Error):
            raise RequestError(
                "was not made by this server", param=f"{where}.encrypted_content", code="invalid_encrypted_content"
            ) from None
    parts = item.get("content") or []
    if not isinstance(parts, list):
        raise RequestError("must be a list of parts", param=f"{where}.content")
    given = item.get("id")
    known = given if isinstance(given, str) and given.startswith("rs_") else ""
    return checks.text_parts(parts, f"{where}.content"), known


def _call(item: Mapping[str, Any], kind: str, where: str) -> dict[str, str]:
    field = "arguments" if kind == "function_call" else "input"
    name, call_id, given = item.get("name"), item.get("call_id"), item.get(field)
    if not isinstance(name, str) or not isinstance(call_id, str):
        raise RequestError("must have a name and a call_id", param=where)
    if given is not None and not isinstance(given, str):
        raise RequestError("must be a string", param=f"{where}.{field}")
    arguments = given or "{}" if field == "arguments" else json.dumps({"input": given or ""}, ensure_ascii=False)
    return {"id": call_id, "name": name, "arguments": arguments}


def _result(item: Mapping[str, Any], where: str) -> KeyedMessage:
    call_id, output = item.get("call_id"), item.get("output")
    if not isinstance(call_id, str):
        raise RequestError("must be a string", param=f"{where}.call_id")
    if isinstance(output, str) or output is None:
        text = output or ""
    elif isinstance(output, list):
        text = checks.text_parts(output, f"{where}.output")
    else:
        text = json.dumps(output, ensure_ascii=False)
    return KeyedMessage(role="tool", content=text, tool_call_id=call_id)


# ---- tools ------------------------------------------------------------------------------------------------------


def _tool(tool: Any, where: str) -> Mapping[str, Any] | None:
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise RequestError("must be an object with a type", param=where)
    if tool["type"] == "custom":
        return checks.function(checks.check_name(tool.get("name"), where), tool.get("description"), _FREE_TEXT)
    if tool["type"] != "function":
        return None
    name, schema = checks.check_name(tool.get("name"), where), tool.get("parameters")
    if schema is not None:
        checks.check_schema(schema, f"{where}.parameters")
    return checks.function(name, tool.get("description"), schema)


def _custom_names(tools: Any) -> list[str]:
    return [tool["name"] for tool in tools or () if tool["type"] == "custom"]


def _tool_choice(choice: Any) -> str | None:
    if choice is None or choice in ("none", "auto", "required"):
        return choice
    if isinstance(choice, Mapping):
        if isinstance(choice.get("name"), str):
            return f"function:{choice['name']}"
        if isinstance(choice.get("type"), str):
            return str(choice["type"])
    raise RequestError('must be "none", "auto", "required" or a named tool', param="tool_choice")
