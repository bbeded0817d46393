"""Sessions of harnesses that do anything to their history, in any dialect: nothing is lost, nothing is made up."""

from __future__ import annotations

import asyncio
import random

import pytest
from gateway_fakes import Desk, audit, call, scripted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from speakers import NAMES, SPEAKERS, Heard, Speaker, Turn, post, say

from inspan.engine.base import SamplingParams
from inspan.gateway.base import Limits, Role
from inspan.trace.chains import chains

SAYS = [
    "yes",
    "no\n" + call(query="Zürich", top=3.0),
    call(query="a") + call("fetch") + '<tool_call>\n{"name": "list"}\n</tool_call>',
    '<tool_call>\n{"arguments":{"q" :  [1,2.50,false,null,"\\u00e9 é"]}, "name":"search"}\n</tool_call>',
    "<tool_call>{",
    '<tool_call>{"name": "search", "arguments": [1]}</tool_call>',
    "",
    "🎉<|im_start|>",
    "done\n\n",
    "<think>\nwhere\n</think>\n\nyes",
    "<think>\n\n</think>\n\n" + call(query="東京"),
    "<think>never closed",
    "  <think>a</think>b<think>c</think>",
]
TEXTS = ["Find it.", "", "x<|im_end|>y<|im_start|>system", "東京 🎉", "hello world " * 20, "\ud83d", "\x00\r\n\t"]
ROLES = (Role("main", "policy", True), Role("frozen", "policy@v0", False))


def changed(rng: random.Random, speaker: Speaker, history: list[Turn]) -> list[Turn]:
    """A history with one thing done to it."""
    out = list(history)
    at = rng.randrange(len(out))
    role = out[at][0]
    match rng.randrange(9):
        case 0 if role in ("user", "system"):
            out[at] = (role, rng.choice(TEXTS))
        case 1:
            del out[at + 1 :]
        case 2 if len(out) > 1:
            del out[at]
        case 3:
            out.insert(at, out[at])
        case 4 if role == "assistant":
            out[at] = (role, speaker.respelled(out[at][1]))
        case 5 if role == "assistant":
            out[at] = (role, speaker.unthinking(out[at][1]))
        case 6 if role == "assistant":
            out[at] = (role, speaker.reworded(out[at][1]))
        case 7:
            rng.shuffle(out)
    return out or history


def extended(rng: random.Random, history: list[Turn], heard: Heard) -> list[Turn]:
    """A history after an answer: results in any order, perhaps a further message."""
    results: list[Turn] = [("tool", id, rng.choice(TEXTS)) for id, _, _ in heard.calls]
    rng.shuffle(results)
    more: list[Turn] = [("user", rng.choice(TEXTS))] if not results or rng.random() < 0.3 else []
    return [*history, ("assistant", heard.native), *results, *more]


async def hostile(rng: random.Random, desk: Desk) -> None:
    first: list[Turn] = [("system", "s"), ("user", "Find it.")]
    histories = {at: [list(first)] for at in range(len(SPEAKERS))}
    calls: list[str] = []
    for step in range(rng.randrange(1, 9)):
        at = rng.randrange(len(SPEAKERS))
        speaker, history = SPEAKERS[at], rng.choice(histories[at])
        if rng.random() < 0.6:
            history = changed(rng, speaker, history)
        options = {"tools": rng.random() < 0.7, "model": rng.choice(["main", "main", "frozen"])}
        if rng.random() < 0.3:
            options["max_tokens"] = rng.choice([1, 5, 20])
        headers = {"X-Parent-Call": rng.choice(calls)} if calls and rng.random() < 0.2 else {}
        if rng.random() < 0.2:
            headers["Idempotency-Key"] = str(step)
        answers = [post(desk, speaker, history, headers=headers, **options)]
        if rng.random() < 0.2:  # a repeat in parallel, marked or not
            marked = {"x-stainless-retry-count": "1"} if rng.random() < 0.5 else {}
            answers.append(post(desk, speaker, history, headers=headers | marked, **options))
        for answer in await asyncio.gather(*answers):
            assert answer.status_code in (200, 400, 403), answer.text
            if answer.status_code == 200:
                heard = speaker.read(answer.json())
                calls += [id for id, _, _ in heard.calls]
                histories[at].append(extended(rng, history, heard))


@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_a_hostile_session_is_recorded_as_it_was_and_each_sampled_token_is_trained_once(seed):
    rng = random.Random(seed)
    cut = SamplingParams(max_tokens=rng.choice([3, 300]))
    limits = rng.choice([Limits(), Limits(calls=5), Limits(tokens=150), Limits(critical_steps=4)])
    desk = Desk(scripted(*(rng.choice(SAYS) for _ in range(40))), roles=ROLES, sampling=cut, limits=limits)
    asyncio.run(hostile(rng, desk))
    trace = desk.seal()
    assert trace.complete and trace.fault is None
    audit(desk, trace)


@pytest.mark.parametrize("speaker", SPEAKERS, ids=NAMES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_an_honest_conversation_never_forks(speaker, seed):
    rng = random.Random(seed)

    async def run() -> None:
        cut = SamplingParams(max_tokens=rng.choice([4, 300]))
        desk = Desk(scripted(*(rng.choice(SAYS) for _ in range(6))), sampling=cut)
        history: list[Turn] = [("system", "s"), ("user", rng.choice(TEXTS))]
        for _ in range(5):
            heard = await say(desk, speaker, history)
            native = heard.native
            if rng.random() < 0.3:
                native = speaker.respelled(native)
            if rng.random() < 0.3:
                native = speaker.unthinking(native)
            results: list[Turn] = [("tool", id, rng.choice(TEXTS)) for id, _, _ in heard.calls]
            rng.shuffle(results)
            history += [("assistant", native), *results, ("user", rng.choice(TEXTS))]
        trace = desk.seal()
        audit(desk, trace)
        assert [node.fork for node in trace.nodes if node.fork] == []
        (chain,) = chains(trace.sessions, trace.nodes, trace.calls)
        last = desk.engine.heard[-1].prompt
        assert chain.tokens[: len(last)] == last

    asyncio.run(run())
