"""Groups of rollouts, dispatched and handed out. Contract: see `states.Ledger`, which decides; this carries it out.

Sync mode: `collect(n)` opens n groups, waits for all of them and returns them; nothing runs between two collects. With
`partial` it goes on with the groups that finished first: long ones run on, under new weights, into the next collect.
Async mode: `concurrency` rollouts are kept in flight all the while; finished groups wait for `collect`; how far they
may be ahead of the learner is bounded by `max_staleness`. `advance(version)` tells that the collected groups are
trained; until then they belong to the state, and a restart hands them out again. What was in flight is run anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from inspan.errors import CheckpointError, InfrastructureError, InspanError
from inspan.rollout.executor import Executor
from inspan.rollout.meter import DroppedRollout, Meter
from inspan.rollout.records import dump_rollout, dump_task, load_rollout, load_task
from inspan.rollout.run import RolloutJob, lost_rollout
from inspan.rollout.states import GroupPhase, GroupState, Ledger, Stale, Ticket, Verdict
from inspan.tasks.base import Task
from inspan.trace.records import Rollout, Terminal
from inspan.trace.store import TraceStore


@dataclass(slots=True)
class Group:
    """The rollouts of one task, in the order of their members.

    `version` is the one it was opened at, `staleness` how many versions later its batch is trained.
    """

    id: str
    task: Task
    visit: int
    version: int
    staleness: int
    rollouts: list[Rollout]


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """How to dispatch: `groups` an update, `group_size` rollouts each; the rest as in the recipe's `[rollout]`."""

    groups: int
    group_size: int
    mode: Literal["sync", "async"] = "sync"
    concurrency: int = 64
    retries: int = 2
    max_staleness: int = 1
    stale: Stale = "wait"
    partial: bool = False
    deterministic: bool = False

    def ledger(self, version: int) -> Ledger:
        """A fresh ledger. Sync without `partial` is staleness 0: what is opened at a version is trained at it."""
        staleness = self.max_staleness
        if self.mode == "sync":
            staleness = max(1, staleness) if self.partial else 0
        return Ledger(
            batch=self.groups,
            group_size=self.group_size,
            concurrency=self.concurrency,
            max_staleness=staleness,
            stale=self.stale,
            retries=self.retries,
            lockstep=self.deterministic,
            version=version,
        )


