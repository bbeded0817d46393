"""kill -9 at any point: what was answered is recorded, rollouts go on under their keys, and nobody can tell."""

from __future__ import annotations

import asyncio
import random
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import openai
import pytest
from durable_server import ADMIN, gateway
from gateway_fakes import ASK, MAIN, SEARCH, SWARM, Desk, call, results, returned, scripted

from inspan.gateway.base import Limits
from inspan.gateway.transport import serve
from inspan.trace.store import TraceStore

TURNS, CLIENTS = 6, 4


class Victim:
    """The server, started again on the same port whenever it has been killed."""

    def __init__(self, store: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.store, self.url, self.kills = store, f"http://127.0.0.1:{self.port}", 0

    async def start(self) -> None:
        script = str(Path(__file__).with_name("durable_server.py"))
        command = [sys.executable, script, str(self.store), str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert (await asyncio.to_thread(self.process.stdout.readline)).strip() == b"ready"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.kills += 1


async def converse(base_url: str, key: str, stream: bool, answered: list[str]) -> list[str]:
    """A conversation of some turns whose client tries again, and says so, until it has an answer."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=20)
    messages: list[dict] = list(ASK)
    heard = []
    for _ in range(TURNS):
        for attempt in range(1000):
            try:
                headers = {"x-stainless-retry-count": str(attempt)}
                reply = await ask(client, messages, stream, headers)
                break
            except (openai.APIConnectionError, httpx2.HTTPError):  # the latter in the middle of a stream
                await asyncio.sleep(0.05)
        answered.append(reply.id)
        heard.append(str(reply.choices[0].message.content))
        messages += [returned(reply), *results(reply), {"role": "user", "content": "And then?"}]
    await client.close()
    return heard


async def ask(client, messages, stream: bool, headers):
    if not stream:
        return await client.chat.completions.create(
            model="main", messages=messages, tools=[SEARCH], extra_headers=headers
        )
    async with client.chat.completions.stream(
        model="main", messages=messages, tools=[SEARCH], extra_headers=headers
    ) as events:
        return await events.get_final_completion()


def recorded(path: Path) -> dict[str, tuple]:
    with TraceStore(path, create=False) as store:
        return {row.id: tuple(store.load(row.id)) for row in store.rollouts()}


async def uninterrupted(path: Path) -> list[list[str]]:
    with TraceStore(path) as store:
        made = gateway(store)
        async with serve(made.app) as url:
            grants = [made.open(f"r{i}", roles=MAIN, seed=i) for i in range(CLIENTS)]
            talks = [converse(url + g.base_path, g.key, i % 2 == 1, []) for i, g in enumerate(grants)]
            heard = await asyncio.gather(*talks)
        await made.close()
        return heard


async def killed(path: Path, rng: random.Random, kills: int) -> tuple[list[list[str]], list[list[str]], int]:
    victim = Victim(path)
    await victim.start()
    try:
        grants = []
        async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {ADMIN}"}) as admin:
            for i in range(CLIENTS):
                body = {"id": f"r{i}", "seed": i, "roles": [{"name": "main", "policy": "policy", "trainable": True}]}
                grants.append((await admin.post(f"{victim.url}/admin/v1/rollouts", json=body)).json())
        answered: list[list[str]] = [[] for _ in grants]
        talks = [
            asyncio.ensure_future(converse(victim.url + g["base_path"], g["key"], i % 2 == 1, answered[i]))
            for i, g in enumerate(grants)
        ]
        for _ in range(kills):
            await asyncio.wait(talks, timeout=rng.uniform(0.0, 0.12))  # the point of the kill, not a synchronisation
            victim.kill()
            await victim.start()
        return await asyncio.gather(*talks), answered, victim.kills
    finally:
        victim.kill()


async def crash(tmp_path: Path, seed: int, kills: int) -> None:
    expected = await uninterrupted(tmp_path / "straight.db")
    heard, answered, count = await killed(tmp_path / "killed.db", random.Random(seed), kills)
    assert count == kills and heard == expected
    straight, broken = recorded(tmp_path / "straight.db"), recorded(tmp_path / "killed.db")
    assert broken == straight, "the records are those of a gateway that was never killed"
    for i, replies in enumerate(answered):
        assert {reply.removeprefix("chatcmpl-") for reply in replies} <= {call.id for call in broken[f"r{i}"][2]}


async def test_a_gateway_that_is_killed_again_and_again_loses_nothing_and_repeats_nothing(tmp_path):
    await crash(tmp_path, seed=0, kills=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 26))
async def test_killed_at_many_more_points(tmp_path, seed):
    await crash(tmp_path, seed, kills=6)


# ---- the same, without a process --------------------------------------------------------------------------------


class Successor(Desk):
    """A second gateway over the store of one that is no more; the harness keeps its key and URL."""

    def __init__(self, before: Desk, engine, store: TraceStore) -> None:
        super().__init__(engine, rollout=secrets.token_hex(4), store=store, durable=True)
        self.grant, self.url, self.rollout = before.grant, before.url, before.rollout


@pytest.fixture
def store(tmp_path):
    with TraceStore(tmp_path / "t.db") as made:
        yield made


async def test_a_key_goes_on_after_a_restart_with_its_roles_limits_and_what_it_has_used(store):
    before = Desk(scripted("one"), store=store, durable=True, roles=SWARM, limits=Limits(calls=2), seed=7)
    first = await before.ask(model="orchestrator")
    after = Successor(before, scripted("two"), store)
    messages = [*ASK, returned(first), {"role": "user", "content": "more"}]
    await after.ask(messages, model="orchestrator")
    with pytest.raises(openai.PermissionDeniedError, match="2 model calls are used up"):
        await after.ask(messages, model="orchestrator")
    trace = after.seal()
    assert [node.fork for node in trace.nodes if node.fork] == []
    assert {session.policy for session in trace.sessions} == {"policy"}
    assert after.engine.heard[0].prompt[: len(before.engine.heard[0].prompt)] == before.engine.heard[0].prompt


async def test_what_was_sealed_stays_sealed(store):
    before = Desk(scripted("one"), store=store, durable=True)
    await before.ask()
    before.seal()
    with pytest.raises(openai.PermissionDeniedError, match="sealed"):
        await Successor(before, scripted("two"), store).ask()


async def test_after_a_restart_a_marked_retry_gets_the_answer_that_was_lost_and_an_unmarked_one_another(store):
    before = Desk(scripted("<think>\nhm\n</think>\n\n" + call(query="a")), store=store, durable=True)
    body = {"model": "main", "messages": ASK, "tools": [SEARCH]}
    first = (await before.post(body)).json()
    after = Successor(before, scripted("two"), store)
    again = (await after.post(body, x_stainless_retry_count="1")).json()
    assert (again["id"], again["choices"], after.engine.heard) == (first["id"], first["choices"], [])
    assert again["choices"][0]["message"]["reasoning_content"] == "hm"
    assert again["usage"]["total_tokens"] == first["usage"]["total_tokens"]
    assert (await after.post(body)).json()["choices"][0]["message"]["content"] == "two"
    assert [node.fork for node in after.seal().nodes if node.fork] == ["sampled again"]


async def test_without_a_store_or_unless_it_is_durable_a_key_ends_with_its_gateway(store):
    before = Desk(scripted("one"), store=store)
    await before.ask()
    with pytest.raises(openai.AuthenticationError):
        await Successor(before, scripted("two"), store).ask()


async def test_no_key_is_on_disk(store, tmp_path):
    desk = Desk(scripted("one"), store=store, durable=True)
    await desk.ask()
    files = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert desk.grant.key.encode() not in files and b"Find it." in files
