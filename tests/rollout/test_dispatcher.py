"""Groups: which rollouts run, in what order they come, and that none is lost or comes twice."""

from __future__ import annotations

import asyncio
import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_fakes import FakeGateway, job, polite, runner, task

from inspan.errors import CheckpointError, EngineError, InfrastructureError, StoreError
from inspan.rollout.dispatcher import Dispatcher, DispatchSettings, member_seed, next_life, run_tasks
from inspan.rollout.executor import LocalExecutor
from inspan.rollout.run import lost_rollout
from inspan.trace.records import Node, Rollout, Terminal
from inspan.trace.store import TraceStore


class Manual:
    """An executor whose jobs end when the test says so."""

    def __init__(self):
        self.jobs = {}
        self.order = []
        self.version = 0

    def submit(self, job, started=None):
        future = asyncio.get_running_loop().create_future()
        self.jobs[job.id] = (job, future)
        self.order.append(job.id)
        if started:
            started()
        return future

    def end(self, name, terminal=Terminal.COMPLETED, tokens=2):
        job, future = self.jobs.pop(name)
        rollout = lost_rollout(job, ValueError("x"), version=self.version)
        rollout.terminal, rollout.complete = terminal, True
        rollout.nodes = [Node(0, "s", None, {"role": "assistant", "content": ""}, (1,) * tokens, 0)]
        future.set_result(rollout)

    def cancel(self, name):
        if name in self.jobs:
            self.end(name, Terminal.CANCELLED, tokens=1)

    async def close(self):
        return None


def source(limit=None):
    names = itertools.count() if limit is None else range(limit)
    tasks = (task(f"t{n}") for n in names)
    return lambda: next(tasks, None)


def dispatcher(executor, groups=2, group_size=2, *, limit=None, extra=None, **fields):
    return Dispatcher(executor, source(limit), DispatchSettings(groups, group_size, **fields), **(extra or {}))


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_sync_collects_whole_groups_in_the_order_they_were_opened():
    gateway = FakeGateway()
    executor = LocalExecutor(runner(gateway=gateway))
    made = dispatcher(executor, groups=3, group_size=4, concurrency=5)
    for update in range(3):
        batch = await made.collect()
        assert [g.task.id for g in batch] == [f"t{3 * update + i}" for i in range(3)]
        for group in batch:
            assert [r.member for r in group.rollouts] == [0, 1, 2, 3]
            assert {r.terminal for r in group.rollouts} == {Terminal.COMPLETED}
            assert group.version == update and group.staleness == 0
        assert not gateway.open_rollouts, "nothing runs between two collects"
        made.advance(update + 1)
    assert made.ledger.groups == {}
    await executor.close()


async def test_members_have_seeds_of_their_own_that_do_not_depend_on_when_they_ran():
    executor = Manual()
    made = dispatcher(executor, concurrency=99, extra={"seed": 7})
    pending = asyncio.create_task(made.collect())
    await settle()
    seeds = {name: job.seed for name, (job, _) in executor.jobs.items()}
    assert len(set(seeds.values())) == 4
    assert seeds["g000001.1"] == member_seed(7, "t1", 0, 1) != member_seed(8, "t1", 0, 1)
    assert member_seed(7, "t1", 1, 1) != member_seed(7, "t1", 0, 1)
    for name in reversed(list(executor.jobs)):
        executor.end(name)
    assert [g.id for g in await pending] == ["g000000", "g000001"]


async def test_no_more_rollouts_are_in_flight_than_allowed():
    executor = Manual()
    made = dispatcher(executor, groups=4, group_size=2, concurrency=3)
    pending = asyncio.create_task(made.collect())
    while not pending.done():
        await settle()
        assert len(executor.jobs) <= 3
        if executor.jobs:
            executor.end(next(iter(executor.jobs)))
    assert len(await pending) == 4


async def test_an_infrastructure_fault_is_retried_and_then_succeeds():
    gateway = FakeGateway()
    failing = {"g000000.0", "g000000.0.1"}

    def fail(rollout, n):
        if rollout in failing:
            raise EngineError("away")

    gateway.fail = fail
    executor = LocalExecutor(runner(gateway=gateway))
    made = dispatcher(executor, groups=1, retries=2)
    (group,) = await made.collect()
    assert [(r.terminal, r.attempt) for r in group.rollouts] == [(Terminal.COMPLETED, 2), (Terminal.COMPLETED, 0)]
    assert made.meter.report()["retries"] == 2.0
    await executor.close()


