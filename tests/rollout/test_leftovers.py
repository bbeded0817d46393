"""What a harness may leave behind harms nobody: odd characters, clients that nobody closed."""

from __future__ import annotations

import asyncio

from rollout_fakes import job, polite, runner

from inspan.rollout.threads import GivenUp, Threads, without_leftovers


async def end(harness):
    made = runner(harness)
    try:
        return await made.run(job())
    finally:
        await made.close()


async def test_lone_surrogates_in_answers_and_errors_become_characters_that_can_be_stored():
    async def answer(task, ctx):
        await polite(task, ctx)
        return "a\ud800b"

    async def crash(task, ctx):
        await polite(task, ctx)
        raise ValueError("\udfff")

    assert (await end(answer)).answer == "a\ufffdb"
    assert (await end(crash)).error == "ValueError: \ufffd"


def test_only_what_a_given_up_call_or_its_client_leaves_is_not_told():
    told, loop = [], asyncio.new_event_loop()
    loop.default_exception_handler = told.append
    for error in (RuntimeError("Event loop is closed"), GivenUp()):
        without_leftovers(loop, {"message": "never retrieved", "exception": error})
    assert not told
    for error in (RuntimeError("another"), None):
        without_leftovers(loop, {"message": "never retrieved", "exception": error})
    assert len(told) == 2
    loop.close()


async def test_the_loops_of_user_functions_and_of_their_caller_tell_no_leftovers():
    async def mine():
        return asyncio.get_running_loop().get_exception_handler()

    threads = Threads()
    await threads.place()
    assert await threads.start(mine).future is without_leftovers
    assert asyncio.get_running_loop().get_exception_handler() is without_leftovers
