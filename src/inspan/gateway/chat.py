"""The OpenAI Chat Completions dialect, in: a request body to a `ChatRequest`. Contract: pure; only `RequestError`s.

Hand-written checks, since this is the hot path. Unknown fields are ignored. Messages come out in the internal form
(`inspan.trace.records.Message`): text content, and the tool schemas on the root message.

`tool_choice` "none" offers no tools. "required" and a named function are accepted, recorded (as `tool_choice` of the
sampled message) and *not* enforced: constrained decoding would make the behaviour policy another than the trained one.
"""

from __future__ import annotations

import json
import marshal
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from inspan.errors import RequestError
from inspan.trace.graph import KeyedMessage, ToolList, content_text

MAX_CHOICES: Final = 128
MAX_STOPS: Final = 16
MAX_TOP_LOGPROBS: Final = 20
_NO_TOOLS: Final = ToolList(())


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request. None means: not given."""

    model: str
    messages: Sequence[KeyedMessage]
    tools: ToolList
    tool_choice: str | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    body: Mapping[str, Any] = field(default_factory=dict)  # as it was sent, for outside models
    continues: Sequence[KeyedMessage] | None = None  # the messages of the request before, when these begin with them


def parse_request(raw: bytes, before: ChatRequest | None = None) -> ChatRequest:
    """Check a request body. Raises `RequestError` with the offending parameter.

    `before` is a request that this one may continue: messages that are equal to its own need no second look.
    """
    body = _load(raw)
    choice = _tool_choice(body.get("tool_choice"))
    tools = _tools(body.get("tools")) if choice != "none" else _NO_TOOLS
    messages = _messages(body.get("messages"), tools, before)
    options = body.get("stream_options")
    top = _integer(body, "top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    most = _integer(body, "max_completion_tokens", 1)
    return ChatRequest(
        model=_model(body.get("model")),
        messages=messages,
        tools=tools,
        tool_choice=choice,
        n=_integer(body, "n", 1, MAX_CHOICES) or 1,
        stop=_stop(body.get("stop")),
        stream=_boolean(body, "stream"),
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        logprobs=_boolean(body, "logprobs"),
        top_logprobs=top,
        max_tokens=most if most is not None else _integer(body, "max_tokens", 1),
        temperature=_number(body, "temperature", 0.0, 2.0),
        top_p=_number(body, "top_p", 0.0, 1.0),
        body=body,
        continues=before.messages if before is not None and _begins(messages, before.messages) else None,
    )


def _begins(messages: Sequence[KeyedMessage], with_: Sequence[KeyedMessage]) -> bool:
    return len(with_) <= len(messages) and messages[len(with_) - 1] is with_[-1]


def _load(raw: bytes) -> dict[str, Any]:
    try:
        return _object(orjson.loads(raw))
    except ValueError:  # not JSON, or what only the standard library reads: lone surrogates, NaN
        pass
    try:
        body = json.loads(raw)
        if b"\\ud" in raw or b"\\uD" in raw:
            body = _whole_characters(body)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    return _object(body)


def _object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def _whole_characters(value: Any) -> Any:
    """Lone surrogates, which JSON can spell and UTF-8 cannot, become U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {_whole_characters(key): _whole_characters(item) for key, item in value.items()}
    return value


def _model(model: Any) -> str:
    if model is None:
        return ""
    if not isinstance(model, str):
        raise RequestError("must be a string", param="model")
    return model


# ---- messages ---------------------------------------------------------------------------------------------------


def _messages(messages: Any, tools: ToolList, before: ChatRequest | None) -> list[KeyedMessage]:
    if not isinstance(messages, list) or not messages:
        raise RequestError("must be a non-empty list", param="messages")
    if before is not None and before.tools is tools:
        known: list[Any] = before.body["messages"]
        same = 0
        while same < min(len(known), len(messages)) and known[same] == messages[same]:
            same += 1
        if same:
            added = len(before.messages) - len(known)  # 1 where the tools stand in a message of their own
            new = [_message(messages[index], index) for index in range(same, len(messages))]
            return [*before.messages[: same + added], *new]
    out = [_message(message, index) for index, message in enumerate(messages)]
    if tools:
        if out[0]["role"] == "system":
            out[0]["tools"] = tools
        else:
            out.insert(0, KeyedMessage(role="system", content="", tools=tools))
    return out


