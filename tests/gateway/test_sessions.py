"""The tree of sessions: children, seeds, limits, retries, sealing, resuming."""

from __future__ import annotations

import asyncio

import openai
import pytest
from gateway_fakes import (
    ASK,
    MAIN,
    SEARCH,
    SUBAGENT,
    SWARM,
    Desk,
    SlowEngine,
    call,
    heard_until_killed,
    ids,
    results,
    returned,
    scripted,
    text,
    tokens_of,
)

from inspan.engine.base import Sample
from inspan.engine.scripted import ScriptedEngine
from inspan.errors import EngineError, EngineOverloaded, InputError, StoreError
from inspan.gateway.base import Limits, Role
from inspan.trace.chains import chains
from inspan.trace.steps import measure
from inspan.trace.store import TraceStore

TASK = [{"role": "user", "content": "sub-task"}]


def assigns(count: int) -> str:
    return "\n".join(call("assign_task") for _ in range(count))


async def start(desk: Desk, count: int):
    reply = await desk.ask(model="orchestrator", tools=[SUBAGENT, SEARCH])
    return reply, [c.id for c in reply.choices[0].message.tool_calls]


# ---- the tree ---------------------------------------------------------------------------------------------------


async def test_children_hang_under_the_call_they_are_made_for():
    desk = Desk(scripted(assigns(2), "yes"), roles=SWARM)
    reply, calls = await start(desk, 2)
    for parent in reversed(calls):
        await desk.ask(TASK, model="subagent", parent=parent)
    await desk.ask([*ASK, returned(reply), *results(reply)], model="orchestrator", tools=[SUBAGENT, SEARCH])
    trace = desk.seal()
    root, *children = trace.sessions
    assert (root.agent, root.policy, root.trainable, root.parent) == ("orchestrator", "policy", True, None)
    assert {c.parent_call for c in children} == set(calls)
    assert all(
        (c.agent, c.policy, c.trainable, c.parent) == ("subagent", "policy@v0", False, root.id) for c in children
    )
    assert [heard.policy for heard in desk.engine.heard] == ["policy", "policy@v0", "policy@v0", "policy"]
    assert measure(trace.sessions, trace.calls).parallel_width == 2
    trained = chains(trace.sessions, trace.nodes, trace.calls)
    assert [any(chain.trained) for chain in trained] == [True, False, False]


async def test_a_call_that_was_never_minted_is_refused():
    desk = Desk(scripted("yes"), roles=SWARM)
    with pytest.raises(openai.BadRequestError) as caught:
        await desk.ask(TASK, model="subagent", parent="call_123")
    assert caught.value.code == "unknown_parent_call"


async def test_rollouts_do_not_reach_into_each_other():
    desk = Desk(scripted(assigns(1), "yes"), roles=SWARM)
    _, calls = await start(desk, 1)
    other = Desk(scripted("yes"), roles=SWARM, seed=1)
    with pytest.raises(openai.BadRequestError):
        await other.ask(TASK, model="subagent", parent=calls[0])


async def test_roles_at_the_root_have_sessions_of_their_own():
    desk = Desk(scripted("yes"), roles=(*MAIN, Role("judge", "judge@v1", False)))
    await desk.ask()
    await desk.ask(model="judge")
    assert [s.agent for s in desk.seal().sessions] == ["main", "judge"]


# ---- seeds ------------------------------------------------------------------------------------------------------


async def play(order: list[int], seed: int = 5) -> dict[str, int | None]:
    """A turn with three children, which call in this order, twice each; seeds by what was asked."""
    desk = Desk(
        ScriptedEngine(lambda policy, prompt: ids(assigns(3) if policy == "policy" else "yes")), roles=SWARM, seed=seed
    )
    _, calls = await start(desk, 3)
    for child in order:
        ask = [{"role": "user", "content": f"task {child}"}]
        reply = await desk.ask(ask, model="subagent", parent=calls[child])
        await desk.ask([*ask, returned(reply), *TASK], model="subagent", parent=calls[child])
    return {text(heard.prompt): heard.params.seed for heard in desk.engine.heard}


