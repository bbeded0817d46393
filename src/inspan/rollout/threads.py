"""User functions off the event loop. Contract: whatever the function does, the loop goes on and the caller gets an end.

Each call has a daemon thread of its own, with an event loop of its own when the function is async. At most `limit` run
at once; the others wait. A call that was given up is cancelled (async) and interrupted (Python code); one that blocks
in C all the same is *hung*: it is counted, keeps no place, and dies with the process. `max_hung` of them are an
`InfrastructureError`, for then the machine, not the model, is the trouble.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import threading
from collections.abc import Callable
from typing import Any

from inspan.errors import InfrastructureError


class GivenUp(BaseException):
    """Raised inside a user's thread that was given up; a BaseException, so that `except Exception` lets it through."""


def without_leftovers(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A loop's exception handler that tells nothing of calls that were given up, nor of their clients.

    A client that a user's function left open is closed by the garbage collector, in whatever loop is running then: its
    own loop is closed, and asyncio would print a traceback for each.
    """
    error = context.get("exception")
    closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    if not closed and not isinstance(error, GivenUp):
        loop.default_exception_handler(context)


class Call:
    """One call of a user function in a thread of its own. `future` belongs to the caller's loop."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], done: Callable[[Call], None]) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._home = asyncio.get_running_loop()
        self._function, self._args, self._done = function, args, done
        self._inner: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._lock = threading.Lock()
        self._over = False
        self.thread = threading.Thread(target=self._main, name="inspan-harness", daemon=True)

    def _main(self) -> None:
        try:
            self._work()
        except GivenUp as late:  # the interrupt came when the function had just ended
            self._post(None, late)

    def _work(self) -> None:
        answer, error = None, None
        try:
            answer = self._function(*self._args)
            if inspect.isawaitable(answer):
                answer = asyncio.run(self._await(answer))
        except BaseException as raised:  # a user's sys.exit() must end its rollout only
            error = raised
        finally:
            with self._lock:
                self._over = True
        self._post(answer, error)

    def _post(self, answer: Any, error: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits any more
            self._home.call_soon_threadsafe(self._deliver, answer, error)

    async def _await(self, answer: Any) -> Any:
        asyncio.get_running_loop().set_exception_handler(without_leftovers)
        task = asyncio.ensure_future(answer)
        self._inner = (asyncio.get_running_loop(), task)
        return await task

    def _deliver(self, answer: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        self._done(self)
        if error is None:
            self.future.set_result(answer)
        elif isinstance(error, Exception):
            self.future.set_exception(error)
        else:  # a future cannot carry StopIteration, SystemExit and their like to the loop safely
            self.future.set_exception(RuntimeError(f"the harness raised {type(error).__name__}: {error}"))

    def cancel(self) -> bool:
        """Ask an async function to stop; False when there is none to ask."""
        if self._inner is None:
            return False
        loop, task = self._inner
        with contextlib.suppress(RuntimeError):  # its loop is closed already
            loop.call_soon_threadsafe(task.cancel)
        return True

    def interrupt(self) -> bool:
        """Raise `GivenUp` in the thread as soon as it runs Python code again (CPython's own means for that)."""
        with self._lock:
            if not self._over and self.thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread.ident), ctypes.py_object(GivenUp))
        return True


class Threads:
    """Starts calls, at most `limit` at once, and keeps count of the hung ones."""

    def __init__(self, limit: int = 64, max_hung: int = 256) -> None:
        self.limit, self.max_hung = limit, max_hung
        self._places = asyncio.Semaphore(limit)
        self._hung: set[Call] = set()

    @property
    def hung(self) -> int:
        """Calls that were given up and whose threads still live."""
        return len(self._hung)

    async def place(self) -> None:
        """Wait for a place, to be used by `start` or given back by `leave`."""
        await self._places.acquire()

    def leave(self) -> None:
        """Give back a place that was not used."""
        self._places.release()

    def start(self, function: Callable[..., Any], *args: Any) -> Call:
        """Start the function in the place that was waited for; its answer or error comes in `Call.future`."""
        if self.hung >= self.max_hung:
            self._places.release()
            raise InfrastructureError(
                f"{self.hung} calls of the harness hang in threads that cannot be stopped",
                hint="give the harness's own clients and commands a timeout",
            )
        home = asyncio.get_running_loop()
        if home.get_exception_handler() is None:
            home.set_exception_handler(without_leftovers)
        call = Call(function, args, self._ended)
        call.thread.start()
        return call

    def _ended(self, call: Call) -> None:
        if call in self._hung:
            self._hung.discard(call)
        else:
            self._places.release()

    async def give_up(self, call: Call, grace_s: float) -> None:
        """Stop a call: cancelled first, interrupted when that does not help, and left behind when nothing does."""
        call.future.add_done_callback(lambda future: future.cancelled() or future.exception())  # nobody else looks
        for means in (call.cancel, call.interrupt):
            if not means():
                continue
            await asyncio.wait({call.future}, timeout=grace_s)
            if call.future.done():
                return
        self._hung.add(call)
        self._places.release()
