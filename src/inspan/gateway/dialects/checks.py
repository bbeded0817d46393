"""What the dialects check alike: JSON, scalars, tool schemas. Contract: pure; only `RequestError`s, naming the field.

Hand-written, since this is the hot path. Unknown fields are ignored.
"""

from __future__ import annotations

import json
import marshal
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import orjson

from inspan.errors import RequestError
from inspan.trace.graph import ToolList, content_text

MAX_STOPS: Final = 16
MAX_TOP_LOGPROBS: Final = 20
NO_TOOLS: Final = ToolList(())
_DIGITS_ALIKE: Final = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER: Final = b"0" * 19  # may not fit 64 bits: orjson would make a float of it


def load_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body."""
    if _LONG_NUMBER not in raw.translate(_DIGITS_ALIKE):  # ten times faster than a regular expression
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


def model(value: Any) -> str:
    """The model's name, "" when there is none."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RequestError("must be a string", param="model")
    return value


def integer(body: Mapping[str, Any], name: str, low: int, high: int = 2**31 - 1) -> int | None:
    """A whole number in a range."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"must be an integer, not {_shown(value)}", param=name)
    if not low <= value <= high:
        raise RequestError(f"must be from {low} to {high}, not {_shown(value)}", param=name)
    return value


def number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """A number in a range."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"must be a number, not {_shown(value)}", param=name)
    if not low <= value <= high:
        raise RequestError(f"must be from {low} to {high}, not {_shown(value)}", param=name)
    return float(value)


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.40}"
    except ValueError:  # an integer of more digits than Python spells
        return "such a long number"


def boolean(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """True or false."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    raise RequestError("must be true or false", param=name)


def stop_strings(stop: Any, param: str) -> tuple[str, ...]:
    """Stop strings: none, one, or a list."""
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops) or len(stops) > MAX_STOPS:
        raise RequestError(f"must be a string or a list of at most {MAX_STOPS} strings", param=param)
    if not all(stops):
        raise RequestError("must not be empty", param=param)
    return tuple(stops)


def text_parts(content: Any, where: str) -> str:
    """The joined text of content parts; any other kind of part is an error."""
    if not isinstance(content, list):
        raise RequestError("must be a string or a list of parts", param=where)
    for part in content:
        if isinstance(part, str):
            continue
        if not isinstance(part, dict) or not isinstance(part.get("text", part.get("refusal")), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(f"only text parts are supported, not {kind!r}", param=where)
    return content_text(content)


def role_error(role: Any, known: str, where: str) -> RequestError:
    """The error for a role that a dialect does not have."""
    return RequestError(f"unknown role {role!r:.80}; expected {known}", param=f"{where}.role")


_seen_tools: OrderedDict[tuple[str, bytes], ToolList] = OrderedDict()
_SEEN_TOOLS: Final = 256


def tool_list(dialect: str, tools: Any, read: Callable[[Any, str], Mapping[str, Any] | None]) -> ToolList:
    """Tool schemas as functions; the same schemas are read and put in canonical form once.

    `read` makes a function of one tool, given where it stands, and None of one that is not for us to offer.
    """
    if tools is None or tools == []:
        return NO_TOOLS
    if not isinstance(tools, list):
        raise RequestError("must be a list", param="tools")
    try:
        spelled = (dialect, marshal.dumps(tools, 2))
    except ValueError:
        raise RequestError("is nested too deeply", param="tools") from None
    found = _seen_tools.get(spelled)
    if found is None:
        functions = [read(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
        try:
            found = ToolList([function for function in functions if function is not None])
        except RecursionError:
            raise RequestError("is nested too deeply", param="tools") from None
        _seen_tools[spelled] = found
        if len(_seen_tools) > _SEEN_TOOLS:
            _seen_tools.popitem(last=False)
    return found


def check_name(name: Any, where: str) -> str:
    """The name of a tool."""
    if not isinstance(name, str) or not name:
        raise RequestError("must be a non-empty string", param=f"{where}.name")
    return name


def check_schema(schema: Any, where: str) -> None:
    """Check a tool's JSON schema as far as the gateway reads it."""
    if not isinstance(schema, dict):
        raise RequestError("must be a JSON schema object", param=where)
    properties = schema.get("properties")
    if properties is None:
        schema.pop("properties", None)
    elif not isinstance(properties, dict):
        raise RequestError("must be an object", param=f"{where}.properties")
    required = schema.get("required")
    if required is None:
        schema.pop("required", None)
    elif not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestError("must be a list of names", param=f"{where}.required")


def function(name: str, description: Any, schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """A tool as Chat Completions spells it."""
    made: dict[str, Any] = {"name": name}
    if isinstance(description, str):
        made["description"] = description
    if schema is not None:
        made["parameters"] = schema
    return {"type": "function", "function": made}


def with_tools(messages: list[Any], tools: ToolList, system: Callable[[], Any]) -> list[Any]:
    """The messages with the tools on the root message, which `system` makes when there is none."""
    if tools:
        if not messages or messages[0]["role"] != "system":
            messages.insert(0, system())
        messages[0]["tools"] = tools
    return messages


def strings(values: Sequence[Any]) -> bool:
    """Whether all values are strings."""
    return all(isinstance(value, str) for value in values)
