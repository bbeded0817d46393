"""Three ways to say the same: a harness's side of each dialect, as raw bodies. A history is a list of neutral turns:
("system" | "user", text), ("tool", call id, text), ("assistant", what the dialect gave back)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway_fakes import SEARCH, Desk

Turn = tuple[Any, ...]


@dataclass(frozen=True)
class Heard:
    """An answer: what to put back into the history, its text, its thinking, and its calls as (id, name, arguments)."""

    native: Any
    text: str
    thinking: str
    calls: tuple[tuple[str, str, Any], ...]
    finish: str


class ChatSpeaker:
    path = "/chat/completions"

    def body(self, history: Sequence[Turn], *, tools: bool = True, **options: Any) -> dict[str, Any]:
        messages = []
        for role, *rest in history:
            if role == "tool":
                messages.append({"role": "tool", "tool_call_id": rest[0], "content": rest[1]})
            else:
                messages.append(rest[0] if role == "assistant" else {"role": role, "content": rest[0]})
        return {"model": "main", "messages": messages} | ({"tools": [SEARCH]} if tools else {}) | options

    def read(self, answer: dict[str, Any]) -> Heard:
        choice = answer["choices"][0]
        message = {key: value for key, value in choice["message"].items() if value is not None}
        calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
        thinking = message.get("reasoning_content", "")
        return Heard(message, message.get("content") or "", thinking, tuple(calls), choice["finish_reason"])

    def respelled(self, native: Any) -> Any:
        """The same turn with its arguments as another JSON library writes them."""
        message = json.loads(json.dumps(native))
        for one in message.get("tool_calls", ()):
            given = json.loads(one["function"]["arguments"])
            one["function"]["arguments"] = json.dumps(given, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return message

    def unthinking(self, native: Any) -> Any:
        """The same turn without its thinking."""
        return {key: value for key, value in native.items() if key != "reasoning_content"}

    def reworded(self, native: Any) -> Any:
        """Another turn: its text is changed."""
        return {**native, "content": (native.get("content") or "") + "!"}


class ResponsesSpeaker:
    path = "/responses"

    def body(self, history: Sequence[Turn], *, tools: bool = True, **options: Any) -> dict[str, Any]:
        items: list[Any] = []
        body: dict[str, Any] = {"model": "main", "input": items}
        for at, (role, *rest) in enumerate(history):
            if role == "assistant":
                items += rest[0]
            elif role == "tool":
                items.append({"type": "function_call_output", "call_id": rest[0], "output": rest[1]})
            elif role == "system" and at == 0:
                body["instructions"] = rest[0]
            else:
                items.append({"role": role, "content": [{"type": "input_text", "text": rest[0]}]})
        if tools:
            body["tools"] = [{"type": "function", **SEARCH["function"]}]
        if "max_tokens" in options:
            options["max_output_tokens"] = options.pop("max_tokens")
        return body | options

    def read(self, answer: dict[str, Any]) -> Heard:
        items = answer["output"]
        text = "".join(part["text"] for i in items if i["type"] == "message" for part in i["content"])
        thinking = "".join(part["text"] for i in items if i["type"] == "reasoning" for part in i["content"])
        calls = [(i["call_id"], i["name"], i["arguments"]) for i in items if i["type"] == "function_call"]
        finish = "length" if answer["status"] == "incomplete" else "tool_calls" if calls else "stop"
        return Heard(items, text, thinking, tuple(calls), finish)

    def respelled(self, native: Any) -> Any:
        items = json.loads(json.dumps(native))
        for item in items:
            if item["type"] == "function_call":
                item["arguments"] = json.dumps(json.loads(item["arguments"]), sort_keys=True, indent=1)
        return items

    def unthinking(self, native: Any) -> Any:
        return [item for item in native if item["type"] != "reasoning"]

    def reworded(self, native: Any) -> Any:
        items = json.loads(json.dumps(native))
        for item in items:
            if item["type"] == "message":
                item["content"][0]["text"] += "!"
                return items
        return [*items, {"type": "message", "role": "assistant", "content": "!"}]


class MessagesSpeaker:
    path = "/messages"

    def body(self, history: Sequence[Turn], *, tools: bool = True, **options: Any) -> dict[str, Any]:
        messages: list[Any] = []
        body: dict[str, Any] = {"model": "main", "max_tokens": 300, "messages": messages}
        for at, (role, *rest) in enumerate(history):
            if role == "system" and at == 0:
                body["system"] = rest[0]
            elif role == "tool":
                result = {"type": "tool_result", "tool_use_id": rest[0], "content": rest[1]}
                before = messages[-1] if messages else None
                if before and before["role"] == "user" and isinstance(before["content"], list):
                    before["content"].append(result)
                else:
                    messages.append({"role": "user", "content": [result]})
            else:
                messages.append(rest[0] if role == "assistant" else {"role": role, "content": rest[0]})
        if tools:
            function = SEARCH["function"]
            body["tools"] = [{"name": function["name"], "input_schema": function["parameters"]}]
        if "stop" in options:
            options["stop_sequences"] = options.pop("stop")
        return body | options

    def read(self, answer: dict[str, Any]) -> Heard:
        blocks = answer["content"]
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        thinking = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
        calls = [(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
        finish = {"max_tokens": "length", "tool_use": "tool_calls"}.get(answer["stop_reason"], "stop")
        return Heard({"role": "assistant", "content": blocks}, text, thinking, tuple(calls), finish)

    def respelled(self, native: Any) -> Any:
        blocks = json.loads(json.dumps(native["content"]))
        for block in blocks:
            if block["type"] == "tool_use" and isinstance(block["input"], dict):
                block["input"] = dict(reversed(block["input"].items()))
        return {"role": "assistant", "content": blocks}

    def unthinking(self, native: Any) -> Any:
        return {"role": "assistant", "content": [b for b in native["content"] if b["type"] != "thinking"]}

    def reworded(self, native: Any) -> Any:
        return {"role": "assistant", "content": [*native["content"], {"type": "text", "text": "!"}]}


Speaker = ChatSpeaker | ResponsesSpeaker | MessagesSpeaker
SPEAKERS: tuple[Speaker, ...] = (ChatSpeaker(), ResponsesSpeaker(), MessagesSpeaker())
NAMES = ("chat", "responses", "messages")


async def say(desk: Desk, speaker: Speaker, history: Sequence[Turn], *, headers: Any = None, **options: Any) -> Heard:
    """Send a history; the answer. Fails on any status but 200."""
    answer = await post(desk, speaker, history, headers=headers, **options)
    assert answer.status_code == 200, answer.text
    return speaker.read(answer.json())


async def post(desk: Desk, speaker: Speaker, history: Sequence[Turn], *, headers: Any = None, **options: Any) -> Any:
    """Send a history; the raw response."""
    body = json.dumps(speaker.body(history, **options)).encode()
    return await desk.http.post(desk.url + speaker.path, content=body, headers=headers or {})
