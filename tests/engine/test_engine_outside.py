"""The scripted engine and the client of outside servers."""

from __future__ import annotations

import asyncio
import json

import httpx2
import pytest

from inspan.engine.base import SamplingParams, WeightsRef
from inspan.engine.openai_engine import OpenAIChat
from inspan.engine.scripted import ScriptedEngine
from inspan.errors import EngineError, EngineOverloaded, RequestError

PARAMS = SamplingParams(10, stop_ids=(9,))


async def test_a_script_is_played_in_order_with_the_present_version():
    engine = ScriptedEngine([(1, 2, 9, 4), (5,), EngineError("down")])
    first = await engine.sample("p", (7,), PARAMS)
    await engine.load("p", WeightsRef(3))
    second = await engine.sample("p", (7, 8), PARAMS)
    assert (first.tokens, first.stop, first.versions) == ((1, 2, 9), "stop", (0, 0, 0))
    assert (second.tokens, second.stop, second.versions) == ((5,), "length", (3,))
    for word in ("down", "no reply"):
        with pytest.raises(EngineError, match=word):
            await engine.sample("p", (7,), PARAMS)
    assert [h.prompt for h in engine.heard] == [(7,), (7, 8), (7,), (7,)]


async def test_a_script_may_be_a_function_and_is_cut_like_a_sample():
    engine = ScriptedEngine(lambda policy, prompt: [*prompt, *prompt], context_length=5)
    assert (await engine.sample("p", (1, 2), SamplingParams(9))).tokens == (1, 2, 1)
    assert (await engine.sample("p", (1, 2), SamplingParams(1))).tokens == (1,)
    watched = await engine.sample("p", (1, 2), SamplingParams(9), lambda ids: ids == [2])
    assert (watched.tokens, watched.stop) == ((1, 2), "stop")
    with pytest.raises(RequestError):
        await engine.sample("p", (1, 2, 3, 4, 5), SamplingParams(9))


async def test_a_held_request_waits_for_the_test():
    gate = asyncio.Event()
    engine = ScriptedEngine(lambda *_: [1], hold=lambda heard: gate if heard.prompt == (1,) else None)
    held = asyncio.ensure_future(engine.sample("p", (1,), PARAMS))
    assert (await engine.sample("p", (2,), PARAMS)).tokens == (1,)
    assert not held.done()
    gate.set()
    assert (await held).tokens == (1,)


ANSWER = {"choices": [{"message": {"role": "assistant", "content": "hi"}}], "model": "m"}


class Server:
    """Plays a list of responses (or transport errors) and keeps what it was sent; its clock only notes the waits."""

    def __init__(self, *responses) -> None:
        self.responses, self.bodies, self.headers, self.waits = list(responses), [], [], []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.bodies.append(json.loads(request.content))
        self.headers.append(request.headers)
        response = self.responses.pop(0)
        if isinstance(response, Exception):
            raise response
        return response

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)

    def chat(self, **options) -> OpenAIChat:
        client = httpx2.AsyncClient(transport=httpx2.MockTransport(self))
        return OpenAIChat("http://judge/v1/", api_key="k", http_client=client, sleep=self.sleep, **options)


def reply(status: int, body=None, **headers) -> httpx2.Response:
    return httpx2.Response(status, json=body if body is not None else ANSWER, headers=headers)


async def test_a_body_passes_through_with_the_model_of_the_policy():
    server = Server(reply(200))
    answer = await server.chat(model="judge-1").chat({"model": "judge", "messages": [], "seed": 3})
    assert answer == ANSWER
    assert server.bodies == [{"model": "judge-1", "messages": [], "seed": 3, "stream": False}]
    assert server.headers[0]["authorization"] == "Bearer k"


async def test_overload_faults_and_broken_connections_are_retried_with_backoff():
    error = {"error": {"message": "slow down"}}
    server = Server(
        reply(429, error, **{"retry-after": "7"}), reply(503, error), httpx2.ReadTimeout("late"), reply(200)
    )
    assert await server.chat().chat({}) == ANSWER
    assert server.waits == [7.0, 1.0, 2.0]


async def test_what_stays_broken_is_an_engine_error_and_a_bad_request_is_not_retried():
    with pytest.raises(EngineOverloaded, match=r"3 tries.*slow down"):
        await Server(*(reply(429, {"error": {"message": "slow down"}}) for _ in range(3))).chat(retries=2).chat({})
    with pytest.raises(EngineError, match="ConnectError"):
        await Server(httpx2.ConnectError("refused")).chat(retries=0).chat({})
    server = Server(reply(404, {"error": {"message": "no such model", "code": "model_not_found"}}))
    with pytest.raises(RequestError, match="no such model") as caught:
        await server.chat().chat({})
    assert (caught.value.status, caught.value.code, server.waits) == (404, "model_not_found", [])
    for broken in (httpx2.Response(200, text="<html>"), reply(200, {"choices": []})):
        with pytest.raises(EngineError, match="answer"):
            await Server(broken).chat().chat({})


async def test_a_stream_comes_chunk_by_chunk():
    chunks = [{"choices": [{"delta": {"content": c}}]} for c in "hey"]
    text = ": ping\n\n" + "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n"
    server = Server(reply(500), httpx2.Response(200, text=text))
    assert [c async for c in server.chat().stream({"messages": []})] == chunks
    assert server.bodies[1]["stream"] is True and server.waits == [0.5]
