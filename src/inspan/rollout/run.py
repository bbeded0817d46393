"""Run one rollout. Contract: one job in, one `Rollout` out, in the one terminal state that fits how it ended.

A fault that the engine, the gateway or a sandbox reports is infrastructure, and so is a rollout in which nothing was
ever sampled. Once the model has sampled a token, an exception, a hang or a timeout of the harness is a failure that is
scored, or else the model would learn to break what it is about to fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import httpx2

from inspan.engine.base import SamplingParams
from inspan.errors import InfrastructureError, LimitExceeded
from inspan.gateway.base import Grant, Limits, Role, Trace
from inspan.gateway.transport import IN_PROCESS_URL, in_process_client, serve
from inspan.harness.base import Context, Endpoint, Toolbox
from inspan.parity.watch import Watch
from inspan.rollout.load import LoadedHarness
from inspan.rollout.threads import Call, Threads
from inspan.tasks.base import Task
from inspan.trace.records import Rollout, Terminal, ToolEvent

log = logging.getLogger("inspan.rollout")

GRACE_S = 1.0  # how long a harness that was told to stop may take, real time
MAX_ERROR = 500  # characters of an error that are kept

_TOLD = {
    Terminal.FAILED: "the harness failed",
    Terminal.TIMED_OUT: "the harness ran out of time",
    Terminal.INFRASTRUCTURE: "no reward",
}

MakeTools = Callable[[Task, int, Callable[[ToolEvent], None]], Toolbox | None]
"""The environment's tools for one rollout: its task, a seed, and where to record what they do."""


@dataclass(frozen=True, slots=True)
class RolloutJob:
    """What to run. `id` is unique in the run, attempts included; `seed` decides all that is drawn in the rollout."""

    id: str
    task: Task
    group: str
    member: int
    attempt: int
    seed: int


@dataclass(frozen=True, slots=True)
class Ending:
    """How the harness ended, before anything is known of the trace."""

    how: Literal["answer", "raised", "timeout", "cancelled"]
    answer: object = None
    error: BaseException | None = None


class GatewayDoor(Protocol):
    """What a runner needs of the gateway."""

    @property
    def app(self) -> Any:
        """The ASGI application."""
        ...

    def open(
        self,
        rollout: str,
        *,
        roles: Sequence[Role],
        limits: Limits,
        seed: int,
        sampling: SamplingParams,
        default_role: str,
        watch: Watch | None = None,
    ) -> Grant:
        """Let a rollout in; `watch` looks at what it shows the model."""
        ...

    def seal(self, rollout: str) -> Trace:
        """Let no more calls in; what was recorded."""
        ...


