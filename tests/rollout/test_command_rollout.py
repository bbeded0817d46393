"""An outside program in a rollout: through the gateway over a socket, and scored as any harness is."""

from __future__ import annotations

import asyncio
import sys

import pytest
from test_with_gateway import SINGLE, World

from inspan.config.command import Command
from inspan.gateway.base import Limits, Role
from inspan.rollout import load as loading
from inspan.trace.chains import trained_chains
from inspan.trace.records import Terminal

ASK = """
import json, os, sys, urllib.request
def ask(content, base=os.environ["OPENAI_BASE_URL"]):
    body = json.dumps({"model": "main", "messages": [{"role": "user", "content": content}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(base + "/chat/completions", body, headers)
    return json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]["content"]
"""


@pytest.fixture
def world(monkeypatch):
    def make(code, *, script=lambda policy, text: "Norway", roles=SINGLE, command=None, **fields):
        made = Command(argv=[sys.executable, "-c", ASK + code, "{task}"], **(command or {}))
        monkeypatch.setattr(loading, "Command", lambda: made)
        return World(script, "command", roles, **fields)

    return make


async def test_its_answer_completes_the_rollout_and_its_tokens_are_trained(world):
    rollout = await world("print(ask(sys.argv[1]))").run()
    assert (rollout.terminal, rollout.answer) == (Terminal.COMPLETED, "Norway"), rollout.error
    assert [sum(chain.trained) > 0 for chain in trained_chains(rollout)] == [True]


async def test_a_crash_after_a_sampled_token_is_a_failure_and_before_it_has_no_reward(world):
    after = await world("ask('?'); sys.exit('it broke')").run()
    assert after.terminal is Terminal.FAILED and "it broke" in after.error
    before = await world("sys.exit('it broke')").run()
    assert before.terminal is Terminal.INFRASTRUCTURE and "it broke" in before.error


async def test_a_program_that_hangs_is_out_of_time(world):
    prompts = []
    second = asyncio.Event()

    def script(policy, text):
        prompts.append(text)
        if len(prompts) == 2:  # so the first is recorded
            second.set()
        return "Norway"

    async def timer(seconds):
        await second.wait()

    rollout = await world("ask('?'); ask('!'); import time; time.sleep(300)", script=script, timer=timer).run()
    assert rollout.terminal is Terminal.TIMED_OUT and rollout.answer is None


async def test_a_program_that_floods_is_stopped_by_the_gateway(world):
    rollout = await world("while True: ask('?')", limits=Limits(critical_steps=None, calls=3)).run()
    assert rollout.terminal is Terminal.LIMIT and sum(call.finish == "stop" for call in rollout.calls) == 3


async def test_its_sub_agents_are_told_apart_by_path(world):
    roles = (Role("main", "policy", True), Role("helper", "policy@v0", False))
    code = "ask('a'); print(ask('b', os.environ['SUB']))"
    rollout = await world(code, roles=roles, command={"env": {"SUB": "{base_url:helper}"}}).run()
    assert rollout.terminal is Terminal.COMPLETED, rollout.error
    assert sorted((s.agent, s.policy, s.trainable) for s in rollout.sessions) == [
        ("helper", "policy@v0", False),
        ("main", "policy", True),
    ]