def _message(message: Any, index: int) -> KeyedMessage:
    if not isinstance(message, dict):
        raise RequestError("must be an object", param=f"messages[{index}]")
    role = message.get("role")
    content = message.get("content")
    if not isinstance(content, str):
        content = _content(content, role, index)
    if role == "user" or role == "system":
        return KeyedMessage(role=role, content=content)
    if role == "tool":
        call = message.get("tool_call_id")
        if not isinstance(call, str):
            raise RequestError("must be a string", param=f"messages[{index}].tool_call_id")
        return KeyedMessage(role="tool", content=content, tool_call_id=call)
    if role == "assistant":
        out = KeyedMessage(role="assistant", content=content)
        if message.get("function_call") is not None:
            raise RequestError("is not supported; use tool_calls", param=f"messages[{index}].function_call")
        if message.get("tool_calls"):
            out["tool_calls"] = _tool_calls(message["tool_calls"], index)
        return out
    if role == "developer":
        return KeyedMessage(role="system", content=content)
    raise RequestError(
        f"unknown role {role!r}; expected system, developer, user, assistant or tool", param=f"messages[{index}].role"
    )


def _content(content: Any, role: Any, index: int) -> str:
    where = f"messages[{index}].content"
    if content is None:
        if role in ("assistant", "tool"):
            return ""
        raise RequestError("is missing", param=where)
    if not isinstance(content, list):
        raise RequestError("must be a string or a list of parts", param=where)
    for part in content:
        if isinstance(part, str):
            continue
        if not isinstance(part, dict) or not isinstance(part.get("text", part.get("refusal")), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(f"only text parts are supported, not {kind!r}", param=where)
    return content_text(content)


def _tool_calls(calls: Any, index: int) -> list[dict[str, str]]:
    where = f"messages[{index}].tool_calls"
    if not isinstance(calls, list):
        raise RequestError("must be a list", param=where)
    out = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError("each must be a function call with a name", param=where)
        call_id, arguments = call.get("id"), function.get("arguments")
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if arguments is not None and not isinstance(arguments, str):
            raise RequestError("arguments must be JSON text", param=where)
        if call_id is not None and not isinstance(call_id, str):
            raise RequestError("id must be a string", param=where)
        out.append({"id": call_id or "", "name": function["name"], "arguments": arguments or "{}"})
    return out


# ---- tools ------------------------------------------------------------------------------------------------------

_seen_tools: OrderedDict[bytes, ToolList] = OrderedDict()
_SEEN_TOOLS: Final = 256


def _tools(tools: Any) -> ToolList:
    """Check tool schemas; the same schemas are checked and put in canonical form once."""
    if tools is None or tools == []:
        return _NO_TOOLS
    if not isinstance(tools, list):
        raise RequestError("must be a list", param="tools")
    try:
        spelled = marshal.dumps(tools, 2)
    except ValueError:
        raise RequestError("is nested too deeply", param="tools") from None
    found = _seen_tools.get(spelled)
    if found is None:
        for index, tool in enumerate(tools):
            _check_tool(tool, f"tools[{index}]")
        try:
            found = ToolList(tools)
        except RecursionError:
            raise RequestError("is nested too deeply", param="tools") from None
        _seen_tools[spelled] = found
        if len(_seen_tools) > _SEEN_TOOLS:
            _seen_tools.popitem(last=False)
    return found


def _check_tool(tool: Any, where: str) -> None:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise RequestError('must be {"type": "function", "function": {…}}', param=where)
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError("must be a non-empty string", param=f"{where}.function.name")
    parameters = function.get("parameters")
    if parameters is None:
        function.pop("parameters", None)
        return
    if not isinstance(parameters, dict):
        raise RequestError("must be a JSON schema object", param=f"{where}.function.parameters")
    if not isinstance(parameters.get("properties", {}), dict):
        raise RequestError("must be an object", param=f"{where}.function.parameters.properties")
    required = parameters.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestError("must be a list of names", param=f"{where}.function.parameters.required")


def _tool_choice(choice: Any) -> str | None:
    if choice is None or choice in ("none", "auto", "required"):
        return choice
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if isinstance(function, Mapping) and isinstance(function.get("name"), str):
        return f"function:{function['name']}"
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return "allowed_tools"
    raise RequestError('must be "none", "auto", "required" or a named function', param="tool_choice")


# ---- scalars ----------------------------------------------------------------------------------------------------


def _integer(body: Mapping[str, Any], name: str, low: int, high: int = 2**31 - 1) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"must be an integer, not {value!r:.40}", param=name)
    if not low <= value <= high:
        raise RequestError(f"must be from {low} to {high}, not {value!r:.40}", param=name)
    return value


def _number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"must be a number, not {value!r:.40}", param=name)
    if not low <= value <= high:
        raise RequestError(f"must be from {low} to {high}, not {value!r:.40}", param=name)
    return float(value)


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise RequestError("must be true or false", param=name)


def _stop(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops) or len(stops) > MAX_STOPS:
        raise RequestError(f"must be a string or a list of at most {MAX_STOPS} strings", param="stop")
    if not all(stops):
        raise RequestError("must not be empty", param="stop")
    return tuple(stops)
