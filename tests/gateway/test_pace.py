"""Limits of a key: how often, how much at once, how long a body, how many tokens."""

from __future__ import annotations

import asyncio
import logging

import openai
import pytest
from gateway_fakes import ASK, Desk, SlowEngine, scripted
from hypothesis import given
from hypothesis import strategies as st

from inspan.errors import InputError, RequestError
from inspan.gateway.pace import Meter, Pace

STEPS = st.lists(st.floats(0, 3), min_size=1, max_size=40)


@given(rate=st.floats(0.1, 20), burst=st.integers(1, 8), steps=STEPS)
def test_in_no_window_are_there_more_requests_than_the_burst_and_what_the_rate_gives(rate, burst, steps):
    meter, now, taken = Meter(Pace(rate=rate, burst=burst)), 0.0, []
    for step in steps:
        now += step
        try:
            meter.begin(now)
            taken.append(now)
        except RequestError as error:
            assert error.status == 429 and error.retry_after > 0
            Meter(Pace(rate=rate, burst=burst), 0, meter._level, meter._at).begin(now + error.retry_after + 1e-6)
    for i, first in enumerate(taken):
        for j in range(i, len(taken)):
            assert j - i + 1 <= burst + rate * (taken[j] - first) + 1e-6


def test_a_clock_that_goes_back_gives_nothing_away():
    meter = Meter(Pace(rate=1.0))
    meter.begin(10.0)
    for now in (9.0, 10.5):
        with pytest.raises(RequestError):
            meter.begin(now)
    meter.begin(11.0)


@pytest.mark.parametrize(
    "wrong", [{"rate": 0}, {"burst": 0}, {"concurrent": 1.5}, {"body": True}, {"rate": float("inf")}]
)
def test_limits_that_are_none_are_refused(wrong):
    with pytest.raises(InputError, match="pace"):
        Pace(**wrong)


async def test_a_key_that_asks_too_often_is_told_when_to_try_again_in_each_dialect():
    now = [0.0]
    desk = Desk(scripted("yes"), pace=Pace(rate=0.25, burst=1), monotonic=lambda: now[0])
    await desk.ask()
    for path, body, kind in (
        ("/chat/completions", {"model": "main", "messages": ASK}, "rate_limit_exceeded"),
        ("/responses", {"model": "main", "input": "hi"}, "rate_limit_exceeded"),
        ("/messages", {"model": "main", "max_tokens": 9, "messages": [ASK[1]]}, "rate_limit_error"),
    ):
        answer = await desk.post(body, path)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "4"), answer.text
        assert kind in (answer.json()["error"]["type"], answer.json()["error"].get("code"))
    now[0] = 4.0
    await desk.ask()
    assert len(desk.seal().calls) == 2


async def test_requests_of_one_key_at_once_are_counted():
    engine = SlowEngine("yes")
    desk = Desk(engine, pace=Pace(concurrent=1))
    running = asyncio.ensure_future(desk.ask())
    await engine.started.wait()
    with pytest.raises(openai.RateLimitError, match="1 requests of this key are running, of 1 that may"):
        await desk.ask()
    for _ in engine.tokens:
        engine.step.release()
    await running
    for _ in engine.tokens:
        engine.step.release()
    await desk.ask()


async def test_bodies_and_sampled_tokens_have_limits_of_their_own():
    desk = Desk(scripted("see see see see"), pace=Pace(body=300, sampled=5))
    assert (await desk.post({"model": "main", "messages": [{"role": "user", "content": "x" * 300}]})).status_code == 413
    assert (await desk.ask()).usage.completion_tokens == 5
    with pytest.raises(openai.PermissionDeniedError, match="5 sampled tokens are used up"):
        await desk.ask()
    assert desk.seal().limit_hit == "sampled"


async def test_neither_keys_nor_what_is_said_are_logged(caplog):
    caplog.set_level(logging.DEBUG)
    desk = Desk(scripted("a secret answer", RuntimeError("engine down")))
    await desk.ask()
    await desk.post(b'{"model": "main", "messages": [{"role": "user", "content": "a secret question"')
    with pytest.raises(openai.InternalServerError):
        await desk.ask()
    ours = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith(("inspan", "uvicorn")))
    assert "engine" in ours and desk.grant.key not in ours and "secret" not in ours