@dataclass(slots=True)
class Runner:
    """All that the rollouts of a run share. `roles` and `limits` may be replaced between rollouts (stages).

    Raises `ParityError` when `watch` refuses what the harness shows the model.

    The first role is the one of the root session. `timer(seconds)` returns when the time is over.
    """

    gateway: GatewayDoor
    harness: LoadedHarness
    roles: Sequence[Role]
    limits: Limits
    sampling: SamplingParams
    timeout_s: float
    watch: Watch | None = None  # looks at what the harness shows the model
    make_tools: MakeTools | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[Rollout], None] | None = None  # looks at every rollout that ran
    version: Callable[[], int] = lambda: 0
    base_url: str | None = None  # of the gateway on a socket; None: a loopback server is started when needed
    threads: Threads = field(default_factory=Threads)
    clock: Callable[[], float] = time.monotonic
    timer: Callable[[float], Awaitable[object]] = asyncio.sleep
    failures: Counter[Terminal] = field(default_factory=Counter[Terminal])
    _client: httpx2.AsyncClient | None = None
    _served: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    _url: str | None = None
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(
        self, job: RolloutJob, *, cancel: asyncio.Event | None = None, started: Callable[[], None] | None = None
    ) -> Rollout:
        """Run a job to its end. `cancel` ends it early, as CANCELLED; `started` is called when the harness begins."""
        before, version = self.clock(), self.version()
        events: list[ToolEvent] = []
        try:
            grant = self.gateway.open(
                job.id,
                roles=self.roles,
                limits=self.limits,
                seed=job.seed,
                sampling=self.sampling,
                default_role=self.roles[0].name,
                watch=self.watch,
            )
        except InfrastructureError as error:
            return self.lost(job, error)
        try:
            context = await self._context(job, grant, events)
            ending = await self._race(job.task, context, cancel, started)
        except InfrastructureError as error:
            ending = Ending("raised", error=error)
        except BaseException:
            self.gateway.seal(job.id)
            raise
        trace = self.gateway.seal(job.id)
        if self.watch is not None:
            self.watch.demand()
        terminal, error = classify(ending, trace)
        self._tell(job, terminal, error)
        rollout = Rollout(
            id=job.id,
            task=job.task,
            group=job.group,
            member=job.member,
            terminal=terminal,
            answer=_storable(ending.answer) if isinstance(ending.answer, str) else None,
            sessions=trace.sessions,
            nodes=trace.nodes,
            calls=trace.calls,
            tool_events=list(events),
            attempt=job.attempt,
            complete=trace.complete,
            error=None if error is None else _storable(error),
            fingerprint=self.fingerprint,
            version_started=version,
            version_finished=self.version(),
        )
        rollout.metrics = {"wall_s": self.clock() - before, "sampled_tokens": float(sampled_tokens(rollout))}
        if self.check is not None:
            self.check(rollout)
        return rollout

    def _tell(self, job: RolloutJob, terminal: Terminal, error: str | None) -> None:
        """Log the first failure of each kind."""
        what = _TOLD.get(terminal)
        if what is None:
            return
        self.failures[terminal] += 1
        if self.failures[terminal] == 1:
            log.warning("%s on rollout %s: %s; further ones are counted only", what, job.id, error)

    @property
    def fingerprint(self) -> str:
        """The id of the fingerprint as it is now, "" when nobody watches."""
        return self.watch.id if self.watch is not None else ""

    def lost(self, job: RolloutJob, error: BaseException) -> Rollout:
        """The rollout of a job that never came to run."""
        return lost_rollout(job, error, version=self.version(), fingerprint=self.fingerprint)

    async def close(self) -> None:
        """Close the clients and the loopback server."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None
        await self._served.aclose()
        self._url = None

    async def _context(self, job: RolloutJob, grant: Grant, events: list[ToolEvent]) -> Context:
        tools = self.make_tools(job.task, job.seed, events.append) if self.make_tools else None
        client = None
        if self.harness.socket:
            base = await self._socket()
        else:
            base, client = IN_PROCESS_URL, self._in_process()
        if not self.harness.on_loop:
            tools = _Bridge(tools, asyncio.get_running_loop()) if tools else None
        url = base + grant.base_path
        endpoints = {role.name: Endpoint(url, grant.key, role.name, client) for role in self.roles}
        return Context(
            endpoints,
            tools=tools,
            budget=self.limits.critical_steps,
            max_tokens=self.sampling.max_tokens,
            options={"width": self.limits.width, **self.options} if self.limits.width else self.options,
            events=events,
        )

    def _in_process(self) -> httpx2.AsyncClient:
        if self._client is None:
            self._client = in_process_client(self.gateway.app)
        return self._client

    async def _socket(self) -> str:
        if self.base_url is not None:
            return self.base_url.rstrip("/")
        async with self._opening:
            if self._url is None:
                self._url = await self._served.enter_async_context(serve(self.gateway.app))
        return self._url

    async def _race(
        self, task: Task, context: Context, cancel: asyncio.Event | None, started: Callable[[], None] | None
    ) -> Ending:
        """The harness against its time and against `cancel`; the loser is stopped."""
        call: Call | None = None
        if self.harness.on_loop:
            work: asyncio.Future[Any] = asyncio.ensure_future(_guarded(self.harness.run, task, context))
        else:
            await self.threads.place()
            if cancel is not None and cancel.is_set():
                self.threads.leave()
                return Ending("cancelled")
            call = self.threads.start(self.harness.run, task, context)
            work = call.future
        if started is not None:
            started()
        timer = asyncio.ensure_future(self.timer(self.timeout_s))
        rivals: set[asyncio.Future[Any]] = {work, timer}
        if cancel is not None:
            rivals.add(asyncio.ensure_future(cancel.wait()))
        if self.watch is not None:  # a program may try again for long
            rivals.add(asyncio.ensure_future(self.watch.refused()))
        try:
            await asyncio.wait(rivals, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return _ending(work)
            return Ending("timeout" if timer.done() else "cancelled")
        finally:
            for rival in rivals - {work}:
                rival.cancel()
            if not work.done():
                await self._stop(work, call)

    async def _stop(self, work: asyncio.Future[Any], call: Call | None) -> None:
        if call is not None:
            await self.threads.give_up(call, GRACE_S)
            return
        work.cancel()
        await asyncio.wait({work}, timeout=GRACE_S)
        if work.done() and not work.cancelled():
            work.exception()  # seen


async def _guarded(run: Callable[..., Awaitable[Any]], task: Task, context: Context) -> Any:
    """A harness on the loop must not end the process by `sys.exit()`."""
    try:
        return await run(task, context)
    except SystemExit as error:
        raise RuntimeError(f"the harness raised SystemExit: {error}") from error


def _ending(work: asyncio.Future[Any]) -> Ending:
    if work.cancelled():
        return Ending("raised", error=asyncio.CancelledError("the harness cancelled itself"))
    error = work.exception()
    return Ending("answer", answer=work.result()) if error is None else Ending("raised", error=error)


class _Bridge:
    """The environment's tools for a harness in another thread: they run on the loop they belong to."""

    def __init__(self, tools: Toolbox, home: asyncio.AbstractEventLoop) -> None:
        self._tools, self._home = tools, home

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI function schemas."""
        return self._tools.schemas

    async def call(self, name: str, arguments: Mapping[str, Any], *, call_id: str, session: str = "") -> str:
        """Run a tool on the home loop."""
        asked = self._tools.call(name, arguments, call_id=call_id, session=session)

        async def run() -> str:
            return await asked

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._home))


def classify(ending: Ending, trace: Trace) -> tuple[Terminal, str | None]:
    """The terminal state, and what to tell of it.

    In order: cancelled; a fault of the infrastructure; nothing sampled; an answer; out of time; out of budget; failed.
    An answer counts although a budget was hit on the way (a sub-agent's, say), and any reason to end is a failure of
    the harness unless the budget was its cause.
    """
    if ending.how == "cancelled":
        return Terminal.CANCELLED, None
    fault = trace.fault or _infrastructure(ending.error)
    if fault:
        return Terminal.INFRASTRUCTURE, str(fault)[:MAX_ERROR]
    said = _tell(ending)
    if not trace.sampled and all(call.node is None for call in trace.calls):
        return Terminal.INFRASTRUCTURE, f"nothing was sampled; {said or 'the harness made no model call'}"[:MAX_ERROR]
    if ending.how == "answer" and isinstance(ending.answer, str):
        return Terminal.COMPLETED, None
    if ending.how == "timeout":
        return Terminal.TIMED_OUT, said
    if trace.limit_hit or any(isinstance(error, LimitExceeded) for error in _causes(ending.error)):
        return Terminal.LIMIT, said
    return Terminal.FAILED, said


def _storable(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which Python strings can hold and UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _tell(ending: Ending) -> str | None:
    if ending.how == "timeout":
        return "the harness ran out of time"
    if ending.error is not None:
        return f"{type(ending.error).__name__}: {ending.error}"[:MAX_ERROR]
    if not isinstance(ending.answer, str):
        return f"the harness returned {type(ending.answer).__name__}, not str"
    return None


def _infrastructure(error: BaseException | None) -> InfrastructureError | None:
    return next((e for e in _causes(error) if isinstance(e, InfrastructureError)), None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it was raised from or during, and the members of groups, each once."""
    seen: set[int] = set()
    stack = [error]
    while stack:
        one = stack.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        stack += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            stack += one.exceptions


def sampled_tokens(rollout: Rollout) -> int:
    """How many tokens the model sampled in a rollout, each once."""
    return sum(len(node.tokens) - node.start for node in rollout.nodes)


def lost_rollout(job: RolloutJob, error: BaseException, *, version: int = 0, fingerprint: str = "") -> Rollout:
    """The INFRASTRUCTURE rollout of a job of which no trace is left."""
    return Rollout(
        id=job.id,
        task=job.task,
        group=job.group,
        member=job.member,
        terminal=Terminal.INFRASTRUCTURE,
        answer=None,
        sessions=[],
        nodes=[],
        calls=[],
        attempt=job.attempt,
        complete=False,
        error=f"{type(error).__name__}: {error}"[:MAX_ERROR],
        fingerprint=fingerprint,
        version_started=version,
        version_finished=version,
    )
