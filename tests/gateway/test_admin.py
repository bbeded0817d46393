"""The admin API: a door of its own, with its own key."""

from __future__ import annotations

import json

import pytest
from gateway_fakes import ASK, scripted, tokenizer

from inspan.errors import InputError, StoreError
from inspan.gateway.admin import Admin
from inspan.gateway.gateway import Gateway
from inspan.gateway.render import ChatML
from inspan.gateway.transport import IN_PROCESS_URL, in_process_client, serve
from inspan.trace.export import trace_rows
from inspan.trace.records import Terminal
from inspan.trace.store import TraceStore
from inspan.train.serve import admin_key

KEY = "the admin's own key"
ROLES = {"roles": [{"name": "main", "policy": "policy", "trainable": True}]}


class Door:
    """A durable gateway behind its admin API."""

    def __init__(self, store: TraceStore) -> None:
        self.store = store
        self.gateway = Gateway(scripted("yes"), ChatML(tokenizer(), compact=True), store=store, durable=True)
        self.http = in_process_client(Admin(self.gateway, store, KEY))

    async def admin(self, method: str, path: str = "", body=None, key: str = KEY):
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
        url = f"{IN_PROCESS_URL}/admin/v1/rollouts{path}"
        return await self.http.request(method, url, content=content, headers={"authorization": f"Bearer {key}"})

    async def ask(self, grant, key: str | None = None):
        url = f"{IN_PROCESS_URL}{grant['base_path']}" if key is None else f"{IN_PROCESS_URL}/v1"
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return await self.http.post(f"{url}/chat/completions", json={"messages": ASK}, headers=headers)


@pytest.fixture
def door(tmp_path):
    with TraceStore(tmp_path / "t.db") as store:
        yield Door(store)


async def test_a_rollout_is_let_in_used_looked_at_and_sealed(door):
    made = await door.admin(
        "POST", body={"id": "one", **ROLES, "limits": {"calls": 5}, "pace": {"rate": 100.0, "burst": 10}}
    )
    assert made.status_code == 201 and made.json()["base_path"] == f"/r/{made.json()['key']}/v1"
    assert (await door.ask(made.json())).status_code == 200
    assert (await door.ask(made.json(), made.json()["key"])).status_code == 200
    assert (await door.admin("GET")).json() == {"rollouts": ["one"]}
    seen = (await door.admin("GET", "/one")).json()
    assert (seen["open"], seen["calls"], seen["forks"]) == (True, 2, 1)
    rows = [json.loads(line) for line in (await door.admin("GET", "/one/messages")).text.splitlines()]
    assert [row["role"] for row in rows] == ["system", "user", "assistant", "assistant"]
    done = await door.admin("POST", "/one/seal", {"answer": "yes"})
    assert done.status_code == 200 and done.json()["open"] is False
    assert (await door.ask(made.json())).status_code == 403
    assert (await door.admin("POST", "/one/seal")).status_code == 409
    rollout = door.store.load_rollout("one")
    assert (rollout.terminal, rollout.answer, rollout.complete) == (Terminal.COMPLETED, "yes", True)
    kept = ("tokens", "message", "logprobs", "versions")
    assert [[row[k] for k in kept] for row in trace_rows([rollout])] == [[row[k] for k in kept] for row in rows]


async def test_a_rollout_that_nobody_used_since_a_restart_can_be_sealed(door):
    made = (await door.admin("POST", body={"id": "one", **ROLES})).json()
    await door.ask(made)
    after = Door(door.store)
    assert (await after.admin("POST", "/one/seal", {"terminal": "failed"})).json()["calls"] == 1
    assert after.store.load_rollout("one").terminal is Terminal.FAILED
    assert (await after.ask(made)).status_code == 403