async def test_retries_end_and_the_group_comes_without_that_reward():
    gateway = FakeGateway()

    def fail(rollout, n):
        if rollout.startswith("g000000.0"):
            raise EngineError("away")

    gateway.fail = fail
    executor = LocalExecutor(runner(gateway=gateway))
    made = dispatcher(executor, groups=1, retries=1)
    (group,) = await made.collect()
    assert [r.terminal for r in group.rollouts] == [Terminal.INFRASTRUCTURE, Terminal.COMPLETED]
    assert made.meter.none_share(0) == 0.5
    assert made.meter.report()["none_share"] == 0.5
    await executor.close()


async def test_a_harness_fault_is_not_retried_and_does_not_stop_the_run():
    async def crash(task, ctx):
        await polite(task, ctx)
        raise ValueError("mine")

    executor = LocalExecutor(runner(crash))
    (group, _) = await dispatcher(executor).collect()
    assert [(r.terminal, r.attempt) for r in group.rollouts] == [(Terminal.FAILED, 0)] * 2
    await executor.close()


async def test_a_batch_in_which_nothing_could_be_scored_stops_the_run_and_names_the_fault():
    async def broken(task, ctx):
        raise ImportError("no module named client")

    executor = LocalExecutor(runner(broken))
    with pytest.raises(InfrastructureError, match="no module named client"):
        await dispatcher(executor).collect()
    await executor.close()


async def test_every_terminal_state_is_stored_once_and_reported_once(tmp_path):
    seen = []
    with TraceStore(tmp_path / "t.db") as store:
        executor = LocalExecutor(runner())
        made = dispatcher(executor, extra={"store": store, "on_rollout": lambda r: seen.append(r.id)})
        await made.collect()
        rows = store.rollouts()
        assert sorted(row.id for row in rows) == sorted(seen) == [f"g00000{g}.{m}" for g in (0, 1) for m in (0, 1)]
        assert {row.terminal for row in rows} == {Terminal.COMPLETED}
        assert next_life(store) == 1
        await executor.close()


async def test_a_store_that_fails_stops_the_run(tmp_path):
    store = TraceStore(tmp_path / "t.db")
    store.close()
    executor = LocalExecutor(runner())
    with pytest.raises(StoreError):
        await dispatcher(executor, extra={"store": store}).collect()
    await executor.close()


async def test_a_task_source_that_fails_stops_the_run():
    def bad():
        raise OSError("tasks are gone")

    made = Dispatcher(Manual(), bad, DispatchSettings(1, 1))
    with pytest.raises(OSError, match="gone"):
        await made.collect()


async def test_a_source_that_ends_gives_what_is_left():
    executor = LocalExecutor(runner())
    made = dispatcher(executor, limit=3)
    sizes = []
    for update in range(3):
        sizes.append(len(await made.collect()))
        made.advance(update + 1)
    assert sizes == [2, 1, 0]
    await executor.close()


async def test_evaluation_runs_each_task_as_often_as_asked_under_ids_of_its_own():
    executor = LocalExecutor(runner())
    groups = await run_tasks(executor, [task("a"), task("b")], samples=3, concurrency=2, seed=1, prefix="eval/")
    assert [(g.task.id, len(g.rollouts)) for g in groups] == [("a", 3), ("b", 3)]
    assert groups[1].rollouts[2].id == "eval/g000001.2" and groups[1].rollouts[2].group == groups[1].id
    assert await run_tasks(executor, []) == []
    await executor.close()


# ---- async -----------------------------------------------------------------------------------------------------------


async def test_async_keeps_rolling_while_the_learner_works_up_to_the_staleness_bound():
    executor = Manual()
    made = dispatcher(executor, groups=1, group_size=2, mode="async", max_staleness=1, concurrency=2)
    pending = asyncio.create_task(made.collect())
    await settle()
    executor.end("g000000.0")
    await settle()
    assert "g000001.0" in executor.jobs, "the free place is used for the next group"
    executor.end("g000000.1")
    assert [g.id for g in await pending] == ["g000000"]
    await settle()
    for name in ("g000001.0", "g000001.1"):
        executor.end(name)
    await settle()
    assert executor.jobs == {}, "one more group would be two versions old when it is trained"
    made.advance(1)
    await settle()
    assert list(executor.jobs) == ["g000002.0", "g000002.1"]
    (group,) = await made.collect()
    assert (group.id, group.version, group.staleness) == ("g000001", 0, 1)
    assert dict(made.meter.staleness) == {0: 1, 1: 1}
    await made.close()


