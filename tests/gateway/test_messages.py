"""The Messages dialect, with Anthropic's own client: what goes in, what comes back, what is recorded."""

from __future__ import annotations

import anthropic
import pytest
from gateway_fakes import SEARCH, Desk, SlowEngine, call, ids, scripted, text, tokens_of

from inspan.engine.base import Sample
from inspan.errors import EngineError, EngineOverloaded
from inspan.gateway.transport import IN_PROCESS_URL

TOOL = {"name": "search", "description": "Finds pages.", "input_schema": SEARCH["function"]["parameters"]}
THOUGHT = "<think>\nwhere is it\n</think>\n\n"
ASK = [{"role": "user", "content": "Find it."}]


def client(desk: Desk) -> anthropic.AsyncAnthropic:
    base = IN_PROCESS_URL + desk.grant.base_path.removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=base, api_key=desk.grant.key, http_client=desk.http, max_retries=0)


async def ask(desk: Desk, messages=ASK, **options):
    return await client(desk).messages.create(**{"model": "main", "max_tokens": 200, "messages": messages} | options)


def returned(message):
    """A message as a harness puts it back into its history."""
    return {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]}


def results(message, content="found"):
    calls = [block for block in message.content if block.type == "tool_use"]
    return [{"type": "tool_result", "tool_use_id": one.id, "content": content} for one in calls]


async def test_an_answer_has_text_stop_reason_and_usage():
    desk = Desk(scripted("the answer is done"))
    message = await ask(desk, system="Be good.")
    assert [block.text for block in message.content] == ["the answer is done"]
    assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
    assert message.usage.input_tokens > 5 and message.usage.output_tokens > 0


async def test_thinking_text_and_tool_use_are_blocks_and_come_back_as_one_turn():
    desk = Desk(scripted(THOUGHT + "look\n" + call(query="a", top=3.0) + "\n" + call(query="b"), "done"))
    first = await ask(desk, system=[{"type": "text", "text": "Be good."}], tools=[TOOL])
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert first.stop_reason == "tool_use"
    assert first.content[0].thinking == "where is it" and first.content[0].signature
    assert first.content[2].input == {"query": "a", "top": 3.0}
    history = [
        *ASK,
        returned(first),
        {"role": "user", "content": [*results(first), {"type": "text", "text": "Go on."}]},
    ]
    second = await ask(desk, history, system="Be good.", tools=[TOOL])
    assert second.content[0].text == "done"
    trace = desk.seal()
    assert all(node.fork is None for node in trace.nodes)
    assert [node.message["role"] for node in trace.nodes] == [
        "system", "user", "assistant", "tool", "tool", "user", "assistant",
    ]  # fmt: skip
    whole = tokens_of(trace.nodes, trace.calls[-1].context)
    assert whole == desk.engine.heard[1].prompt[: len(whole)]


@pytest.mark.parametrize("kept", ["all", "none", "signature"])
async def test_thinking_that_is_kept_dropped_or_only_signed_is_recognised(kept):
    desk = Desk(scripted(THOUGHT + "yes", "done"))
    history = returned(await ask(desk))
    if kept == "none":
        del history["content"][0]
    elif kept == "signature":
        history["content"][0]["thinking"] = ""
    await ask(desk, [*ASK, history, {"role": "user", "content": "And?"}])
    assert all(node.fork is None for node in desk.seal().nodes)


async def test_edited_thinking_forks():
    desk = Desk(scripted(THOUGHT + "yes", "done"))
    history = returned(await ask(desk))
    history["content"][0]["thinking"] = "where was it"
    await ask(desk, [*ASK, history, {"role": "user", "content": "And?"}])
    assert [node.fork for node in desk.seal().nodes if node.fork] == ["assistant edited"]


async def test_a_last_assistant_message_is_continued_and_its_text_is_not_trained():
    desk = Desk(scripted(" is done", "done"))
    message = await ask(desk, [*ASK, {"role": "assistant", "content": "the answer"}])
    assert message.content[0].text == " is done"
    assert text(desk.engine.heard[0].prompt).endswith("assistant\nthe answer")
    await ask(desk, [*ASK, {"role": "assistant", "content": "the answer is done"}, {"role": "user", "content": "And?"}])
    trace = desk.seal()
    assert all(node.fork is None for node in trace.nodes), "the harness joined the two"
    node = next(node for node in trace.nodes if node.sampled)
    assert text(node.tokens[node.start :]) == " is done<|im_end|>"


async def test_a_stream_has_every_event_in_order_and_the_same_message():
    wrote = THOUGHT + "look 🎉\n" + call(query="a")
    plain = await ask(Desk(scripted(wrote)), tools=[TOOL])
    events = [event async for event in await ask(Desk(scripted(wrote)), tools=[TOOL], stream=True)]
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    blocks = [event for event in events if event.type == "content_block_start"]
    assert [block.index for block in blocks] == [0, 1, 2]
    assert [block.content_block.type for block in blocks] == ["thinking", "text", "tool_use"]
    assert kinds.count("content_block_stop") == 3
    async with client(Desk(scripted(wrote))).messages.stream(
        model="main", max_tokens=200, messages=ASK, tools=[TOOL]
    ) as stream:
        final = await stream.get_final_message()
    assert [b.model_dump(exclude_none=True) for b in final.content][:2] == [
        b.model_dump(exclude_none=True) for b in plain.content
    ][:2]
    assert final.content[2].input == plain.content[2].input and final.stop_reason == plain.stop_reason
    assert final.usage.output_tokens == plain.usage.output_tokens


