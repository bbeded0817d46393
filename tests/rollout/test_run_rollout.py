"""How one rollout ends, whatever its harness does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
from rollout_fakes import FakeGateway, ask, job, polite, runner

from inspan.errors import EngineError, EngineOverloaded, LimitExceeded, SandboxError
from inspan.gateway.base import Limits
from inspan.parity.fingerprint import Fingerprint
from inspan.parity.watch import Learning
from inspan.rollout.executor import LocalExecutor
from inspan.rollout.threads import Threads
from inspan.trace.records import Terminal, ToolEvent


async def end(harness, **fields):
    made = runner(harness, **fields)
    try:
        return await made.run(job())
    finally:
        await made.close()


def bell():
    """A timer that rings when told to."""
    event = asyncio.Event()

    async def timer(seconds):
        await event.wait()

    return event, timer


async def client_of(ctx):
    return ctx.model("main").http_client


async def test_an_answer_completes_the_rollout_with_its_trace():
    watch = Learning(Fingerprint({"harness": "h"}))
    made = runner(watch=watch, version=lambda: 3)
    rollout = await made.run(job("g000007.2.1", group="g000007", member=2, attempt=1))
    assert (rollout.terminal, rollout.answer, rollout.error) == (Terminal.COMPLETED, "said 0", None)
    assert [node.tokens for node in rollout.nodes] == [(5, 0, 7)]
    assert len(rollout.calls) == 1 and rollout.sessions[0].agent == "main"
    assert (rollout.id, rollout.group, rollout.member, rollout.attempt) == ("g000007.2.1", "g000007", 2, 1)
    assert (rollout.fingerprint, rollout.version_started, rollout.version_finished) == (watch.id, 3, 3)
    assert rollout.metrics["sampled_tokens"] == 2.0
    assert rollout.trainable


async def test_a_crash_after_a_sampled_token_is_a_scored_failure():
    async def crash(task, ctx):
        await polite(task, ctx)
        raise KeyError("oops")

    rollout = await end(crash)
    assert rollout.terminal is Terminal.FAILED and rollout.terminal.scored
    assert "KeyError" in rollout.error and rollout.answer is None


async def test_a_harness_that_fails_again_and_again_is_told_once_and_counted(caplog):
    async def crash(task, ctx):
        await polite(task, ctx)
        raise KeyError("oops")

    made = runner(crash)
    for number in range(3):
        await made.run(job(f"g00000{number}.0"))
    await made.close()
    assert made.failures == {Terminal.FAILED: 3}
    assert [record.getMessage() for record in caplog.records] == [
        "the harness failed on rollout g000000.0: KeyError: 'oops'; further ones are counted only"
    ]


async def test_a_crash_before_any_token_has_no_reward():
    async def crash(task, ctx):
        raise KeyError("oops")

    rollout = await end(crash)
    assert rollout.terminal is Terminal.INFRASTRUCTURE
    assert "nothing was sampled" in rollout.error and "oops" in rollout.error


async def test_an_answer_without_any_model_call_has_no_reward_and_says_why():
    async def idle(task, ctx):
        return "42"

    rollout = await end(idle)
    assert rollout.terminal is Terminal.INFRASTRUCTURE and "no model call" in rollout.error


@pytest.mark.parametrize("answer", [None, 42, b"bytes", ["a"]])
async def test_an_answer_that_is_no_text_is_a_failure(answer):
    async def odd(task, ctx):
        await polite(task, ctx)
        return answer

    rollout = await end(odd)
    assert rollout.terminal is Terminal.FAILED and type(answer).__name__ in rollout.error


async def test_a_hang_after_a_sampled_token_times_out_and_late_calls_are_refused():
    ring, timer = bell()
    gateway, late = FakeGateway(), []

    async def hang(task, ctx):
        await polite(task, ctx)
        ring.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            late.append(ctx)
            raise

    rollout = await end(hang, gateway=gateway, timer=timer)
    assert rollout.terminal is Terminal.TIMED_OUT and rollout.terminal.scored
    with pytest.raises(RuntimeError, match="sealed"):
        made = runner(gateway=gateway)
        await ask(late[0], made._in_process())


async def test_a_hang_before_any_token_has_no_reward():
    ring, timer = bell()

    async def hang(task, ctx):
        ring.set()
        await asyncio.Event().wait()

    assert (await end(hang, timer=timer)).terminal is Terminal.INFRASTRUCTURE


async def test_a_harness_that_will_not_be_cancelled_is_left_behind(monkeypatch):
    monkeypatch.setattr("inspan.rollout.run.GRACE_S", 0.01)
    ring, timer = bell()
    stubborn_over = asyncio.Event()

    async def stubborn(task, ctx):
        await polite(task, ctx)
        ring.set()
        while not stubborn_over.is_set():
            try:
                await stubborn_over.wait()
            except asyncio.CancelledError:
                continue
        return "too late"

    rollout = await end(stubborn, timer=timer)
    assert rollout.terminal is Terminal.TIMED_OUT and rollout.answer is None
    stubborn_over.set()
    await asyncio.sleep(0)


async def test_a_flood_of_calls_ends_at_the_limit():
    async def flood(task, ctx):
        while True:
            await polite(task, ctx)

    rollout = await end(flood, limits=Limits(calls=3))
    assert rollout.terminal is Terminal.LIMIT and len(rollout.calls) == 3


async def test_a_harness_that_stops_itself_at_its_budget_ends_at_the_limit():
    async def careful(task, ctx):
        await polite(task, ctx)
        raise LimitExceeded("no steps left")

    assert (await end(careful)).terminal is Terminal.LIMIT


async def test_an_answer_counts_although_a_limit_was_hit_on_the_way():
    async def goes_on(task, ctx):
        await polite(task, ctx)
        with pytest.raises(RuntimeError):
            await polite(task, ctx)
        return "still"

    assert (await end(goes_on, limits=Limits(calls=1))).terminal is Terminal.COMPLETED


async def test_broken_json_is_refused_and_the_harness_may_go_on():
    async def broken(task, ctx):
        client = await client_of(ctx)
        reply = await client.post(ctx.model("main").base_url + "/chat/completions", content=b"{nonsense")
        assert reply.status_code == 400
        return await polite(task, ctx)

    assert (await end(broken)).terminal is Terminal.COMPLETED


@pytest.mark.parametrize("at", [0, 1])
async def test_an_engine_fault_has_no_reward_even_after_sampling(at):
    gateway = FakeGateway()

    def fail(rollout, n):
        if n == at:
            raise EngineError("the engine crashed")

    gateway.fail = fail

    async def twice(task, ctx):
        await polite(task, ctx)
        return await polite(task, ctx)

    rollout = await end(twice, gateway=gateway)
    assert rollout.terminal is Terminal.INFRASTRUCTURE and "the engine crashed" in rollout.error


async def test_a_sandbox_fault_behind_the_harness_own_error_has_no_reward():
    async def wrapped(task, ctx):
        await polite(task, ctx)
        try:
            raise SandboxError("the sandbox died")
        except SandboxError as error:
            raise ValueError("tool trouble") from error

    async def grouped(task, ctx):
        await polite(task, ctx)
        raise ExceptionGroup("several", [ValueError("x"), SandboxError("the sandbox died")])

    for harness in (wrapped, grouped):
        rollout = await end(harness)
        assert rollout.terminal is Terminal.INFRASTRUCTURE and "sandbox died" in rollout.error


async def test_a_gateway_that_cannot_open_has_no_reward():
    gateway = FakeGateway()
    gateway.refuse = EngineOverloaded("full")
    rollout = await end(polite, gateway=gateway)
    assert rollout.terminal is Terminal.INFRASTRUCTURE and not rollout.trainable


async def test_sys_exit_and_self_cancellation_end_the_rollout_only():
    async def leaves(task, ctx):
        await polite(task, ctx)
        sys.exit(3)

    async def gives_up(task, ctx):
        await polite(task, ctx)
        raise asyncio.CancelledError

    assert (await end(leaves)).terminal is Terminal.FAILED
    assert (await end(gives_up)).terminal is Terminal.FAILED


async def test_cancelling_a_job_still_gives_its_rollout_with_what_was_sampled():
    asked = asyncio.Event()

    async def hang(task, ctx):
        await polite(task, ctx)
        asked.set()
        await asyncio.Event().wait()

    executor = LocalExecutor(runner(hang))
    pending = executor.submit(job())
    await asked.wait()
    executor.cancel("g000000.0")
    rollout = await pending
    assert rollout.terminal is Terminal.CANCELLED and not rollout.terminal.scored and len(rollout.calls) == 1
    await executor.close()


async def test_cancelling_the_callers_task_seals_the_rollout():
    gateway, asked = FakeGateway(), asyncio.Event()

    async def hang(task, ctx):
        asked.set()
        await asyncio.Event().wait()

    work = asyncio.create_task(runner(hang, gateway=gateway).run(job()))
    await asked.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert gateway.sealed == ["g000000.0"]


async def test_the_harness_gets_its_budget_options_and_tools_whose_events_are_kept():
    class Tools:
        schemas = ({"type": "function"},)

        def __init__(self, record):
            self.record = record

        async def call(self, name, arguments, *, call_id, session=""):
            self.record(ToolEvent(session, call_id, name, True, 0.5))
            return f"{name} {arguments['x']}"

    seen = {}

    async def uses(task, ctx):
        seen.update(budget=ctx.budget, max_tokens=ctx.max_tokens, options=ctx.options)
        await polite(task, ctx)
        return await ctx.tools.call("search", {"x": 1}, call_id="c")

    made = runner(uses, make_tools=lambda task, seed, record: Tools(record), options={"width": 4})
    rollout = await made.run(job())
    assert rollout.answer == "search 1"
    assert [event.name for event in rollout.tool_events] == ["search"]
    assert seen == {"budget": 9, "max_tokens": 16, "options": {"width": 4}}


# ---- user functions: off the event loop, over a socket -------------------------------------------------------------


def post(ctx, content="hi"):
    model = ctx.model("main")
    request = urllib.request.Request(model.base_url + "/chat/completions", method="POST")
    request.add_header("Authorization", f"Bearer {model.api_key}")
    body = json.dumps({"model": "main", "messages": [{"role": "user", "content": content}]}).encode()
    with urllib.request.urlopen(request, body) as reply:
        return reply.read().decode()


async def test_a_plain_function_with_a_blocking_client_works_and_stalls_nobody():
    loop_thread = threading.get_ident()
    threads = []

    def blocking(task, ctx):
        threads.append(threading.get_ident())
        assert ctx.model("main").http_client is None
        return post(ctx)[:3]

    rollout = await end(blocking, on_loop=False)
    assert rollout.terminal is Terminal.COMPLETED, rollout.error
    assert threads[0] != loop_thread


async def test_an_async_user_function_runs_on_a_loop_of_its_own_and_may_call_tools_of_the_main_loop():
    home = asyncio.get_running_loop()

    class Tools:
        schemas = ()

        async def call(self, name, arguments, *, call_id, session=""):
            assert asyncio.get_running_loop() is home
            return "found"

    async def mine(task, ctx):
        assert asyncio.get_running_loop() is not home
        await asyncio.to_thread(post, ctx)
        return await ctx.tools.call("search", {}, call_id="c")

    def plain(task, ctx):
        post(ctx)
        return asyncio.run(ctx.tools.call("search", {}, call_id="c"))

    for harness in (mine, plain):
        rollout = await end(harness, on_loop=False, make_tools=lambda *_: Tools())
        assert (rollout.terminal, rollout.answer) == (Terminal.COMPLETED, "found"), rollout.error


async def test_a_user_function_that_raises_or_exits_ends_its_rollout_only():
    def leaves(task, ctx):
        post(ctx)
        sys.exit("bye")

    def crashes(task, ctx):
        post(ctx)
        raise ValueError("mine")

    def broken(task, ctx):
        raise ImportError("no such client")

    assert (await end(leaves, on_loop=False)).terminal is Terminal.FAILED
    rollout = await end(crashes, on_loop=False)
    assert rollout.terminal is Terminal.FAILED and "mine" in rollout.error
    rollout = await end(broken, on_loop=False)
    assert rollout.terminal is Terminal.INFRASTRUCTURE and "no such client" in rollout.error


@pytest.mark.no_cover  # CPython 3.11 spins for ever when a thread that blocks in C is interrupted under a tracer
async def test_a_user_function_blocked_for_ever_times_out_and_is_counted(monkeypatch):
    monkeypatch.setattr("inspan.rollout.run.GRACE_S", 0.01)
    home = asyncio.get_running_loop()
    ring, timer = bell()
    let_go = threading.Event()

    def blocks(task, ctx):
        post(ctx)
        for _ in range(2):  # the interrupt ends the first wait only
            with contextlib.suppress(BaseException):
                home.call_soon_threadsafe(ring.set)
                let_go.wait()
        return "late"

    made = runner(blocks, on_loop=False, timer=timer, threads=Threads(limit=1))
    rollout = await made.run(job())
    assert rollout.terminal is Terminal.TIMED_OUT
    assert made.threads.hung == 1
    made.harness = runner(lambda task, ctx: post(ctx), on_loop=False).harness
    made.timer = runner().timer
    assert (await made.run(job("g000001.0"))).terminal is Terminal.COMPLETED, "the hung call keeps no place"
    let_go.set()
    while made.threads.hung:
        await asyncio.sleep(0.001)
    await made.close()


async def test_a_user_function_in_an_endless_python_loop_is_interrupted(monkeypatch):
    monkeypatch.setattr("inspan.rollout.run.GRACE_S", 1.0)
    home = asyncio.get_running_loop()
    ring, timer = bell()
    ended = threading.Event()

    def spins(task, ctx):
        try:
            post(ctx)
            home.call_soon_threadsafe(ring.set)
            while True:
                time.sleep(0.001)
        finally:
            ended.set()

    made = runner(spins, on_loop=False, timer=timer)
    assert (await made.run(job())).terminal is Terminal.TIMED_OUT
    assert ended.is_set() and made.threads.hung == 0
    await made.close()


async def test_an_async_user_function_that_hangs_is_cancelled(monkeypatch):
    home = asyncio.get_running_loop()
    ring, timer = bell()
    ended = threading.Event()

    async def hangs(task, ctx):
        try:
            await asyncio.to_thread(post, ctx)
            home.call_soon_threadsafe(ring.set)
            await asyncio.Event().wait()
        finally:
            ended.set()

    made = runner(hangs, on_loop=False, timer=timer)
    assert (await made.run(job())).terminal is Terminal.TIMED_OUT
    assert ended.is_set() and made.threads.hung == 0
    await made.close()


@pytest.mark.no_cover  # CPython 3.11 spins for ever when a thread that blocks in C is interrupted under a tracer
async def test_too_many_hung_calls_are_the_machines_trouble(monkeypatch):
    monkeypatch.setattr("inspan.rollout.run.GRACE_S", 0.001)
    let_go = threading.Event()

    async def at_once(seconds):
        return None

    made = runner(lambda task, ctx: let_go.wait(), on_loop=False, timer=at_once, threads=Threads(max_hung=2))
    made.base_url = "http://127.0.0.1:9"
    ends = [await made.run(job(f"g{i:06d}.0")) for i in range(3)]
    assert "hang in threads" in ends[2].error and ends[2].terminal is Terminal.INFRASTRUCTURE
    let_go.set()
    while made.threads.hung:
        await asyncio.sleep(0.001)


async def test_no_more_user_functions_run_at_once_than_there_are_places():
    running, most, lock = 0, 0, threading.Lock()

    def counts(task, ctx):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        answer = post(ctx)
        with lock:
            running -= 1
        return answer

    made = runner(counts, on_loop=False, threads=Threads(limit=2))
    ends = await asyncio.gather(*(made.run(job(f"g{i:06d}.0")) for i in range(8)))
    assert {rollout.terminal for rollout in ends} == {Terminal.COMPLETED}
    assert most <= 2
    await made.close()


async def test_a_job_cancelled_while_it_waits_for_a_place_never_starts():
    begun, let_go, home = asyncio.Event(), threading.Event(), asyncio.get_running_loop()
    ran = []

    def waits(task, ctx):
        ran.append(task)
        home.call_soon_threadsafe(begun.set)
        let_go.wait()
        return post(ctx)

    executor = LocalExecutor(runner(waits, on_loop=False, threads=Threads(limit=1)))
    first, second = executor.submit(job()), executor.submit(job("g000001.0"))
    await begun.wait()
    executor.cancel("g000001.0")
    let_go.set()
    assert (await first).terminal is Terminal.COMPLETED
    assert (await second).terminal is Terminal.CANCELLED
    assert len(ran) == 1
    await executor.close()