@dataclass(slots=True)
class _Flight:
    ticket: Ticket
    job: RolloutJob
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Dispatcher:
    """Runs groups of tasks from `source` (None: no more) on an executor.

    `store` gets every rollout's terminal state. `reward_of` is asked only for the log of dropped rollouts. Ids begin
    with `prefix`; `life` sets those of a restarted run apart from those it used before (`next_life`).
    """

    executor: Executor
    source: Callable[[], Task | None]
    settings: DispatchSettings
    seed: int = 0
    version: int = 0
    store: TraceStore | None = None
    reward_of: Callable[[Rollout], float | None] | None = None
    on_rollout: Callable[[Rollout], None] | None = None
    clock: Callable[[], float] = time.monotonic
    prefix: str = ""
    life: int = 0
    ledger: Ledger = field(init=False)
    meter: Meter = field(init=False)
    _tasks: dict[str, Task] = field(init=False, default_factory=dict)
    _rollouts: dict[str, dict[int, Rollout]] = field(init=False, default_factory=dict)
    _flights: dict[str, _Flight] = field(init=False, default_factory=dict)
    _changed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _open: bool = field(init=False, default=False)
    _exhausted: bool = field(init=False, default=False)
    _failure: Exception | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.ledger = self.settings.ledger(self.version)
        self.meter = Meter(self.clock)

    # ---- the learner's side ----------------------------------------------------------------------------------------

    async def collect(self, groups: int | None = None) -> list[Group]:
        """The next batch of finished groups, in the order they were opened; fewer when no more tasks come.

        `groups` may differ from the settings in plain sync mode only. Raises InfrastructureError when not one rollout
        of the batch could be scored, StoreError when the store fails, and whatever the task source raises.
        """
        self._begin(groups)
        try:
            while True:
                self._pump()
                if self._failure is not None:
                    raise self._failure
                taken = self.ledger.take(flush=self._exhausted)
                if taken is not None:
                    break
                if self.ledger.blocked():
                    raise RuntimeError("call advance(version) after each update: the staleness bound allows no more")
                self._changed.clear()
                await self._changed.wait()
        finally:
            if self.settings.mode == "sync":
                self.pause()
        self._pump()
        batch = [self._hand_out(group) for group in taken]
        self._alarm(batch)
        return batch

    def advance(self, version: int, groups: list[str] | None = None) -> list[DroppedRollout]:
        """The policy has a new version (or the same, if the update was skipped); the collected groups are done with.

        `groups` names them by id when a batch that was collected ahead is not among them.

        Returns the rollouts of groups that were dropped as too stale and had ended; those still running are cancelled
        and appear in `meter.dropped` as they end.
        """
        taken = [g.id for g in self.ledger.groups.values() if g.phase is GroupPhase.TAKEN]
        named = None if groups is None else [name.removeprefix(self.prefix) for name in groups]
        dropped = self.ledger.advance(version, named)
        for name in taken:
            if name not in self.ledger.groups:
                self._forget(name)
        logged: list[DroppedRollout] = []
        for group in dropped:
            logged += self._drop(group)
        self._pump()
        return logged

    def start(self) -> None:
        """Open and dispatch rollouts from now on (async mode does so at the first `collect`)."""
        self._open = True
        self._pump()

    def pause(self) -> None:
        """Dispatch nothing more until `start` or `collect`; what is in flight goes on."""
        self._open = False

    async def close(self) -> None:
        """Cancel what is in flight and wait for it to end. `state()` still holds it, to be run anew."""
        self.pause()
        self.ledger.shutdown()
        flights = [flight.task for flight in self._flights.values() if flight.task is not None]
        for flight in list(self._flights.values()):
            self.executor.cancel(flight.job.id)
        if flights:
            await asyncio.wait(flights)

    # ---- keeping -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The ledger, with the tasks and the finished rollouts of all groups that are not yet trained, as JSON."""
        ledger = self.ledger.state()
        names = [entry[0] for entry in ledger["groups"]]
        rollouts = {n: [dump_rollout(r) for _, r in sorted(self._rollouts.get(n, {}).items())] for n in names}
        return {"ledger": ledger, "tasks": {n: dump_task(self._tasks[n]) for n in names}, "rollouts": rollouts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a `state()` before the first `collect`."""
        try:
            ledger, tasks, rollouts = state["ledger"], state["tasks"], state["rollouts"]
        except KeyError as error:
            raise CheckpointError(f"the dispatcher's state lacks {error}") from error
        self.ledger.restore(ledger)
        self._tasks = {name: load_task(task) for name, task in tasks.items()}
        for name, members in rollouts.items():
            for rollout in map(load_rollout, members):
                rollout.task = self._tasks[name]
                self._rollouts.setdefault(name, {})[rollout.member] = rollout
        for group in self.ledger.groups.values():
            ended = sum(member.terminal is not None for member in group.members)
            if group.id not in self._tasks or ended != len(self._rollouts.get(group.id, {})):
                raise CheckpointError(f"the dispatcher's state lacks rollouts of group {group.id}")

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _begin(self, groups: int | None) -> None:
        plain = self.settings.mode == "sync" and not self.settings.partial
        wanted = self.settings.groups if groups is None else groups
        if not plain and wanted != self.settings.groups:
            raise ValueError(f"collect({groups}): only plain sync mode may differ from {self.settings.groups} groups")
        if plain:
            self.ledger.batch = wanted
        if self.settings.mode == "sync":
            for name in self.ledger.confirm():
                self._forget(name)
        self._open = True

    def _pump(self) -> None:
        """Dispatch as much as the ledger allows."""
        while self._open and self._failure is None:
            ticket = self.ledger.dispatch()
            if ticket is not None:
                self._launch(ticket)
            elif self._exhausted or not self.ledger.may_open() or not self._open_group():
                return

    def _open_group(self) -> bool:
        try:
            task = self.source()
        except Exception as error:
            self._fail(error)
            raise
        if task is None:
            self._exhausted = True
            self._changed.set()
            return False
        group = self.ledger.open(task.id)
        self._tasks[group.id] = task
        self.meter.opened(group.id)
        return True

    def _launch(self, ticket: Ticket) -> None:
        task = self._tasks[ticket.group]
        seed = member_seed(self.seed, ticket.task, ticket.visit, ticket.member)
        name = self.prefix + (f"{ticket.id}~{self.life}" if self.life else ticket.id)
        job = RolloutJob(name, task, self.prefix + ticket.group, ticket.member, ticket.attempt, seed)
        self._flights[job.id] = flight = _Flight(ticket, job)
        self.meter.dispatched(ticket.group)
        flight.task = asyncio.create_task(self._fly(flight), name=f"flight {job.id}")

    async def _fly(self, flight: _Flight) -> None:
        try:
            rollout = await self.executor.submit(flight.job, partial(self.ledger.started, flight.ticket))
        except InspanError as error:
            if not isinstance(error, InfrastructureError):
                return self._fail(error)
            rollout = lost_rollout(flight.job, error, version=self.ledger.version)
        except Exception as error:
            return self._fail(error)
        finally:
            self._flights.pop(flight.job.id, None)
        try:
            self._landed(flight.ticket, rollout)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """What is no rollout's fault ends the run: `collect` raises it."""
        self._failure = self._failure or error
        self._changed.set()

    def _landed(self, ticket: Ticket, rollout: Rollout) -> None:
        group = self.ledger.groups.get(ticket.group)
        dropped = group is not None and group.phase is GroupPhase.DROPPED
        verdict = self.ledger.finish(ticket, rollout.terminal)
        if verdict is Verdict.IGNORED:
            return
        if self.store is not None:
            self.store.finish(rollout)
        self.meter.landed(rollout, retried=verdict is not Verdict.EMIT)
        if verdict is Verdict.EMIT:
            if self.on_rollout is not None:
                self.on_rollout(rollout)
            if dropped:
                self.meter.drop(rollout, self._reward(rollout))
                if ticket.group not in self.ledger.groups:
                    self._forget(ticket.group)
            else:
                self._rollouts.setdefault(ticket.group, {})[ticket.member] = rollout
        self._pump()
        self._changed.set()

    def _drop(self, group: GroupState) -> list[DroppedRollout]:
        for flight in list(self._flights.values()):
            if flight.ticket.group == group.id:
                self.executor.cancel(flight.job.id)
        ended = self._rollouts.pop(group.id, {})
        logged = [self.meter.drop(rollout, self._reward(rollout)) for _, rollout in sorted(ended.items())]
        if group.id not in self.ledger.groups:
            self._forget(group.id)
        return logged

    def _reward(self, rollout: Rollout) -> float | None:
        return self.reward_of(rollout) if self.reward_of and rollout.terminal.scored else None

    def _hand_out(self, group: GroupState) -> Group:
        rollouts = [rollout for _, rollout in sorted(self._rollouts[group.id].items())]
        staleness = group.trains_at - group.version
        self.meter.taken(group.id, staleness)
        task = self._tasks[group.id]
        return Group(self.prefix + group.id, task, group.visit, group.version, staleness, rollouts)

    def _forget(self, group: str) -> None:
        self._rollouts.pop(group, None)
        self._tasks.pop(group, None)
        self.meter.forget(group)

    def _alarm(self, batch: list[Group]) -> None:
        rollouts = [rollout for group in batch for rollout in group.rollouts]
        if rollouts and all(rollout.terminal is Terminal.INFRASTRUCTURE for rollout in rollouts):
            raise InfrastructureError(
                f"none of {len(rollouts)} rollouts could be scored; the first: {rollouts[0].error}",
                where="rollout",
                hint="mend the harness, the engine or the tools, and resume",
            )


async def run_tasks(executor: Executor, tasks: Sequence[Task], *, samples: int = 1, **options: Any) -> list[Group]:
    """Run each task `samples` times, in order, as an evaluation does; one group a task.

    `options`: `concurrency`, `retries` and `deterministic` as in `DispatchSettings`; the rest as in `Dispatcher`.
    """
    if not tasks:
        return []
    known = {name: options.pop(name) for name in ("concurrency", "retries", "deterministic") if name in options}
    settings = DispatchSettings(groups=len(tasks), group_size=samples, **known)
    rest = iter(tasks)
    dispatcher = Dispatcher(executor, lambda: next(rest, None), settings, **options)
    try:
        return await dispatcher.collect()
    finally:
        await dispatcher.close()


def member_seed(seed: int, task: str, visit: int, member: int) -> int:
    """The seed of a rollout (63 bits), from what it is and not from when it ran."""
    text = f"{seed}\0{task}\0{visit}\0{member}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def next_life(store: TraceStore) -> int:
    """The `life` to give a dispatcher on this store: 0 on an empty one, else one more than any that it used."""
    lives = [int(row.id.partition("~")[2] or 0) for row in store.rollouts()]
    return max(lives) + 1 if lives else 0
