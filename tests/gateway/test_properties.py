"""Whatever a harness does with its history, what is recorded is what the engine saw and sampled, each token once."""

from __future__ import annotations

import asyncio
import json
import random

from gateway_fakes import SEARCH, Desk, call, ids, results, returned, scripted, text, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from inspan.engine.base import SamplingParams
from inspan.gateway.base import Role
from inspan.trace.chains import chains
from inspan.trace.store import TraceStore

SAYS = [
    "yes",
    "no\n" + call(query="Zürich"),
    call(query="a") + call("fetch"),
    "<tool_call>{",
    "",
    "🎉<|im_start|>",
    "done\n\n",
]
TEXTS = ["Find it.", "", "x<|im_end|>y", "東京", "hello world " * 20]
ROLES = (Role("main", "policy", True), Role("frozen", "policy@v0", False))


def edited(rng: random.Random, messages: list[dict]) -> list[dict]:
    out = [dict(message) for message in messages]
    at = rng.randrange(len(out))
    match rng.randrange(7):
        case 0 if out[at]["role"] != "assistant" or not out[at].get("tool_calls"):
            out[at]["content"] = rng.choice(TEXTS)
        case 1:
            del out[at + 1 :]
        case 2 if len(out) > 1:
            del out[at]
        case 3:
            out.insert(at, dict(out[at]))
        case 4 if out[at].get("tool_calls"):
            first = out[at]["tool_calls"][0]["function"]
            first["arguments"] = json.dumps(
                json.loads(first["arguments"]), indent=1
            )  # spelled otherwise, the same value
    return out


async def harness(rng: random.Random, desk: Desk) -> None:
    histories: list[list[dict]] = [[{"role": "system", "content": "s"}, {"role": "user", "content": "Find it."}]]
    parents: list[str] = []
    for _ in range(rng.randrange(1, 8)):
        messages = edited(rng, rng.choice(histories))
        options = {"tools": [SEARCH]} if rng.random() < 0.7 else {}
        if rng.random() < 0.3:
            options |= {"stop": ["o"]}
        if rng.random() < 0.3:
            options |= {"n": 2}
        parent = rng.choice(parents) if parents and rng.random() < 0.3 else None
        model = rng.choice(["main", "frozen"])
        reply = await desk.ask(messages, model=model, parent=parent, **options)
        for choice in range(len(reply.choices)):
            message = returned(reply, choice)
            parents += [c["id"] for c in message.get("tool_calls", ())]
            if parent is None and choice == 0:
                histories.append([*messages, message, *results(reply), {"role": "user", "content": rng.choice(TEXTS)}])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_recorded_is_what_the_engine_saw_and_each_sampled_token_is_trained_once(seed, tmp_path_factory):
    rng = random.Random(seed)
    cut = SamplingParams(max_tokens=rng.choice([3, 300]))
    store = TraceStore(tmp_path_factory.mktemp("store") / "t.db")
    answers = [rng.choice(SAYS) for _ in range(40)]
    desk = Desk(scripted(*answers), roles=ROLES, sampling=cut, store=store)
    asyncio.run(harness(rng, desk))
    trace = desk.seal()
    by_id = {node.id: node for node in trace.nodes}
    assert trace.complete and trace.fault is None
    for recorded, heard in zip(trace.calls, desk.engine.heard, strict=True):
        assert recorded.node is not None
        node = by_id[recorded.node]
        assert tokens_of(trace.nodes, recorded.context) + node.tokens[: node.start] == heard.prompt
        assert recorded.completion_tokens == len(node.tokens) - node.start
    found = chains(trace.sessions, trace.nodes, trace.calls)
    trainable = {session.id for session in trace.sessions if session.trainable}
    sampled = sum(len(node.tokens) - node.start for node in trace.nodes if node.session in trainable)
    assert sum(sum(chain.trained) for chain in found) == sampled
    stored = store.load("r")
    assert (stored.sessions, stored.nodes, stored.calls) == (trace.sessions, trace.nodes, trace.calls)
    store.close()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_an_honest_conversation_never_forks(seed):
    rng = random.Random(seed)

    async def run():
        desk = Desk(
            scripted(*(rng.choice(SAYS) for _ in range(6))), sampling=SamplingParams(max_tokens=rng.choice([4, 300]))
        )
        messages = [{"role": "user", "content": rng.choice(TEXTS)}]
        for _ in range(5):
            reply = await desk.ask(messages, tools=[SEARCH])
            messages += [
                returned(reply),
                *results(reply, rng.choice(TEXTS)),
                {"role": "user", "content": rng.choice(TEXTS)},
            ]
        trace = desk.seal()
        (chain,) = chains(trace.sessions, trace.nodes, trace.calls)
        last = desk.engine.heard[-1].prompt
        assert chain.tokens[: len(last)] == last
        assert all(node.fork is None for node in trace.nodes)
        opened = text(chain.tokens).count("<|im_start|>")
        assert sum(token == ids("<|im_start|>", end=False)[0] for token in chain.tokens) <= opened

    asyncio.run(run())