async def test_async_without_advance_says_so_instead_of_hanging():
    executor = LocalExecutor(runner())
    made = dispatcher(executor, groups=1, mode="async", max_staleness=1)
    await made.collect()
    await made.collect()
    with pytest.raises(RuntimeError, match="advance"):
        await made.collect()
    await made.close()
    await executor.close()


async def test_drop_cancels_what_became_too_stale_and_logs_lengths_and_rewards():
    executor = Manual()
    extra = {"reward_of": lambda rollout: 0.25}
    made = dispatcher(executor, groups=1, mode="async", max_staleness=1, stale="drop", concurrency=9, extra=extra)
    pending = asyncio.create_task(made.collect())
    await settle()
    for name in ("g000001.0", "g000001.1", "g000000.0"):
        executor.end(name, tokens=5)
    assert [g.id for g in await pending] == ["g000001"]
    assert made.advance(1) == []
    (ended,) = made.advance(2)
    assert (ended.rollout, ended.tokens, ended.reward) == ("g000000.0", 5, 0.25)
    await settle()
    assert [(d.rollout, d.terminal, d.reward) for d in made.meter.dropped] == [
        ("g000000.0", Terminal.COMPLETED, 0.25),
        ("g000000.1", Terminal.CANCELLED, None),
    ]
    figures = made.meter.report()
    assert (figures["dropped"], figures["dropped_tokens_mean"], figures["dropped_reward_mean"]) == (2.0, 3.0, 0.25)
    await made.close()


async def test_partial_lets_the_long_rollout_run_on_under_new_weights():
    gateway = FakeGateway()
    hold, half = asyncio.Event(), asyncio.Event()

    async def two_turns(task, ctx):
        first = await polite(task, ctx)
        if task.id == "t0":
            half.set()
            await hold.wait()
        return first + await polite(task, ctx)

    executor = LocalExecutor(runner(two_turns, gateway=gateway, version=lambda: gateway.version))
    made = dispatcher(executor, groups=1, group_size=1, partial=True, concurrency=2)
    (quick,) = await made.collect()
    await half.wait()
    assert quick.task.id == "t1" and gateway.open_rollouts, "the update goes on with the group that finished"
    gateway.version = 1
    made.advance(1)
    hold.set()
    (long,) = await made.collect()
    rollout = long.rollouts[0]
    assert long.task.id == "t0" and long.staleness == 1
    assert [node.versions for node in rollout.nodes] == [(0, 0), (1, 1)]
    assert (rollout.version_started, rollout.version_finished) == (0, 1)
    await made.close()
    await executor.close()


async def test_a_pause_dispatches_nothing_new():
    executor = Manual()
    made = dispatcher(executor, groups=2, group_size=1, mode="async", concurrency=1)
    made.start()
    assert list(executor.order) == [] or len(executor.jobs) <= 1
    await settle()
    made.pause()
    executor.end("g000000.0")
    await settle()
    assert executor.jobs == {}
    made.start()
    await settle()
    assert list(executor.jobs) == ["g000001.0"]
    await made.close()


# ---- restarts --------------------------------------------------------------------------------------------------------


async def test_what_a_shutdown_cancels_is_run_anew_and_what_finished_is_not():
    executor = Manual()
    made = dispatcher(executor, groups=1, group_size=3, extra={"seed": 5})
    pending = asyncio.create_task(made.collect())
    await settle()
    first_seed = executor.jobs["g000000.1"][0].seed
    executor.end("g000000.0")
    await settle()
    pending.cancel()
    await made.close()
    state = json.loads(json.dumps(made.state()))

    fresh = Manual()
    again = dispatcher(fresh, groups=1, group_size=3, limit=0, extra={"seed": 5, "life": 1})
    again.restore(state)
    pending = asyncio.create_task(again.collect())
    await settle()
    assert list(fresh.jobs) == ["g000000.1.1~1", "g000000.2.1~1"]
    assert fresh.jobs["g000000.1.1~1"][0].seed == first_seed
    assert fresh.jobs["g000000.1.1~1"][0].task == task("t0")
    for name in list(fresh.jobs):
        fresh.end(name)
    (group,) = await pending
    assert [r.id for r in group.rollouts] == ["g000000.0", "g000000.1.1~1", "g000000.2.1~1"]