async def test_each_key_opens_its_own_door_only(door):
    made = (await door.admin("POST", body=ROLES)).json()
    for key in ("", "wrong", made["key"], KEY + " "):
        answer = await door.admin("GET", key=key)
        assert answer.status_code == (200 if key.strip() == KEY else 401), key
    assert (await door.ask(made, KEY)).status_code == 401
    assert (await door.http.get(f"{IN_PROCESS_URL}/admin")).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "expected"),
    [
        ("POST", "", {"roles": []}, 400, "roles"),
        ("POST", "", {}, 400, "roles"),
        ("POST", "", {**ROLES, "limit": {}}, 400, "'limit'"),
        ("POST", "", {**ROLES, "limits": {"calls": 0}}, 400, "calls"),
        ("POST", "", {**ROLES, "limits": {"cals": 1}}, 400, "cals"),
        ("POST", "", {**ROLES, "limits": 5}, 400, "limits"),
        ("POST", "", {**ROLES, "pace": {"rate": -1}}, 400, "rate"),
        ("POST", "", {**ROLES, "seed": "x"}, 400, "seed"),
        ("POST", "", {**ROLES, "sampling": {"max_tokens": 5, "top": 1}}, 400, "top"),
        ("POST", "", {**ROLES, "id": "a/b"}, 400, "no id"),
        ("POST", "", {**ROLES, "id": 5}, 400, "no id"),
        ("POST", "", {**ROLES, "default_role": "other"}, 400, "other"),
        ("POST", "", {"roles": [{"name": "a", "policy": "p", "trainable": "yes"}]}, 400, "trainable"),
        ("POST", "", {"roles": [{"name": "a", "policy": "p", "model": "("}]}, 400, "no role"),
        ("POST", "", {"roles": [5]}, 400, "no role"),
        ("POST", "", b"{", 400, "not JSON"),
        ("POST", "", b"[" * 100_000, 400, "not JSON"),
        ("POST", "", b"[]", 400, "not a JSON object"),
        ("POST", "", b" " * (1 << 20) + b"{}", 413, "longer"),
        ("GET", "/none", None, 404, "there is no rollout"),
        ("POST", "/none/seal", {}, 409, "not open"),
        ("DELETE", "", None, 404, "Not Found"),
        ("GET", "/a/b/c", None, 404, "Not Found"),
    ],
)
async def test_what_is_wrong_is_named(door, method, path, body, status, expected):
    answer = await door.admin(method, path, body)
    assert answer.status_code == status, answer.text
    assert expected in answer.text
    assert door.store.rollouts() == []


async def test_an_id_is_given_once(door):
    assert (await door.admin("POST", body={"id": "one", **ROLES})).status_code == 201
    assert (await door.admin("POST", body={"id": "one", **ROLES})).status_code in (400, 409)
    assert (await Door(door.store).admin("POST", body={"id": "one", **ROLES})).status_code == 409


async def test_a_host_that_others_can_reach_needs_a_key_that_was_chosen_for_it(door, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="can be reached from other machines"):
        async with serve(door.gateway.app, "0.0.0.0"):
            pass
    monkeypatch.delenv("INSPAN_ADMIN_KEY", raising=False)
    with pytest.raises(InputError, match="other machines"):
        admin_key(tmp_path, "0.0.0.0")
    made = admin_key(tmp_path, "127.0.0.1")
    assert made == admin_key(tmp_path, "localhost") and (tmp_path / "admin.key").stat().st_mode & 0o77 == 0
    monkeypatch.setenv("INSPAN_ADMIN_KEY", "short")
    with pytest.raises(InputError, match="5 characters"):
        admin_key(tmp_path, "0.0.0.0")
    monkeypatch.setenv("INSPAN_ADMIN_KEY", "long enough to be one")
    assert admin_key(tmp_path, "0.0.0.0") == "long enough to be one"


def test_a_store_of_the_version_before_is_taken_over(tmp_path):
    import sqlite3

    TraceStore(tmp_path / "t.db").close()
    with sqlite3.connect(tmp_path / "t.db") as db:
        db.execute("DROP TABLE grants")
        db.execute("PRAGMA user_version = 1")
    with TraceStore(tmp_path / "t.db") as store:
        store.put_grant("a", b"k", {"roles": []})
        assert store.grant(b"k") == ("a", {"roles": []}, False) and store.grant(b"l") is None
        with pytest.raises(StoreError):
            store.put_grant("a", b"m", {})
