"""What the gateway sees of a harness: clients, prompts and tools in every dialect, and what a guard refuses."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_fakes import ASK, SUBAGENT, Desk, returned, scripted
from hypothesis import given
from hypothesis import strategies as st
from speakers import NAMES, SPEAKERS

from inspan.errors import ParityError
from inspan.gateway.base import Role
from inspan.gateway.faces import WRITTEN, client_name, without_written
from inspan.gateway.render import format_call
from inspan.parity.face import tool_name
from inspan.parity.fingerprint import Fingerprint
from inspan.parity.watch import Guard, Learning
from inspan.trace.records import Call, ToolCall


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("codex_cli_rs/0.60.1 (Ubuntu 22.4.0; x86_64) xterm", "codex_cli_rs/0.60.1"),
        ("claude-cli/2.0.14 (external, cli)", "claude-cli/2.0.14"),
        ("AsyncOpenAI/Python 3.57.0", ""),
        ("Anthropic/JS 0.61.2", ""),
        ("python-httpx/0.28.1", ""),
        ("python-httpx2/2.16.2", ""),
        ("nodeagent/1.0", "nodeagent/1.0"),
        ("Agents/Python 0.24.0", "Agents/Python 0.24.0"),
        ("", ""),
    ],
)
def test_clients_by_their_user_agent(header: str, name: str) -> None:
    assert client_name(header) == name


def wrote(*arguments: str) -> list[Call]:
    return [Call("c", "s", 0, None, None, "tool_calls", tuple(ToolCall("t", "f", text) for text in arguments))]


@pytest.mark.parametrize(
    ("system", "arguments", "left"),
    [
        ("Look it up.", '{"system_prompt": "Look it up."}', WRITTEN),
        ("You are a sub-agent.\nGoal: find the capital", '{"a": {"b": ["find the capital"]}}',
         f"You are a sub-agent.\nGoal: {WRITTEN}"),
        ("You are a sub-agent.", '{"prompt": "are"}', "You are a sub-agent."),
        ("You are a sub-agent.", '{"prompt": ', "You are a sub-agent."),
        ("", '{"prompt": ""}', ""),
    ],
)  # fmt: skip
def test_what_a_model_wrote_of_a_sub_agents_prompt_is_left_out(system: str, arguments: str, left: str) -> None:
    assert without_written(system, wrote(arguments)) == left


@given(st.text(max_size=40), st.text(max_size=40))
def test_what_nobody_wrote_is_kept(system: str, other: str) -> None:
    assert without_written(system, wrote()) == system
    assert other in without_written(system + other, wrote('{"x": 1}'))


RULED = (Role("main", "policy", True), Role("searcher", "policy@v0", False))
SETTING = {"harness": "h", "version": "v", "renderer": {}, "limits": {}}
SYSTEM = "Be good. Today is 2026-12-01, your directory is /tmp/tmp{}/work."


async def shown(*bodies: Any, path: str, watch: Learning) -> None:
    """Make requests, each in a rollout of its own."""
    for at, body in enumerate(bodies):
        desk = Desk(scripted("yes"), rollout=str(at), watch=watch)
        answer = await desk.post(body, path, user_agent="agent/1.0 (linux)")
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("speaker", SPEAKERS, ids=NAMES)
async def test_every_dialect_shows_its_prompt_tools_and_sampling(speaker: Any) -> None:
    watch = Learning(Fingerprint(SETTING))
    history = [("system", SYSTEM.format("ab")), ("user", "Who?")]
    body = speaker.body(history, temperature=0.5)
    other = speaker.body(
        [("system", SYSTEM.format("cd").replace("12-01", "12-02")), ("user", "What?")], temperature=0.5
    )
    await shown(body, body, other, path=speaker.path, watch=watch)
    (face,) = watch.fingerprint.roles["main"]
    assert face.system == "Be good. Today is ⟨date⟩, your directory is ⟨path⟩."
    assert (face.dialect, face.client) == (NAMES[SPEAKERS.index(speaker)], "agent/1.0")
    assert face.sampling["temperature"] == ("0.5",) and "model" not in face.sampling
    assert [tool_name(tool) for tool in face.tools] == ["search"]


@pytest.mark.parametrize("speaker", SPEAKERS, ids=NAMES)
async def test_what_the_training_did_not_show_is_refused_in_the_dialects_own_shape(speaker: Any) -> None:
    watch = Learning(Fingerprint(SETTING))
    history = [("system", "Be good."), ("user", "Who?")]
    await shown(speaker.body(history), path=speaker.path, watch=watch)
    guard = Guard(watch.fingerprint, SETTING)
    desk = Desk(scripted("yes"), watch=guard)
    for stream in (False, True):
        bad = speaker.body([("system", "Be bad."), ("user", "Who?")], stream=stream)
        refused = await desk.post(bad, speaker.path, user_agent="agent/1.0 (mac)")
        assert refused.status_code == 409 and "+Be bad." in refused.json()["error"]["message"]
    assert (await desk.post(speaker.body(history), speaker.path, user_agent="agent/1.0 (mac)")).status_code == 200
    assert len(desk.seal().calls) == 1, "what is refused is not recorded"
    with pytest.raises(ParityError, match="Be bad"):
        guard.demand()


async def test_later_turns_of_a_conversation_by_id_show_nothing_new() -> None:
    watch = Learning(Fingerprint(SETTING))
    desk = Desk(scripted("yes", "and"), watch=watch)
    first = await desk.post({"input": [{"role": "system", "content": "Be good."}, {"role": "user", "content": "a"}]},
                            "/responses")  # fmt: skip
    again = await desk.post({"input": "b", "previous_response_id": first.json()["id"]}, "/responses")
    assert again.status_code == 200
    assert [face.system for face in watch.fingerprint.roles["main"]] == ["Be good."]


async def test_a_sub_agents_prompt_that_the_model_wrote_is_no_difference() -> None:
    watch = Learning(Fingerprint(SETTING))
    for prompt in ("You look up capitals.", "You add numbers."):
        desk = Desk(scripted(format_call("assign_task", f'{{"prompt": "{prompt}"}}'), "done"), roles=RULED, watch=watch)
        reply = await desk.ask(tools=[SUBAGENT])
        parent = returned(reply)["tool_calls"][0]["id"]
        await desk.ask([{"role": "system", "content": prompt}, ASK[1]], parent=parent, model="searcher")
    assert [face.system for face in watch.fingerprint.roles["searcher"]] == [WRITTEN]
