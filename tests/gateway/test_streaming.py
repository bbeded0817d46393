"""Streams: what is shown when, over both transports, and what happens when the client goes away."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from gateway_fakes import ASK, SEARCH, Desk, SlowEngine, call, ids, returned, scripted, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from inspan.engine.base import Sample
from inspan.errors import EngineError
from inspan.gateway.render import ChatML, parse_hermes
from inspan.gateway.stream import Detokeniser, Showing, StopFinder
from inspan.gateway.transport import serve


async def collect(stream):
    return [chunk async for chunk in stream]


def content(chunks, index=0):
    return "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == index)


async def test_a_stream_has_role_content_calls_finish_and_usage_chunks_in_order():
    desk = Desk(scripted("thinking\n" + call(query="Zürich 🎉") + "\n" + call(query="b")))
    chunks = await collect(await desk.ask(tools=[SEARCH], stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert content(chunks) == "thinking"
    calls = [c for chunk in chunks for choice in chunk.choices for c in choice.delta.tool_calls or ()]
    assert [(c.index, c.function.name) for c in calls] == [(0, "search"), (1, "search")]
    assert json.loads(calls[0].function.arguments) == {"query": "Zürich 🎉"}
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_stream_records_what_a_plain_call_records():
    traces = []
    for stream in (False, True):
        desk = Desk(scripted("see 東京\n" + call(query="a")), seed=3)
        reply = await desk.ask(tools=[SEARCH], stream=stream)
        if stream:
            await collect(reply)
        traces.append(desk.seal())
    assert traces[0] == traces[1]


async def test_characters_split_over_tokens_are_streamed_whole():
    written = "naïve 🎉🎊 東京都 — ß"
    assert len(ids("🎊")) > 2, "the tokenizer splits it"
    desk = Desk(scripted(written))
    chunks = await collect(await desk.ask(stream=True))
    assert content(chunks) == written
    assert all("\ufffd" not in (c.choices[0].delta.content or "") for c in chunks if c.choices)


async def test_text_comes_while_the_engine_samples_and_calls_wait_until_they_are_whole():
    engine = SlowEngine("yes " + call(query="a"))
    desk = Desk(engine)
    stream = await asyncio.wait_for(started(desk, engine, len(ids("yes", end=False)) + 1), 5)
    first, second = await anext(stream), await anext(stream)
    assert first.choices[0].delta.role == "assistant" and second.choices[0].delta.content.startswith("yes")
    for _ in engine.tokens:
        engine.step.release()
    rest = await collect(stream)
    assert "tool_call" not in content(rest)
    assert rest[-1].choices[0].finish_reason == "tool_calls"


async def started(desk, engine, tokens):
    task = asyncio.ensure_future(desk.ask(stream=True, tools=[SEARCH]))
    await engine.started.wait()
    for _ in range(tokens):
        engine.step.release()
    return aiter(await task)


async def test_a_streamed_turn_that_comes_back_is_recognised():
    desk = Desk(scripted("\n\nlook\n\n" + call(query="a") + "\nand\n" + call(query="b") + "\n", "done"))
    chunks = await collect(await desk.ask(tools=[SEARCH], stream=True))
    calls = [c for chunk in chunks for choice in chunk.choices for c in choice.delta.tool_calls or ()]
    message = {
        "role": "assistant",
        "content": content(chunks),
        "tool_calls": [{"id": c.id, "type": "function", "function": c.function.model_dump()} for c in calls],
    }
    answers = [{"role": "tool", "tool_call_id": c.id, "content": "x"} for c in calls]
    await desk.ask([*ASK, message, *answers], tools=[SEARCH])
    assert all(node.fork is None for node in desk.seal().nodes)


async def test_several_choices_are_streamed_by_index():
    desk = Desk(scripted("yes", "no", "find it"))
    chunks = await collect(await desk.ask(stream=True, n=3))
    assert sorted(content(chunks, i) for i in range(3)) == ["find it", "no", "yes"]
    ends = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert sorted(ends) == [0, 1, 2]


async def test_logprobs_come_in_a_stream_too():
    desk = Desk(scripted("yes"))
    chunks = await collect(await desk.ask(stream=True, logprobs=True))
    found = [e for chunk in chunks for c in chunk.choices if c.logprobs for e in c.logprobs.content]
    assert [e.logprob for e in found] == [-0.5] * len(ids("yes", end=False))


async def test_a_fault_before_the_first_token_has_its_status():
    desk = Desk(scripted(EngineError("gone"), "yes"))
    with pytest.raises(openai.InternalServerError) as caught:
        await desk.ask(stream=True)
    assert caught.value.status_code == 503


async def test_a_fault_in_mid_stream_comes_as_an_error_event():
    class Breaks(SlowEngine):
        async def sample(self, policy, prompt, params, watch=None):
            watch(self.tokens[:2])
            await asyncio.sleep(0)
            raise EngineError("the device fell off")

    desk = Desk(Breaks("hello world"))
    with pytest.raises(openai.APIError, match="the device fell off"):
        await collect(await desk.ask(stream=True))
    trace = desk.seal()
    assert "the device fell off" in trace.fault
    assert [call.finish for call in trace.calls] == ["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("socket", [False, True])
async def test_a_client_that_goes_away_cancels_the_engine_and_a_cancelled_call_is_recorded(stream, socket):
    engine = SlowEngine("hello world, the answer is done")
    desk = Desk(engine)
    async with serve(desk.gateway.app) as url:
        client = desk.client(url=url if socket else None)
        begun = asyncio.Event()
        task = asyncio.ensure_future(consume(client, stream, begun))
        engine.step.release()
        engine.step.release()
        await asyncio.wait_for((begun if stream else engine.started).wait(), 5)
        task.cancel()
        await asyncio.wait((task,))
        await asyncio.wait_for(engine.cancelled.wait(), 5)
        for _ in range(20):
            await asyncio.sleep(0)
    trace = desk.seal()
    assert [call.finish for call in trace.calls] == ["cancelled"]
    assert trace.complete and trace.fault is None


async def consume(client, stream, begun):
    reply = await client.chat.completions.create(model="main", messages=ASK, stream=stream)
    async for _ in reply:
        begun.set()


async def test_closing_a_stream_early_cancels_the_engine():
    engine = SlowEngine("hello world, the answer is done")
    desk = Desk(engine)
    task = asyncio.ensure_future(desk.ask(stream=True))
    await engine.started.wait()
    for _ in range(3):
        engine.step.release()
    stream = await task
    await anext(aiter(stream))
    await stream.close()
    assert engine.cancelled.is_set()
    assert [call.finish for call in desk.seal().calls] == ["cancelled"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_loopback_server_says_the_same_bytes(stream):
    texts = ("look\n" + call(query="Zürich"), "done")
    desk, other = Desk(scripted(*texts)), Desk(scripted(*texts))
    body = {"model": "main", "messages": ASK, "tools": [SEARCH], "stream": stream}
    other.gateway.clock = desk.gateway.clock = lambda: 1700000000.0
    async with serve(desk.gateway.app) as url:
        over_socket = await desk.client(url=url)._client.post(
            f"{url}{desk.grant.base_path}/chat/completions", json=body
        )
    in_process = await other.post(body)
    assert over_socket.content == in_process.content
    assert over_socket.headers["content-type"] == in_process.headers["content-type"]


# ---- the pure parts ---------------------------------------------------------------------------------------------

TEXTS = st.text(alphabet=st.characters(codec="utf-8"), max_size=60)
MARKS = ["\n", "<tool_call>", "</tool_call>", "<tool", "stop", "sto", "<think>", "</think>", "<thin", call(query="a")]
PARTS = st.lists(st.one_of(TEXTS, st.sampled_from(MARKS)), max_size=8)
TURNS = st.one_of(PARTS, PARTS.map(lambda parts: ["<think>", *parts]))


@settings(max_examples=150, deadline=None)
@given(written=TEXTS, cut=st.lists(st.integers(1, 4), max_size=40))
def test_pieces_concatenate_to_the_text_and_split_no_character(written, cut):
    renderer = ChatML(tokenizer())
    tokens = ids(written, end=False)
    detokeniser, pieces, at = Detokeniser(renderer.decode), [], 0
    for size in [*cut, len(tokens)]:
        pieces.append(detokeniser.push(tokens[at : at + size]))
        at += size
    pieces.append(detokeniser.finish())
    assert "".join(pieces) == written
    if "\ufffd" not in written:
        assert all("\ufffd" not in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(parts=TURNS, stops=st.lists(st.sampled_from(["stop", "sto", "\n\n", "x"]), max_size=2, unique=True))
def test_what_was_shown_is_a_prefix_of_what_the_message_shows(parts, stops):
    finder, showing = StopFinder(stops), Showing("<tool_call>", stops)
    shown = []
    for part in parts:
        for piece in (part[: len(part) // 2], part[len(part) // 2 :]):
            before = len(finder.text)
            if finder.at is None and not finder.push(piece):
                shown += showing.push(finder.text[before:])
    final = parse_hermes(finder.text)
    shown += showing.finish(final.reasoning, final.shown)
    for kind, expected in (("reasoning", final.reasoning), ("text", final.shown)):
        assert "".join(piece.text for piece in shown if piece.kind == kind) == expected
    assert [piece.kind for piece in shown] == sorted(piece.kind for piece in shown), "thinking comes first"
    whole = "".join(parts)
    hits = [whole.find(stop) for stop in stops if stop in whole]
    assert finder.text == (whole[: min(hits)] if hits else whole)


@settings(max_examples=200, deadline=None)
@given(parts=PARTS)
def test_reading_back_never_raises_and_loses_no_text(parts):
    text = "".join(parts)
    parsed = parse_hermes(text)
    assert all(c.name or c.error for c in parsed.calls)
    if "<tool_call>" not in text and not text.lstrip().startswith("<think>"):
        assert parsed.shown == text.strip("\n")
    for unnamed in (c for c in parsed.calls if not c.name):
        assert unnamed.arguments in parsed.shown


async def test_a_returned_message_with_bytes_that_are_no_text_is_recorded_as_sampled():
    broken = [*ids("yes", end=False), ids("🎉", end=False)[0], *ids("no")]

    class Broken(SlowEngine):
        async def sample(self, policy, prompt, params, watch=None):
            for token in broken:
                if watch:
                    watch([token])
            return Sample(tuple(broken), (-0.5,) * len(broken), (0,) * len(broken), "stop")

    desk = Desk(Broken("x"))
    reply = await desk.ask()
    await desk.ask([*ASK, returned(reply), {"role": "user", "content": "?"}])
    trace = desk.seal()
    assert trace.nodes[2].tokens[-len(broken) :] == tuple(broken)
    assert all(node.fork is None for node in trace.nodes)