async def test_seeds_hang_on_the_call_path_and_not_on_the_order_of_arrival():
    forth, back = await play([0, 1, 2]), await play([2, 1, 0])
    assert forth == back
    assert len(set(forth.values())) == 7
    assert (await play([0, 1, 2], seed=6)).items() != forth.items()


async def test_equal_children_of_different_calls_have_different_seeds():
    desk = Desk(scripted(assigns(2), "yes"), roles=SWARM)
    _, calls = await start(desk, 2)
    await asyncio.gather(*(desk.ask(TASK, model="subagent", parent=parent) for parent in calls))
    assert len({heard.params.seed for heard in desk.engine.heard}) == 3


async def test_an_unmarked_repeat_is_sampled_afresh_with_another_seed():
    desk = Desk(scripted("yes"))
    await desk.ask()
    await desk.ask()
    assert len({heard.params.seed for heard in desk.engine.heard}) == 2


# ---- limits -----------------------------------------------------------------------------------------------------


async def refused(coroutine) -> bool:
    try:
        await coroutine
    except openai.PermissionDeniedError as error:
        assert error.code == "budget_exhausted"
        return True
    return False


async def spend(desk: Desk, parent: str, most: int = 20) -> int:
    """How many turns a child gets."""
    messages = list(TASK)
    for turn in range(most):
        try:
            reply = await desk.ask(messages, model="subagent", parent=parent)
        except openai.PermissionDeniedError as error:
            assert error.code == "budget_exhausted"
            return turn
        messages += [returned(reply), {"role": "user", "content": "more"}]
    return most


async def test_critical_steps_stop_a_single_agent():
    desk = Desk(scripted(call(query="a")), limits=Limits(critical_steps=3))
    messages = list(ASK)
    for _ in range(3):
        reply = await desk.ask(messages, tools=[SEARCH])
        messages += [returned(reply), *results(reply)]
    assert await refused(desk.ask(messages, tools=[SEARCH]))
    assert await refused(desk.ask(messages, tools=[SEARCH]))
    trace = desk.seal()
    assert trace.limit_hit == "critical_steps"
    assert [c.finish for c in trace.calls] == ["tool_calls"] * 3 + ["limit"], "one refusal of a session is recorded"
    assert measure(trace.sessions, trace.calls).critical_steps == 3


async def test_parallel_direct_calls_cost_as_much_as_serial_ones():
    desk = Desk(scripted("\n".join(call(query=q) for q in "abcd")), limits=Limits(critical_steps=4))
    reply = await desk.ask(tools=[SEARCH])
    assert await refused(desk.ask([*ASK, returned(reply), *results(reply)], tools=[SEARCH]))


async def test_children_of_one_wave_share_what_their_parent_had_left():
    desk = Desk(scripted(assigns(3), "go"), roles=SWARM, limits=Limits(critical_steps=6, width=3))
    reply, calls = await start(desk, 3)
    assert await asyncio.gather(*(spend(desk, parent) for parent in calls)) == [5, 5, 5]
    history = [*ASK, returned(reply), *results(reply)]
    assert await refused(desk.ask(history, model="orchestrator", tools=[SUBAGENT, SEARCH]))


async def test_children_beyond_the_width_have_what_earlier_waves_left():
    desk = Desk(scripted(assigns(3), "go"), roles=SWARM, limits=Limits(critical_steps=6, width=2))
    _, calls = await start(desk, 3)
    assert [await spend(desk, parent, most=3) for parent in calls[:2]] == [3, 3]
    assert await spend(desk, calls[2]) == 2
    trace = desk.seal()
    assert measure(trace.sessions, trace.calls, width=2).critical_steps == 6


async def test_requests_in_flight_count():
    desk = Desk(scripted("yes"), limits=Limits(critical_steps=3))
    outcomes = await asyncio.gather(*(refused(desk.ask()) for _ in range(8)))
    assert sorted(outcomes) == [False] * 3 + [True] * 5


