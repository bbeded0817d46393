"""Whose call it is: sub-agents of programs that know nothing of roles, told by header, by path or by rule."""

from __future__ import annotations

import re

import httpx2
import openai
import pytest
from gateway_fakes import ASK, SUBAGENT, Desk, call, returned, scripted

from inspan.gateway.app import read_path
from inspan.gateway.base import Role
from inspan.gateway.transport import IN_PROCESS_URL

RULED = (
    Role("main", "policy", True, model=re.compile("gpt-.*")),
    Role("searcher", "policy@v0", False, system=re.compile("^You are a search agent")),
    Role("titles", "policy@v0", False, model=re.compile("small|mini"), system=re.compile("title")),
)


async def asked(desk: Desk, model: str, system: str) -> str:
    """The agent that a request was taken for."""
    await desk.ask([{"role": "system", "content": system}, ASK[1]], model=model)
    return desk.gateway._live["r"].calls[-1].session


async def test_a_request_goes_to_the_first_role_whose_rules_fit_it():
    desk = Desk(scripted("yes"), roles=RULED)
    assert await asked(desk, "gpt-9", "Be good.") == "main"
    assert await asked(desk, "other", "You are a search agent. Find it.") == "searcher"
    assert await asked(desk, "mini", "Give a title.") == "titles"
    assert await asked(desk, "searcher", "Be good.") == "searcher", "a role's own name needs no rule"
    for model, system in (("mini", "Be good."), ("other", "Are you a search agent?"), ("xgpt-9", "")):
        with pytest.raises(openai.NotFoundError, match="there is no model"):
            await asked(desk, model, system)
    frozen = {s.agent for s in desk.seal().sessions if not s.trainable}
    assert frozen == {"searcher", "titles"}


async def test_a_path_names_the_role_and_the_tool_call():
    desk = Desk(scripted(call("assign_task"), "done"), roles=RULED)
    first = await desk.ask(tools=[SUBAGENT])
    call_id = returned(first)["tool_calls"][0]["id"]
    base = IN_PROCESS_URL + desk.grant.base_path.removesuffix("/v1")
    for path, model in ((f"/as/searcher/call/{call_id}", "whatever"), (f"/call/{call_id}", "searcher")):
        client = openai.AsyncOpenAI(base_url=base + path + "/v1", api_key="x", http_client=desk.http, max_retries=0)
        await client.chat.completions.create(model=model, messages=ASK)
    trace = desk.seal()
    (child,) = [session for session in trace.sessions if session.parent]
    assert (child.agent, child.parent_call, child.trainable) == ("searcher", call_id, False)
    assert len([one for one in trace.calls if one.session == child.id]) == 2


async def test_a_path_that_names_no_role_or_no_call_is_refused():
    desk = Desk(scripted("yes"))
    base = IN_PROCESS_URL + desk.grant.base_path.removesuffix("/v1")

    async def status(path: str) -> httpx2.Response:
        return await desk.http.post(base + path + "/v1/chat/completions", json={"messages": ASK})

    assert (await status("/as/nobody")).status_code == 404
    assert (await status("/call/call_nobody")).json()["error"]["code"] == "unknown_parent_call"
    assert (await status("/with/main")).status_code == 404


@pytest.mark.parametrize("path", ["", "/", "//", "/r//v1/models", "/r/key", "/r/key/as", "/v2/models", "/r/key/x/v1/m"])
def test_other_paths_are_none_of_the_gateways(path):
    assert read_path(path) is None


async def test_unmatched_conversations_under_one_role_become_their_own_chains():
    desk = Desk(scripted("one", "two", "three"))
    first = await desk.ask([{"role": "system", "content": "A"}, ASK[1]])
    await desk.ask([{"role": "system", "content": "B"}, ASK[1]])
    await desk.ask([{"role": "system", "content": "A"}, ASK[1], returned(first), ASK[1]])
    trace = desk.seal()
    assert [node.fork for node in trace.nodes if node.fork] == ["system changed"]
    roots = {node.id for node in trace.nodes if node.parent is None}
    assert len(roots) == 2 and sum(node.sampled for node in trace.nodes) == 3
