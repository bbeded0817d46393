"""Outside models pass through and are recorded, and never trained."""

from __future__ import annotations

import asyncio

import openai
import pytest
from gateway_fakes import ASK, SEARCH, Desk, call, ids, results, returned, scripted

from inspan.engine.openai_engine import OpenAIChat
from inspan.errors import EngineError, InputError, RequestError
from inspan.gateway.base import Role
from inspan.trace.chains import chains

JUDGE = (Role("main", "policy", True), Role("judge", "big-model", False))


class Canned:
    """An outside model that plays its answers."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.bodies = []

    async def chat(self, body):
        self.bodies.append(body)
        await asyncio.sleep(0)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def answer(content, *names, finish="stop"):
    calls = [
        {"id": f"outside_{i}", "type": "function", "function": {"name": name, "arguments": '{"query": "a"}'}}
        for i, name in enumerate(names)
    ]
    message = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
    return {
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 2},
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_passes_through_and_its_answer_is_untrained_context(stream):
    outside = Canned(answer("good", "search", "fetch", finish="tool_calls"), answer("well done"))
    desk = Desk(scripted("yes"), roles=JUDGE, outside={"big-model": outside})
    reply = await desk.ask(model="judge", tools=[SEARCH], temperature=0.3)
    history = [*ASK, returned(reply), *results(reply)]
    second = await desk.ask(history, model="judge", tools=[SEARCH], stream=stream)
    if stream:
        assert "".join([c.choices[0].delta.content or "" async for c in second]) == "well done"
    trace = desk.seal()
    assert outside.bodies[0]["model"] == "big-model" and outside.bodies[0]["temperature"] == 0.3
    assert "stream" not in outside.bodies[1]
    assert all(c.id.startswith("call_") for c in reply.choices[0].message.tool_calls)
    assert [c.error is None for c in trace.calls[0].tool_calls] == [True, False]
    assert all(node.fork is None and not node.sampled for node in trace.nodes)
    assert not any(any(chain.trained) for chain in chains(trace.sessions, trace.nodes, trace.calls))
    assert reply.usage.prompt_tokens == 9


async def test_faults_of_an_outside_model_are_infrastructure_and_refusals_are_passed_on():
    for fault, status, marked in (
        (EngineError("down"), 503, True),
        (RequestError("wrong key", status=401), 503, True),
        (RequestError("too long", status=400), 400, False),
        (KeyError("bug"), 503, True),
    ):
        desk = Desk(scripted("yes"), roles=JUDGE, outside={"big-model": Canned(fault)})
        got = await desk.post({"model": "judge", "messages": ASK})
        assert got.status_code == status
        assert bool(desk.seal().fault) == marked


async def test_an_answer_that_cannot_be_read_is_a_fault():
    desk = Desk(scripted("yes"), roles=JUDGE, outside={"big-model": Canned({"choices": [{"text": "x"}]})})
    assert (await desk.post({"model": "judge", "messages": ASK})).status_code == 503
    assert desk.seal().fault


async def test_an_outside_model_cannot_be_trained():
    with pytest.raises(InputError, match="outside"):
        Desk(scripted("yes"), roles=(Role("main", "big-model", True),), outside={"big-model": Canned()})


async def test_one_gateway_can_be_the_outside_model_of_another():
    behind = Desk(scripted("hello", call(query="x")))
    chat = OpenAIChat(behind.url, api_key="k", model="main", http_client=behind.http)
    desk = Desk(scripted("yes"), roles=JUDGE, outside={"big-model": chat})
    first = await desk.ask(model="judge", tools=[SEARCH])
    second = await desk.ask([*ASK, returned(first), {"role": "user", "content": "?"}], model="judge", tools=[SEARCH])
    assert first.choices[0].message.content == "hello"
    assert second.choices[0].finish_reason == "tool_calls"
    inner, outer = behind.seal(), desk.seal()
    assert all(node.fork is None for node in inner.nodes + outer.nodes)
    assert inner.nodes[2].tokens[-len(ids("hello")) :] == tuple(ids("hello"))


async def test_an_outside_request_is_cancelled_with_its_client():
    class Slow(Canned):
        async def chat(self, body):
            begun.set()
            await asyncio.Event().wait()

    begun = asyncio.Event()
    desk = Desk(scripted("yes"), roles=JUDGE, outside={"big-model": Slow()})
    task = asyncio.ensure_future(desk.ask(model="judge"))
    await begun.wait()
    trace = desk.seal()
    with pytest.raises(openai.PermissionDeniedError):
        await task
    assert [c.finish for c in trace.calls] == ["cancelled"]