async def test_calls_are_limited_over_all_sessions_and_choices():
    desk = Desk(scripted(assigns(1), "yes"), roles=SWARM, limits=Limits(calls=3))
    _, calls = await start(desk, 1)
    assert await refused(desk.ask(TASK, model="subagent", parent=calls[0], n=3))
    await desk.ask(TASK, model="subagent", parent=calls[0], n=2)
    assert await refused(desk.ask(TASK, model="subagent", parent=calls[0]))
    assert desk.seal().limit_hit == "calls"


async def test_tokens_limit_the_context_and_the_last_answer_is_cut_to_fit():
    desk = Desk(scripted("hello world, the answer is done"), limits=Limits(tokens=60))
    reply = await desk.ask()
    assert reply.choices[0].finish_reason in ("length", "stop")
    assert reply.usage.total_tokens <= 60
    assert await refused(desk.ask([*ASK, returned(reply), {"role": "user", "content": "hello " * 60}]))
    assert desk.seal().limit_hit == "tokens"


async def test_a_harness_that_floods_leaves_one_record():
    desk = Desk(scripted("yes"), limits=Limits(calls=1))
    await desk.ask()
    assert all(await asyncio.gather(*(refused(desk.ask()) for _ in range(200))))
    assert len(desk.seal().calls) == 2


# ---- retries ----------------------------------------------------------------------------------------------------


async def test_a_marked_retry_gets_the_answer_of_the_request_it_repeats():
    desk = Desk(scripted("yes", "no"))
    body = {"model": "main", "messages": ASK}
    first = await desk.post(body)
    again = await desk.post(body, x_stainless_retry_count="1")
    assert first.content == again.content
    assert len(desk.engine.heard) == 1
    fresh = await desk.post(body)
    assert fresh.json()["choices"][0]["message"]["content"] == "no"
    assert len(desk.seal().calls) == 2


async def test_a_marked_retry_waits_for_the_request_in_flight():
    engine = SlowEngine("yes")
    desk = Desk(engine)
    body = {"model": "main", "messages": ASK}
    first = asyncio.ensure_future(desk.post(body))
    await engine.started.wait()
    again = asyncio.ensure_future(desk.post(body | {"stream": False}, x_stainless_retry_count="0"))
    retry = asyncio.ensure_future(desk.post(body, x_stainless_retry_count="2"))
    for _ in range(2 * len(engine.tokens)):
        engine.step.release()
    assert (await first).content == (await retry).content
    assert (await again).json()["id"] != (await first).json()["id"]


async def test_a_retry_of_a_request_that_was_given_up_is_served_afresh():
    engine = SlowEngine("yes")
    desk = Desk(engine)
    body = {"model": "main", "messages": ASK}
    first = asyncio.ensure_future(desk.post(body))
    await engine.started.wait()
    retry = asyncio.ensure_future(desk.post(body, x_stainless_retry_count="1"))
    await asyncio.sleep(0)
    first.cancel()
    for _ in engine.tokens:
        engine.step.release()
    assert (await retry).status_code == 200
    assert sorted(c.finish for c in desk.seal().calls) == ["cancelled", "stop"]


async def test_an_idempotency_key_shares_and_refuses_another_body():
    desk = Desk(scripted("yes", "no"))
    body = {"model": "main", "messages": ASK}
    one = await desk.post(body, idempotency_key="k")
    two = await desk.post(body, idempotency_key="k")
    assert one.content == two.content
    other = await desk.post(body | {"n": 2}, idempotency_key="k")
    assert other.status_code == 400


async def test_a_stream_is_replayed_to_a_marked_retry():
    desk = Desk(scripted(call(query="a")))
    body = {"model": "main", "messages": ASK, "tools": [SEARCH], "stream": True}
    first = await desk.post(body)
    again = await desk.post(body, x_stainless_retry_count="1")
    assert first.content.split(b"\n\n")[-3:] == again.content.split(b"\n\n")[-3:]
    assert len(desk.engine.heard) == 1


# ---- faults -----------------------------------------------------------------------------------------------------


