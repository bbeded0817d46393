"""What a model server answered, read with care. Contract: any JSON becomes a message to go on from, or `EngineError`.

Servers differ in what they leave out: content may be null or a list of parts, a tool call may lack its id or share it
with another, arguments may be an object. Only what cannot be understood is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inspan.errors import EngineError


def read_message(reply: Any, where: str) -> dict[str, Any]:
    """The assistant message of a Chat Completions answer, ready to be sent back: its calls have ids of their own."""
    try:
        message = reply["choices"][0]["message"]
        kept: dict[str, Any] = {"role": "assistant", "content": _text(message.get("content"))}
        calls = message.get("tool_calls") or []
        if calls:
            kept["tool_calls"] = _with_own_ids([_call(call) for call in calls])
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        said = str(reply)[:120]
        raise EngineError(
            f"the model server's answer has no message that can be read: {said!r}", where=where
        ) from error
    return kept


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] for part in content if part.get("type") == "text")


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    name, arguments = function["name"], function.get("arguments")
    if not isinstance(name, str):
        raise TypeError("the name of a tool is no text")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _with_own_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls with an id each; one that is missing or was there before gets a new one."""
    taken = {call.get("id") for call in calls}
    seen: set[str] = set()
    for call in calls:
        name = call.get("id")
        if not isinstance(name, str) or not name or name in seen:
            name = next(free for free in map("call_{}".format, range(len(calls) * 2 + 1)) if free not in taken | seen)
            call["id"] = name
        seen.add(name)
    return calls
