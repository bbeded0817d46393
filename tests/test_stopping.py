"""Signals: where they come through, and where they wait."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from inspan.stopping import Terminate, finished, run_until_stopped


@pytest.mark.parametrize(("signum", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminate)])
def test_a_signal_ends_the_main_task_where_it_awaits(signum, kind):
    passed = []

    async def main():
        os.kill(os.getpid(), signum)
        passed.append("no await")
        try:
            await asyncio.Event().wait()
        finally:
            passed.append("saved")

    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt) as caught:
        run_until_stopped(main())
    assert type(caught.value) is kind and passed == ["no await", "saved"]
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before


def test_work_that_is_not_to_be_left_half_done_outlasts_several_signals():
    done = []

    async def work():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(5):
                await asyncio.sleep(0)
        done.append("whole")

    async def main():
        await finished(work())
        done.append("went on")

    with pytest.raises(Terminate):
        run_until_stopped(main())
    assert done == ["whole"]


def test_what_fails_while_it_is_stopped_is_told():
    async def main():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        run_until_stopped(main())


async def test_work_that_ends_in_time_gives_its_result_or_its_error():
    async def work(answer):
        await asyncio.sleep(0)
        return 1 / answer

    assert await finished(work(2)) == 0.5
    with pytest.raises(ZeroDivisionError):
        await finished(work(0))


def test_a_result_that_came_before_the_signal_counts():
    async def main():
        os.kill(os.getpid(), signal.SIGINT)
        return 7

    assert run_until_stopped(main()) == 7