async def test_an_engine_fault_is_a_503_that_marks_the_trace():
    desk = Desk(scripted(EngineError("out of memory"), "yes"))
    with pytest.raises(openai.InternalServerError, match="out of memory") as caught:
        await desk.ask()
    assert caught.value.status_code == 503
    trace = desk.seal()
    assert "out of memory" in trace.fault
    assert trace.complete and not trace.sampled


async def test_an_exception_of_the_engine_is_a_fault_too():
    desk = Desk(scripted(ZeroDivisionError("x"), "yes"))
    with pytest.raises(openai.InternalServerError):
        await desk.ask()
    assert "ZeroDivisionError" in desk.seal().fault


async def test_a_retry_that_succeeds_mends_the_fault_and_costs_one_step():
    desk = Desk(scripted(EngineError("hiccup"), "yes"), limits=Limits(critical_steps=1, calls=1))
    reply = await desk.client(retries=2).chat.completions.create(model="main", messages=ASK)
    assert reply.choices[0].message.content == "yes"
    assert len({heard.params.seed for heard in desk.engine.heard}) == 1, "the retry draws what the first would have"
    trace = desk.seal()
    assert trace.fault is None and trace.limit_hit is None
    assert [c.finish for c in trace.calls] == ["error", "stop"]


async def test_an_overloaded_engine_is_a_429_that_says_when_to_come_back():
    desk = Desk(scripted(EngineOverloaded("full"), "yes"))
    answer = await desk.post({"model": "main", "messages": ASK})
    assert answer.status_code == 429 and answer.headers["retry-after"]
    assert answer.json()["error"]["code"] == "overloaded"


async def test_when_one_choice_fails_the_others_are_given_up():
    desk = Desk(scripted("yes", EngineError("gone"), "no"))
    answer = await desk.post({"model": "main", "messages": ASK, "n": 3})
    assert answer.status_code == 503
    assert desk.seal().fault


async def test_a_store_that_fails_makes_the_rollout_incomplete_and_the_bytes_are_withheld(tmp_path):
    store = TraceStore(tmp_path / "t.db")
    desk = Desk(scripted("yes"), store=store)
    await desk.ask()
    store.close()
    for stream in (False, True):
        body = {"model": "main", "messages": ASK, "stream": stream}
        answer = await desk.post(body)
        assert answer.status_code == 503 if not stream else b"[DONE]" not in answer.content
    trace = desk.seal()
    assert not trace.complete and trace.fault
    assert [c.ok for c in trace.calls] == [True, False, False]
    chains(trace.sessions, trace.nodes, trace.calls)


async def test_a_sample_that_is_no_record_of_itself_makes_the_rollout_incomplete():
    class Lopsided(SlowEngine):
        async def sample(self, policy, prompt, params, watch=None):
            return Sample((5, 6), (-0.1,), (0, 0), "stop")

    desk = Desk(Lopsided("x"))
    assert (await desk.post({"model": "main", "messages": ASK})).status_code == 503
    trace = desk.seal()
    assert not trace.complete and trace.fault


# ---- sealing ----------------------------------------------------------------------------------------------------


async def test_late_calls_are_refused_and_not_recorded():
    desk = Desk(scripted("yes"))
    await desk.ask()
    trace = desk.seal()
    with pytest.raises(openai.PermissionDeniedError) as caught:
        await desk.ask()
    assert caught.value.code == "session_sealed"
    assert len(trace.calls) == 1
    with pytest.raises(InputError):
        desk.seal()


@pytest.mark.parametrize("stream", [False, True])
async def test_sealing_cancels_what_is_in_flight_and_its_client_hears_so(stream):
    engine = SlowEngine("yes")
    desk = Desk(engine)
    task = asyncio.ensure_future(desk.ask(stream=stream))
    await engine.started.wait()
    trace = desk.seal()
    assert [c.finish for c in trace.calls] == ["cancelled"]
    with pytest.raises(openai.PermissionDeniedError) as caught:
        await task
    assert caught.value.code == "session_sealed"
    assert engine.cancelled.is_set()
    assert len(trace.calls) == 1