async def test_a_stop_sequence_is_named():
    desk = Desk(scripted("one, two, three"))
    message = await ask(desk, stop_sequences=["zzz", ", t"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ", t")
    assert message.content[0].text == "one"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_cut_by_its_length_says_so_and_has_no_call(stream):
    desk = Desk(scripted("look\n" + call(query="a")))
    most = len(ids("look\n<tool_call>", end=False))
    answer = await ask(desk, tools=[TOOL], max_tokens=most, stream=stream)
    if stream:
        events = [event async for event in answer]
        assert next(e.delta.stop_reason for e in events if e.type == "message_delta") == "max_tokens"
        assert all(e.content_block.type == "text" for e in events if e.type == "content_block_start")
    else:
        assert answer.stop_reason == "max_tokens" and [b.type for b in answer.content] == ["text"]


async def test_tokens_are_counted_as_a_call_would_have_them_and_nothing_is_recorded():
    desk = Desk(scripted("yes"))
    counted = await client(desk).messages.count_tokens(model="main", messages=ASK, system="Be good.", tools=[TOOL])
    message = await ask(desk, system="Be good.", tools=[TOOL])
    assert counted.input_tokens == message.usage.input_tokens
    trace = desk.seal()
    assert len(trace.calls) == 1 and all(node.fork is None for node in trace.nodes)


async def test_models_are_listed_in_the_dialects_shape():
    desk = Desk(scripted("yes"))
    assert [model.id async for model in client(desk).models.list()] == ["main"]
    assert (await client(desk).models.retrieve("main")).display_name == "main"
    with pytest.raises(anthropic.NotFoundError):
        await client(desk).models.retrieve("nobody")


async def test_faults_have_the_dialects_shape_and_status():
    desk = Desk(scripted(EngineOverloaded("full"), EngineError("gone"), "yes"))
    with pytest.raises(anthropic.APIStatusError) as caught:
        await ask(desk)
    assert caught.value.status_code == 529 and caught.value.body["error"]["type"] == "overloaded_error"
    with pytest.raises(anthropic.APIStatusError) as caught:
        await ask(desk)
    assert caught.value.status_code == 503 and caught.value.body["error"]["type"] == "api_error"
    with pytest.raises(anthropic.NotFoundError):
        await ask(desk, model="nobody")
    answer = await desk.http.post(IN_PROCESS_URL + "/v1/messages", json={}, headers={"x-api-key": "nope"})
    assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"


async def test_a_fault_in_mid_stream_is_an_error_event():
    class Breaks(SlowEngine):
        async def sample(self, policy, prompt, params, watch=None):
            watch(self.tokens[:2])
            raise EngineError("the device fell off")

    with pytest.raises(anthropic.APIStatusError, match="the device fell off"):
        async for _ in await ask(Desk(Breaks("hello world")), stream=True):
            pass


async def test_a_prompt_that_does_not_fit_is_refused_in_words_that_clients_know():
    desk = Desk(scripted("yes", context_length=64))
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await ask(desk, [{"role": "user", "content": "find it " * 60}])


async def test_a_stream_is_kept_alive_while_the_engine_is_silent():
    class Silent(SlowEngine):
        async def sample(self, policy, prompt, params, watch=None):
            await self.step.acquire()
            tokens = tuple(ids("yes"))
            return Sample(tokens, (-0.5,) * len(tokens), (0,) * len(tokens), "stop")

    engine = Silent("yes")
    desk = Desk(engine, keep_alive_s=0.001)
    body = {"model": "main", "max_tokens": 9, "messages": ASK, "stream": True}
    raw = b""
    async with desk.http.stream("POST", desk.url + "/messages", json=body) as answer:
        async for piece in answer.aiter_raw():
            raw += piece
            if raw.count(b"event: ping") == 3:
                engine.step.release()
    assert raw.startswith(b"event: message_start") and raw.endswith(b'data: {"type":"message_stop"}\n\n')


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [*ASK, {"role": "assistant", "content": [{"type": "tool_use"}]}]}, "id and a name"),
        (
            {"messages": [*ASK, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]},
            "without results",
        ),
        ({"tools": [{"name": "x"}]}, "input_schema"),
        ({"tools": [{"input_schema": {}}]}, "name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"temperature": 1.5}, "temperature"),
        ({"system": 3}, "system"),
        ({"stop_sequences": [3]}, "stop_sequences"),
    ],
)
async def test_a_malformed_body_is_a_400_in_the_dialects_shape_and_leaves_no_record(change, says):
    desk = Desk(scripted("yes"))
    answer = await desk.post({"model": "main", "max_tokens": 9, "messages": ASK, **change}, "/messages")
    assert answer.status_code == 400
    told = answer.json()
    assert told["type"] == "error" and told["error"]["type"] == "invalid_request_error"
    assert says in told["error"]["message"]
    trace = desk.seal()
    assert trace.calls == [] and trace.nodes == []


async def test_tools_that_anthropic_runs_are_not_offered_and_those_it_defines_are_by_name():
    desk = Desk(scripted("yes"), renderer=None)
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}, TOOL]
    await ask(desk, tools=tools)
    offered = text(desk.engine.heard[0].prompt)
    assert "bash" in offered and "search(query" in offered and "web_search" not in offered
