"""The Responses dialect, with OpenAI's own client: what goes in, what comes back, what is recorded."""

from __future__ import annotations

import json

import openai
import pytest
from gateway_fakes import SEARCH, Desk, call, ids, scripted, text, tokens_of

FUNCTION = {"type": "function", "strict": False, **SEARCH["function"]}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": {"type": "text"}}
THOUGHT = "<think>\nwhere is it\n</think>\n\n"


async def ask(desk: Desk, items="Find it.", **options):
    return await desk.client().responses.create(model="main", input=items, **options)


async def events_of(desk: Desk, items="Find it.", **options):
    return [event async for event in await ask(desk, items, stream=True, **options)]


def returned(response):
    """Output items as a harness puts them back into its input."""
    return [item.model_dump(exclude_none=True) for item in response.output]


def results(response, content="found"):
    calls = [item for item in response.output if item.type in ("function_call", "custom_tool_call")]
    return [{"type": f"{one.type}_output", "call_id": one.call_id, "output": content} for one in calls]


async def test_an_answer_has_text_status_and_usage():
    desk = Desk(scripted("the answer is done"))
    response = await ask(desk, instructions="Be good.", max_output_tokens=50, metadata={"run": "7"}, store=False)
    assert response.output_text == "the answer is done"
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert response.usage.input_tokens > 5 and response.usage.total_tokens > response.usage.output_tokens > 0
    assert response.metadata == {"run": "7"} and response.instructions == "Be good." and response.model == "main"


async def test_thinking_text_and_calls_are_items_and_come_back_as_one_turn():
    desk = Desk(scripted(THOUGHT + "look\n" + call(query="a") + "\n" + call(query="b"), "done"))
    first = await ask(desk, instructions="Be good.", tools=[FUNCTION])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    assert first.output[0].content[0].text == "where is it"
    assert json.loads(first.output[2].arguments) == {"query": "a"}
    assert first.usage.output_tokens_details.reasoning_tokens == len(ids(THOUGHT, end=False))
    items = [{"role": "user", "content": "Find it."}, *returned(first), *results(first)]
    second = await ask(desk, items, instructions="Be good.", tools=[FUNCTION])
    assert second.output_text == "done"
    trace = desk.seal()
    assert all(node.fork is None for node in trace.nodes)
    last = trace.calls[-1]
    assert (
        tokens_of(trace.nodes, last.context) == desk.engine.heard[1].prompt[: len(tokens_of(trace.nodes, last.context))]
    )
    assert THOUGHT in text(desk.engine.heard[1].prompt), "what was sampled stays in the context"


@pytest.mark.parametrize("dropped", ["reasoning", "nothing", "text of it"])
async def test_reasoning_that_is_kept_dropped_or_sealed_is_recognised(dropped):
    desk = Desk(scripted(THOUGHT + "yes", "done"))
    first = await ask(desk, include=["reasoning.encrypted_content"], store=False)
    items = returned(first)
    assert items[0]["encrypted_content"]
    if dropped == "reasoning":
        items = items[1:]
    elif dropped == "text of it":
        del items[0]["content"]
    await ask(desk, [{"role": "user", "content": "Find it."}, *items, {"role": "user", "content": "And?"}])
    assert all(node.fork is None for node in desk.seal().nodes)


async def test_reasoning_of_another_turn_or_of_nobody_is_not_taken_for_it():
    desk = Desk(scripted(THOUGHT + "yes", "<think>\nother\n</think>\n\nyes", "done"))
    include = {"include": ["reasoning.encrypted_content"]}
    one, other = [await ask(desk, **include), await ask(desk, **include)]
    swapped = [returned(other)[0], returned(other)[1]]
    await ask(desk, [{"role": "user", "content": "Find it."}, *swapped, {"role": "user", "content": "And?"}])
    assert "other" in text(desk.engine.heard[2].prompt) and "where" not in text(desk.engine.heard[2].prompt)
    bad = {**returned(one)[0], "encrypted_content": "gAAAAA"}
    with pytest.raises(openai.BadRequestError, match="encrypted_content"):
        await ask(desk, [{"role": "user", "content": "Find it."}, bad])


async def test_calls_that_stand_apart_each_before_its_result_are_one_turn():
    desk = Desk(scripted("look\n" + call(query="a") + call(query="b") + call(query="c"), "done", "more"))
    first = await ask(desk, tools=[FUNCTION])
    message, *calls = returned(first)
    mixed = [item for pair in zip(calls, results(first), strict=True) for item in pair]
    history = [{"role": "user", "content": "Find it."}, message, *mixed]
    second = await ask(desk, history, tools=[FUNCTION])
    await ask(desk, [*history, *returned(second), {"role": "user", "content": "And?"}], tools=[FUNCTION])
    assert all(node.fork is None for node in desk.seal().nodes)


