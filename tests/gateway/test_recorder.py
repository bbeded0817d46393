"""Calls that end together are committed together, and none is answered, lost or mixed up before that."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from gateway_fakes import ASK, MAIN, Desk, heard_until_killed, scripted

from inspan.gateway.transport import IN_PROCESS_URL
from inspan.trace.chains import chains
from inspan.trace.records import Rollout, Terminal
from inspan.trace.store import TraceStore


class Counting(TraceStore):
    """A store that notes which rollouts' calls shared a transaction."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.groups: list[list[str]] = []

    def commit_calls(self, records):
        self.groups.append([record.rollout for record in records])
        return super().commit_calls(records)


@pytest.fixture
def store(tmp_path):
    with Counting(tmp_path / "t.db") as store:
        yield store


def opened(desk: Desk, count: int) -> dict[str, str]:
    """More rollouts on the desk's gateway: their URLs by id, the desk's own first."""
    urls = {desk.rollout: desk.url}
    for i in range(1, count):
        urls[f"r{i}"] = IN_PROCESS_URL + desk.gateway.open(f"r{i}", roles=MAIN).base_path
    return urls


async def post(desk: Desk, url: str, **options):
    return await desk.http.post(url + "/chat/completions", json={"model": "main", "messages": ASK, **options})


async def test_calls_of_several_rollouts_that_end_together_share_a_transaction(store):
    desk = Desk(scripted("yes"), store=store)
    urls = opened(desk, 5)

    async def ask(name: str, url: str) -> int:
        answer = await post(desk, url)
        assert len(store.load(name).calls) == 1  # before the harness could read a byte
        return answer.status_code

    assert await asyncio.gather(*(ask(name, url) for name, url in urls.items())) == [200] * 5
    assert store.groups == [list(urls)]


async def test_choices_of_one_rollout_come_one_after_the_other(store):
    desk = Desk(scripted("yes", "no", "yes"), store=store)
    await post(desk, desk.url, n=3)
    trace, stored = desk.seal(), store.load("r")
    assert store.groups == [["r"]] * 3
    assert (stored.sessions, stored.nodes, stored.calls) == (trace.sessions, trace.nodes, trace.calls)
    assert len(chains(trace.sessions, trace.nodes, trace.calls)) == 3


async def test_a_call_that_the_store_refuses_touches_no_other(store):
    desk = Desk(scripted("yes"), store=store)
    urls = opened(desk, 3)
    store.finish(Rollout("r1", None, "g", 0, Terminal.CANCELLED, None, [], [], []))
    answers = await asyncio.gather(*(post(desk, url) for url in urls.values()))
    assert [answer.status_code for answer in answers] == [200, 503, 200]
    assert [desk.gateway.seal(name).complete for name in urls] == [True, False, True]


@pytest.mark.parametrize("end", ["cancel", "seal"])
async def test_a_call_that_waits_is_recorded_though_its_rollout_ends_or_its_client_goes(store, end):
    desk = Desk(scripted("yes"), store=store)
    asking = asyncio.ensure_future(post(desk, desk.url))
    while not desk.gateway._recorder._waiting:
        await asyncio.sleep(0)
    if end == "cancel":
        asking.cancel()
        await asyncio.wait({asking})
        trace = desk.seal()
    else:
        trace = desk.seal()
        assert (await asking).status_code == 200
    assert trace.complete and trace.sampled
    assert store.load("r").calls == trace.calls and [one.finish for one in trace.calls] == ["stop"]


_VICTIM = """
    import asyncio, sys
    sys.path.insert(0, sys.argv[2])
    from gateway_fakes import Desk, scripted
    from inspan.trace.store import TraceStore
    from test_recorder import opened, post

    async def talk(desk, name, url):
        while True:
            reply = await post(desk, url)
            print(name, reply.json()["id"].removeprefix("chatcmpl-"), flush=True)

    async def main():
        desk = Desk(scripted("yes"), store=TraceStore(sys.argv[1]))
        await asyncio.gather(*(talk(desk, *one) for one in opened(desk, 8).items()))

    asyncio.run(main())
"""


def test_what_was_answered_to_many_at_once_survives_kill_9(tmp_path):
    path = tmp_path / "t.db"
    heard = heard_until_killed(_VICTIM, path, 60)
    told = {tuple(line.split()) for line in heard}
    with TraceStore(path, create=False) as store:
        stored = {row.id: store.load(row.id) for row in store.rollouts()}
    assert len(stored) == 8
    assert {(name, one.id) for name, kept in stored.items() for one in kept.calls} >= told
    for kept in stored.values():
        chains(kept.sessions, kept.nodes, kept.calls)