async def test_a_collected_batch_belongs_to_the_state_until_it_is_trained():
    executor = LocalExecutor(runner())
    made = dispatcher(executor)
    batch = await made.collect()
    before = json.loads(json.dumps(made.state()))
    made.advance(1)
    after = json.loads(json.dumps(made.state()))
    again = dispatcher(LocalExecutor(runner()), limit=0)
    again.restore(before)
    assert await again.collect() == batch
    later = dispatcher(LocalExecutor(runner()), limit=0)
    later.restore(after)
    assert await later.collect() == []
    await executor.close()


async def test_a_state_without_its_rollouts_is_refused():
    made = dispatcher(LocalExecutor(runner()))
    await made.collect()
    state = made.state()
    state["rollouts"]["g000001"].pop()
    with pytest.raises(CheckpointError, match="g000001"):
        dispatcher(Manual()).restore(state)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    mode=st.sampled_from(["sync", "async", "partial"]),
    staleness=st.integers(1, 2),
    concurrency=st.integers(1, 9),
    groups=st.integers(1, 3),
)
def test_every_group_is_trained_exactly_once_whatever_ends_when_and_however_often_it_is_killed(
    seed, mode, staleness, concurrency, groups
):
    """Rollouts end in random order and states; the process is killed at random; each kill goes back to a checkpoint."""
    rng = random.Random(seed)
    fields = dict(
        groups=groups,
        mode="async" if mode == "async" else "sync",
        partial=mode == "partial",
        max_staleness=staleness,
        concurrency=concurrency,
        retries=1,
    )

    async def live(state, cursor, version, trained, life):
        executor = Manual()
        names = itertools.count(cursor)
        made = Dispatcher(executor, lambda: task(f"t{next(names)}"), DispatchSettings(group_size=2, **fields))
        made.life = life
        if state:
            made.restore(state)
        checkpoint = (state, cursor, version, list(trained))
        for _ in range(3):
            pending = asyncio.create_task(made.collect())
            while not pending.done():
                await settle()
                if pending.done():
                    break
                if rng.random() < 0.02:
                    pending.cancel()
                    return checkpoint, False
                assert executor.jobs, "stuck"
                executor.end(rng.choice(list(executor.jobs)), rng.choice(list(Terminal)[:5]))
            try:
                batch = await pending
            except InfrastructureError:
                batch = []
            for group in batch:
                assert group.staleness <= (staleness if mode != "sync" else 0)
                assert [r.member for r in group.rollouts] == [0, 1]
            trained = [*trained, *(g.task.id for g in batch)]
            version += 1
            made.advance(version)
            state = json.loads(json.dumps(made.state()))
            cursor = made.ledger._next
            checkpoint = (state, cursor, version, trained)
        return checkpoint, True

    async def run():
        checkpoint, ended, life = (None, 0, 0, []), False, 0
        while not ended and life < 50:
            checkpoint, ended = await live(*checkpoint, life)
            life += 1
        return checkpoint[3]

    trained = asyncio.run(run())
    assert len(trained) == len(set(trained))


async def test_lockstep_admits_and_returns_the_same_whatever_ends_first():
    async def play(seed):
        rng = random.Random(seed)
        executor = Manual()
        made = dispatcher(executor, groups=3, group_size=2, concurrency=4, deterministic=True)
        pending = asyncio.create_task(made.collect())
        while not pending.done():
            await settle()
            if executor.jobs:
                executor.end(rng.choice(list(executor.jobs)))
        return executor.order, [r.id for g in await pending for r in g.rollouts]

    assert len({str(await play(seed)) for seed in range(10)}) == 1


async def test_an_executor_that_loses_a_job_is_infrastructure():
    class Losing(Manual):
        def submit(self, job, started=None):
            future = asyncio.get_running_loop().create_future()
            future.set_exception(InfrastructureError("the worker died"))
            return future

    seen: list[Rollout] = []
    made = dispatcher(Losing(), groups=1, retries=0, extra={"on_rollout": seen.append})
    with pytest.raises(InfrastructureError, match="worker died"):
        await made.collect()
    assert [r.terminal for r in seen] == [Terminal.INFRASTRUCTURE] * 2


async def test_a_job_that_runs_already_is_refused():
    executor = LocalExecutor(runner())
    pending = executor.submit(job())
    with pytest.raises(ValueError, match="running already"):
        executor.submit(job())
    await pending
    await executor.close()