async def test_closing_the_gateway_seals_all():
    desk = Desk(scripted("yes"))
    await desk.gateway.close()
    with pytest.raises(openai.PermissionDeniedError):
        await desk.ask()


async def test_opening_twice_or_with_roles_that_clash_is_an_input_error():
    desk = Desk(scripted("yes"))
    with pytest.raises(InputError, match="open already"):
        desk.gateway.open("r", roles=MAIN)
    with pytest.raises(InputError, match="default"):
        desk.gateway.open("r2", roles=MAIN, default_role="other")
    with pytest.raises(InputError, match="critical_steps"):
        Limits(critical_steps=0)


# ---- the store --------------------------------------------------------------------------------------------------


async def test_what_a_harness_has_heard_is_in_the_store(tmp_path):
    store = TraceStore(tmp_path / "t.db")
    desk = Desk(scripted(assigns(1), "yes"), roles=SWARM, store=store, limits=Limits(calls=2))
    _, calls = await start(desk, 1)
    await desk.ask(TASK, model="subagent", parent=calls[0])
    assert await refused(desk.ask(TASK, model="subagent", parent=calls[0]))
    trace = desk.seal()
    stored = store.load("r")
    assert (stored.sessions, stored.nodes, stored.calls) == (trace.sessions, trace.nodes, trace.calls)


async def test_a_rollout_is_resumed_where_its_last_call_ended(tmp_path):
    texts = (assigns(1), "sub", "done")

    async def run(resume: bool) -> Desk:
        store = TraceStore(tmp_path / f"{resume}.db")
        desk = Desk(scripted(*texts), roles=SWARM, store=store, seed=4, limits=Limits(critical_steps=9))
        reply, calls = await start(desk, 1)
        await desk.ask(TASK, model="subagent", parent=calls[0])
        if resume:
            heard = desk.engine.heard
            desk = Desk(scripted(texts[2]), rollout="other", store=store)
            desk.grant = desk.gateway.resume("r", roles=SWARM, seed=4, limits=Limits(critical_steps=9))
            desk.rollout, desk.url = "r", desk.url.partition("/r/")[0] + desk.grant.base_path
            desk.engine.heard[:0] = heard
        history = [*ASK, returned(reply), *results(reply)]
        await desk.ask(history, model="orchestrator", tools=[SUBAGENT, SEARCH])
        return desk

    straight, resumed = await run(False), await run(True)
    assert straight.engine.heard == resumed.engine.heard
    assert straight.seal() == resumed.seal()


async def test_resuming_what_is_not_there_is_an_error(tmp_path):
    desk = Desk(scripted("yes"), store=TraceStore(tmp_path / "t.db"))
    with pytest.raises(StoreError, match="nothing"):
        desk.gateway.resume("nothing", roles=MAIN)
    with pytest.raises(InputError, match="store"):
        Desk(scripted("yes")).gateway.resume("nothing", roles=MAIN)


_VICTIM = """
    import asyncio, sys
    sys.path.insert(0, sys.argv[2])
    from gateway_fakes import ASK, Desk, returned, scripted
    from inspan.trace.store import TraceStore

    async def main():
        desk = Desk(scripted("yes"), store=TraceStore(sys.argv[1]))
        messages = list(ASK)
        while True:
            reply = await desk.ask(messages)
            print(reply.id, flush=True)
            messages += [returned(reply), {"role": "user", "content": "more"}]

    asyncio.run(main())
"""


def test_what_was_answered_survives_kill_9(tmp_path):
    path = tmp_path / "t.db"
    heard = heard_until_killed(_VICTIM, path, 25)
    stored = TraceStore(path, create=False).load("r")
    assert {f"chatcmpl-{c.id}" for c in stored.calls} >= set(heard)
    chains(stored.sessions, stored.nodes, stored.calls)
    by_id = {node.id: node for node in stored.nodes}
    for one in stored.calls:
        assert one.context is not None and one.node is not None
        assert len(tokens_of(stored.nodes, one.context)) + by_id[one.node].start == one.prompt_tokens