async def test_a_response_is_gone_on_from_by_its_id():
    desk = Desk(scripted(call(query="a"), "done", "more"))
    first = await ask(desk, instructions="Be good.", tools=[FUNCTION])
    second = await ask(desk, results(first), instructions="Be good.", tools=[FUNCTION], previous_response_id=first.id)
    third = await ask(desk, "And?", instructions="Be good.", tools=[FUNCTION], previous_response_id=second.id)
    assert third.output_text == "more"
    trace = desk.seal()
    assert all(node.fork is None for node in trace.nodes)
    assert [call.turn for call in trace.calls] == [0, 1, 2]


async def test_instructions_of_the_response_before_are_not_taken_over():
    desk = Desk(scripted("yes", "done"))
    first = await ask(desk, instructions="Speak like a pirate.")
    await ask(desk, "And?", instructions="Be brief.", previous_response_id=first.id)
    prompt = text(desk.engine.heard[1].prompt)
    assert "pirate" not in prompt and prompt.index("Be brief.") < prompt.index("Find it.") < prompt.index("And?")


async def test_an_unknown_response_is_refused_with_its_code():
    desk = Desk(scripted("yes"))
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(desk, previous_response_id="resp_nobody")
    assert caught.value.code == "previous_response_not_found"
    assert desk.seal().calls == []


async def test_a_custom_tool_is_called_with_free_text():
    wrote = 'print("ä")\n+ two'
    desk = Desk(scripted(call("apply_patch", input=wrote), "done"))
    first = await ask(desk, tools=[PATCH, {"type": "web_search"}])
    (item,) = first.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", wrote)
    await ask(desk, [{"role": "user", "content": "Find it."}, *returned(first), *results(first)], tools=[PATCH])
    trace = desk.seal()
    assert [one.error for one in trace.calls[0].tool_calls] == [None]
    assert all(node.fork is None for node in trace.nodes if node.message["role"] == "assistant")


async def test_a_stream_has_every_event_in_order_and_the_same_response():
    wrote = THOUGHT + "look 🎉\n" + call(query="a")
    plain = await ask(Desk(scripted(wrote)), tools=[FUNCTION])
    events = await events_of(Desk(scripted(wrote)), tools=[FUNCTION])
    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    steps = [kind for at, kind in enumerate(kinds[2:-1]) if kind != kinds[2:-1][at - 1]]
    part = ["response.output_item.added", "response.content_part.added"]
    done = ["response.content_part.done", "response.output_item.done"]
    assert steps == [
        *part, "response.reasoning_text.delta", "response.reasoning_text.done", *done,
        *part, "response.output_text.delta", "response.output_text.done", *done,
        part[0], "response.function_call_arguments.delta", "response.function_call_arguments.done", done[1],
    ]  # fmt: skip
    told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert told == "look 🎉"
    last = events[-1].response
    assert [(i.type, getattr(i, "arguments", None)) for i in last.output] == [
        (i.type, getattr(i, "arguments", None)) for i in plain.output
    ]
    assert last.output_text == plain.output_text and last.usage == plain.usage
    for event in events:
        if event.type == "response.output_item.done":
            assert event.item == last.output[event.output_index]


async def test_the_client_puts_a_stream_together():
    desk = Desk(scripted("look\n" + call(query="a")))
    async with desk.client().responses.stream(model="main", input="Find it.", tools=[FUNCTION]) as stream:
        final = await stream.get_final_response()
    assert final.output_text == "look" and final.output[1].name == "search"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_cut_by_its_length_is_incomplete_and_has_no_call(stream):
    desk = Desk(scripted("look\n" + call(query="a")))
    most = len(ids("look\n<tool_call>", end=False))
    if stream:
        events = await events_of(desk, tools=[FUNCTION], max_output_tokens=most)
        assert events[-1].type == "response.incomplete"
        response = events[-1].response
    else:
        response = await ask(desk, tools=[FUNCTION], max_output_tokens=most)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert [item.type for item in response.output] == ["message"]


async def test_logprobs_are_told_when_they_are_included():
    desk = Desk(scripted("yes"))
    response = await ask(desk, include=["message.output_text.logprobs"], top_logprobs=2)
    assert [one.logprob for one in response.output[0].content[0].logprobs] == [-0.5] * len(ids("yes", end=False))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "x", "call_id": "c", "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": "x", "tools": [3]}, "tools[0]"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x", "tools": [{"type": "function", "name": "f", "parameters": 3}]}, "tools[0].parameters"),
        ({"input": "x", "tool_choice": 3}, "tool_choice"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "instructions": 3}, "instructions"),
        ({"input": "x", "previous_response_id": 3}, "previous_response_id"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "stream": "yes"}, "stream"),
    ],
)
async def test_a_malformed_body_is_a_400_that_names_the_field_and_leaves_no_record(body, param):
    desk = Desk(scripted("yes"))
    answer = await desk.post({"model": "main", **body}, "/responses")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    trace = desk.seal()
    assert trace.calls == [] and trace.nodes == []
