"""The OpenAI Chat Completions dialect. Contract: pure; a body becomes a `ModelRequest` or a `RequestError`.

`tool_choice` "none" offers no tools. "required" and a named function are accepted, recorded (as `tool_choice` of the
sampled message) and *not* enforced: constrained decoding would make the behaviour policy another than the trained one.
`continue_final_message` (as vLLM has it) continues a last message of the assistant; without it a new turn begins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from inspan.errors import RequestError
from inspan.gateway.dialects import checks
from inspan.gateway.dialects.base import error_status, openai_error
from inspan.gateway.dialects.chat_out import ChatEvents, encode_reply
from inspan.gateway.reply import Reply, encode
from inspan.gateway.request import ModelRequest, begins
from inspan.trace.graph import KeyedMessage, ToolList

MAX_CHOICES: Final = 128


class Chat:
    """Chat Completions."""

    name = "chat"

    def parse(self, raw: bytes, before: ModelRequest | None = None) -> ModelRequest:
        """Check a request body. Raises `RequestError` with the offending parameter."""
        body = checks.load_body(raw)
        before = before if before is not None and before.dialect is self else None
        choice = _tool_choice(body.get("tool_choice"))
        tools = checks.tool_list(self.name, body.get("tools"), _tool) if choice != "none" else checks.NO_TOOLS
        messages = _messages(body.get("messages"), tools, before)
        options = body.get("stream_options")
        most = checks.integer(body, "max_completion_tokens", 1)
        return ModelRequest(
            dialect=self,
            model=checks.model(body.get("model")),
            messages=messages,
            tools=tools,
            tool_choice=choice,
            n=checks.integer(body, "n", 1, MAX_CHOICES) or 1,
            stop=checks.stop_strings(body.get("stop"), "stop"),
            stream=checks.boolean(body, "stream"),
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
            logprobs=checks.boolean(body, "logprobs"),
            top_logprobs=checks.integer(body, "top_logprobs", 0, checks.MAX_TOP_LOGPROBS) or 0,
            max_tokens=most if most is not None else checks.integer(body, "max_tokens", 1),
            temperature=checks.number(body, "temperature", 0.0, 2.0),
            top_p=checks.number(body, "top_p", 0.0, 1.0),
            prefill=messages[-1]["role"] == "assistant" and checks.boolean(body, "continue_final_message"),
            body=body,
            continues=before.messages if before is not None and begins(messages, before.messages) else None,
        )

    def encode(self, reply: Reply, request: ModelRequest) -> bytes:
        """The body of an answer."""
        return encode_reply(reply)

    def events(self, head: Reply, request: ModelRequest) -> ChatEvents:
        """The events of a streamed answer."""
        return ChatEvents(head, include_usage=request.include_usage)

    def error(self, error: BaseException) -> bytes:
        """The body of an error."""
        return encode({"error": openai_error(error)})

    def status(self, error: BaseException) -> int:
        """The HTTP status of an error."""
        return error_status(error)


CHAT: Final = Chat()


# ---- messages ---------------------------------------------------------------------------------------------------


def _messages(messages: Any, tools: ToolList, before: ModelRequest | None) -> list[KeyedMessage]:
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
    return checks.with_tools(out, tools, lambda: KeyedMessage(role="system", content=""))


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
        thinking = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(thinking, str) and thinking:
            out["reasoning"] = thinking
        if message.get("tool_calls"):
            out["tool_calls"] = _tool_calls(message["tool_calls"], index)
        return out
    if role == "developer":
        return KeyedMessage(role="system", content=content)
    raise checks.role_error(role, "system, developer, user, assistant or tool", f"messages[{index}]")


def _content(content: Any, role: Any, index: int) -> str:
    where = f"messages[{index}].content"
    if content is None:
        if role in ("assistant", "tool"):
            return ""
        raise RequestError("is missing", param=where)
    return checks.text_parts(content, where)


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


def _tool(tool: Any, where: str) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise RequestError('must be {"type": "function", "function": {…}}', param=where)
    checks.check_name(function.get("name"), f"{where}.function")
    if function.get("parameters") is None:
        function.pop("parameters", None)
    else:
        checks.check_schema(function["parameters"], f"{where}.function.parameters")
    return tool


def _tool_choice(choice: Any) -> str | None:
    if choice is None or choice in ("none", "auto", "required"):
        return choice
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if isinstance(function, Mapping) and isinstance(function.get("name"), str):
        return f"function:{function['name']}"
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return "allowed_tools"
    raise RequestError('must be "none", "auto", "required" or a named function', param="tool_choice")
