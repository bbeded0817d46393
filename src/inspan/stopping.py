"""Running until a signal says stop. Contract: no signal comes in the middle of a step; what is being saved is saved.

Ctrl-C and SIGTERM cancel the main task where it next awaits. Each further one cancels what it does to end, but neither
code without an `await` nor what runs within `finished`.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminate(KeyboardInterrupt):
    """SIGTERM, raised where Ctrl-C would be, so that both end a run in the same orderly way."""


def run_until_stopped(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, for which the first signal becomes a `KeyboardInterrupt` or `Terminate` once `main` has ended."""
    if threading.current_thread() is not threading.main_thread():  # no signal comes here
        return asyncio.run(main)
    caught: list[int] = []
    cancelled = False

    async def governed() -> T | None:
        nonlocal cancelled
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(signum: int) -> None:
            caught.append(signum)
            task.cancel()

        for one in SIGNALS:
            loop.add_signal_handler(one, stop, one)
        try:
            return await main
        except asyncio.CancelledError:
            if not caught:
                raise
            cancelled = True
            return None

    before = [signal.getsignal(one) for one in SIGNALS]
    try:
        result = asyncio.run(governed())
    finally:
        for one, handler in zip(SIGNALS, before, strict=True):
            signal.signal(one, handler)
    if cancelled:
        raise Terminate if caught[0] == signal.SIGTERM else KeyboardInterrupt
    return result  # type: ignore[return-value]


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """Await work that is not to be left half done: a cancellation is raised only after its end."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.done():
                break
            cancelled = error
        except Exception:
            break  # raised below
    if cancelled is None:
        return task.result()
    task.result()  # its own fault goes first
    raise cancelled
