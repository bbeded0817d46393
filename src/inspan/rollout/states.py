"""The ledger of groups and rollouts: a pure state machine, without clock, I/O or randomness.

A *group* is `group_size` rollouts of one task; it is opened at a policy version and handed out (`take`) in batches, one
batch an update. Each rollout goes queued → dispatched → running → exactly one terminal state, which `finish` reports
once; an infrastructure fault goes back to the queue, as a new attempt, up to `retries` times. Invariants:

1. At most `concurrency` rollouts are dispatched or running.
2. A group that is taken is at most `max_staleness` versions old, counted from the version it was opened at to the
   version its batch trains, so the time in the queue is included.
3. Policy `wait` keeps 2 by never opening a group that could become too old, and by taking a batch only when those left
   behind can still be trained in time (earliest deadline first, `batch` groups a version). Nothing is thrown away.
   Policy `drop` throws away what has become too old.
4. A group leaves the ledger when its batch is confirmed (`advance`) or it is dropped, and not before: `state()` at any
   time loses no finished rollout and repeats none that was confirmed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from inspan.errors import CheckpointError
from inspan.trace.records import Terminal

Stale = Literal["wait", "drop"]


class Phase(StrEnum):
    """Where a rollout is."""

    QUEUED = "queued"
    DISPATCHED = "dispatched"
    RUNNING = "running"
    DONE = "done"


class GroupPhase(StrEnum):
    """Where a group is."""

    OPEN = "open"  # some member has no terminal state yet
    FINISHED = "finished"  # all members ended, waiting to be taken
    TAKEN = "taken"  # handed to the learner, not yet confirmed
    DROPPED = "dropped"  # too stale; leaves when its last running member has ended


class Verdict(StrEnum):
    """What `finish` decided about a report."""

    EMIT = "emit"  # the rollout's one terminal state
    RETRY = "retry"  # an infrastructure fault: queued again as a new attempt
    REQUEUED = "requeued"  # cancelled by a shutdown: queued for the next start
    IGNORED = "ignored"  # a late report of an attempt that no longer counts


@dataclass(frozen=True, slots=True)
class Ticket:
    """One attempt to run one rollout. `number` counts groups from 0 in the order they were opened."""

    group: str
    number: int
    member: int
    attempt: int
    task: str
    visit: int

    @property
    def id(self) -> str:
        """Unique in the run, attempts included."""
        base = f"{self.group}.{self.member}"
        return base if self.attempt == 0 else f"{base}.{self.attempt}"


@dataclass(slots=True)
class Member:
    """A rollout's place in the ledger. `faults` counts infrastructure faults, `attempt` also counts restarts."""

    phase: Phase = Phase.QUEUED
    attempt: int = 0
    faults: int = 0
    terminal: Terminal | None = None


@dataclass(slots=True)
class GroupState:
    """A group's place in the ledger.

    `order` is its place among the finished groups, `trains_at` the version its batch trains; -1 before.
    """

    id: str
    number: int
    task: str
    visit: int
    version: int
    members: list[Member]
    phase: GroupPhase = GroupPhase.OPEN
    order: int = -1
    trains_at: int = -1

    def ended(self) -> bool:
        """Whether every member has its terminal state."""
        return all(m.phase is Phase.DONE for m in self.members)


@dataclass(slots=True)
class Ledger:
    """See the module's contract. `lockstep` fills free places only when nothing runs (deterministic mode)."""

    batch: int
    group_size: int
    concurrency: int
    max_staleness: int = 0
    stale: Stale = "wait"
    retries: int = 0
    lockstep: bool = False
    version: int = 0
    groups: dict[str, GroupState] = field(default_factory=dict)
    _queue: list[tuple[int, int]] = field(default_factory=list)  # heap of (group number, member)
    _running: int = 0
    _filling: bool = True
    _outstanding: int = 0  # batches taken and not yet confirmed
    _next: int = 0
    _finished: int = 0
    _visits: dict[str, int] = field(default_factory=dict)
    _closing: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "group_size", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_staleness < 0 or self.retries < 0:
            raise ValueError("max_staleness and retries must not be negative")

    # ---- looking -------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """How many rollouts are dispatched or running."""
        return self._running

    @property
    def queued(self) -> int:
        """How many rollouts of opened groups wait for a place."""
        return len(self._queue)

    def live(self) -> list[GroupState]:
        """Groups that are open or finished and not yet taken, in the order they were opened."""
        return [g for g in self.groups.values() if g.phase in (GroupPhase.OPEN, GroupPhase.FINISHED)]

    def blocked(self) -> bool:
        """Whether only `advance` can bring the next batch: too many batches are out for the staleness bound."""
        return self._outstanding > self.max_staleness and not self.live()

    def _trains_at(self) -> int:
        """The version at which the next batch will be trained."""
        return self.version + self._outstanding

    def _feasible(self, opened: Iterable[int], at: int) -> bool:
        """Whether groups opened at these versions can all be trained in time, `batch` a version from `at` on."""
        return all(v + self.max_staleness >= at + i // self.batch for i, v in enumerate(sorted(opened)))

    # ---- dispatching ---------------------------------------------------------------------------------------------

    def _room(self) -> bool:
        return not self._closing and self._running < self.concurrency and (self._filling or not self.lockstep)

    def may_open(self) -> bool:
        """Whether a new group may be opened now: there is a free place, and it cannot become too stale."""
        if not self._room() or self._queue:
            return False
        live = [g.version for g in self.live()]
        if self.stale == "drop":
            taken = sum(g.phase is GroupPhase.TAKEN for g in self.groups.values())
            return len(live) + taken < (self.max_staleness + 1) * self.batch
        return self._feasible([*live, self.version], self._trains_at())

    def open(self, task: str) -> GroupState:
        """Open a group on a task; its members join the queue."""
        visit = self._visits.get(task, 0)
        self._visits[task] = visit + 1
        members = [Member() for _ in range(self.group_size)]
        group = GroupState(f"g{self._next:06d}", self._next, task, visit, self.version, members)
        self._next += 1
        self.groups[group.id] = group
        for index in range(self.group_size):
            heapq.heappush(self._queue, (group.number, index))
        return group

    def dispatch(self) -> Ticket | None:
        """The next rollout to run, oldest group first, or None when there is no place or nothing is queued."""
        if not self._queue or not self._room():
            return None
        number, index = heapq.heappop(self._queue)
        group = self.groups[f"g{number:06d}"]
        member = group.members[index]
        member.phase = Phase.DISPATCHED
        self._running += 1
        return Ticket(group.id, number, index, member.attempt, group.task, group.visit)

    def started(self, ticket: Ticket) -> None:
        """The executor began to run it."""
        member = self._current(ticket)
        if member is not None and member.phase is Phase.DISPATCHED:
            member.phase = Phase.RUNNING

    def _current(self, ticket: Ticket) -> Member | None:
        group = self.groups.get(ticket.group)
        if group is None:
            return None
        member = group.members[ticket.member]
        active = member.phase in (Phase.DISPATCHED, Phase.RUNNING)
        return member if active and member.attempt == ticket.attempt else None

    def finish(self, ticket: Ticket, terminal: Terminal) -> Verdict:
        """Report how an attempt ended. Each rollout gets `EMIT` exactly once; late reports are `IGNORED`."""
        member = self._current(ticket)
        if member is None:
            return Verdict.IGNORED
        group = self.groups[ticket.group]
        self._running -= 1
        self._filling = self._running == 0
        if group.phase is not GroupPhase.DROPPED:
            if self._closing and terminal is Terminal.CANCELLED:
                self._requeue(group, ticket.member)
                return Verdict.REQUEUED
            if terminal is Terminal.INFRASTRUCTURE and member.faults < self.retries:
                member.faults += 1
                self._requeue(group, ticket.member)
                return Verdict.RETRY
        member.phase, member.terminal = Phase.DONE, terminal
        if group.ended():
            self._close(group)
        return Verdict.EMIT

    def _requeue(self, group: GroupState, index: int) -> None:
        member = group.members[index]
        member.phase = Phase.QUEUED
        member.attempt += 1
        heapq.heappush(self._queue, (group.number, index))

    def _close(self, group: GroupState) -> None:
        if group.phase is GroupPhase.DROPPED:
            del self.groups[group.id]
            return
        group.phase, group.order = GroupPhase.FINISHED, self._finished
        self._finished += 1

    # ---- handing out ---------------------------------------------------------------------------------------------

    def take(self, *, flush: bool = False) -> list[GroupState] | None:
        """A batch of finished groups, oldest version first, or None when it must wait.

        `flush` (no more tasks will come) also gives what is left, fewer than a batch, once nothing is open.
        """
        at = self._trains_at()
        live = self.live()
        ready = [g for g in live if g.phase is GroupPhase.FINISHED and g.version + self.max_staleness >= at]
        ready.sort(key=lambda g: (g.version, g.number if self.lockstep else g.order))
        if len(ready) < self.batch and not (flush and len(ready) == len(live)):
            return None
        chosen = ready[: self.batch]
        names = {g.id for g in chosen}
        rest = [g.version for g in live if g.id not in names]
        if self.stale == "wait" and not self._feasible(rest, at + 1):
            return None
        for group in chosen:
            group.phase, group.trains_at = GroupPhase.TAKEN, at
        if chosen:
            self._outstanding += 1
        return sorted(chosen, key=lambda g: g.number)

    def confirm(self, groups: Iterable[str] | None = None) -> list[str]:
        """Taken groups (all, or the named ones) are trained and leave the ledger; returns their ids."""
        taken = [g.id for g in self.groups.values() if g.phase is GroupPhase.TAKEN]
        done = taken if groups is None else [name for name in taken if name in set(groups)]
        for name in done:
            del self.groups[name]
        if len(done) == len(taken):
            self._outstanding = 0
        return done

    def advance(self, version: int, groups: Iterable[str] | None = None) -> list[GroupState]:
        """The learner now has `version`, having trained the taken groups (all, or the named ones).

        Returns the groups that became too stale (policy `drop` only); their running members must be cancelled, and
        report through `finish` as ever. Raises ValueError when the version goes back, or outruns what `wait` assumed.
        """
        if version < self.version:
            raise ValueError(f"the policy version went back from {self.version} to {version}")
        outstanding = max(0, self._outstanding - (version - self.version))
        self.confirm(groups)
        self._outstanding = outstanding if self._taken() else 0
        self.version = version
        if self.stale == "drop":
            return self._drop(self._trains_at())
        if not self._feasible([g.version for g in self.live()], self._trains_at()):
            raise ValueError(f"version {version} came without its batch: rollouts in flight are now too stale")
        return []

    def _taken(self) -> bool:
        return any(g.phase is GroupPhase.TAKEN for g in self.groups.values())

    def _drop(self, at: int) -> list[GroupState]:
        dropped = [g for g in self.live() if g.version + self.max_staleness < at]
        numbers = {g.number for g in dropped}
        self._queue = [entry for entry in self._queue if entry[0] not in numbers]
        heapq.heapify(self._queue)
        for group in dropped:
            group.phase = GroupPhase.DROPPED
            for member in group.members:
                if member.phase is Phase.QUEUED:
                    member.phase, member.terminal = Phase.DONE, Terminal.CANCELLED
            if group.ended():
                self._close(group)
        return dropped

    def shutdown(self) -> None:
        """Open and dispatch nothing more; rollouts cancelled from now on are kept for the next start."""
        self._closing = True

    # ---- keeping -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain JSON. Rollouts in flight appear as queued under a new attempt, taken groups as finished."""
        groups = []
        for group in self.groups.values():
            if group.phase is GroupPhase.DROPPED:
                continue
            members = []
            for m in group.members:
                flying = m.phase in (Phase.DISPATCHED, Phase.RUNNING)
                terminal = m.terminal.value if m.terminal else None
                members.append([m.attempt + flying, m.faults, terminal])
            groups.append([group.id, group.number, group.task, group.visit, group.version, group.order, members])
        return {
            "version": self.version,
            "next": self._next,
            "finished": self._finished,
            "visits": dict(self._visits),
            "groups": groups,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a `state()` in a fresh ledger; what was in flight is queued again."""
        if self.groups or self._next:
            raise CheckpointError("a ledger that is in use cannot be restored", where="rollout ledger")
        try:
            self.version, self._next, self._finished = state["version"], state["next"], state["finished"]
            self._visits = dict(state["visits"])
            for name, number, task, visit, version, order, members in state["groups"]:
                self._restore_group(GroupState(name, number, task, visit, version, [], order=order), members)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the ledger's state is damaged: {error}", where="rollout ledger") from error
        if self.stale == "wait" and not self._feasible([g.version for g in self.live()], self.version):
            raise CheckpointError(
                "the rollouts in flight are too stale for this recipe",
                where="rollout ledger",
                hint="resume with the batch and max_staleness that the run began with",
            )

    def _restore_group(self, group: GroupState, members: Iterable[tuple[int, int, str | None]]) -> None:
        for index, (attempt, faults, terminal) in enumerate(members):
            phase = Phase.DONE if terminal else Phase.QUEUED
            group.members.append(Member(phase, attempt, faults, Terminal(terminal) if terminal else None))
            if phase is Phase.QUEUED:
                heapq.heappush(self._queue, (group.number, index))
        if len(group.members) != self.group_size:
            raise CheckpointError(
                f"group {group.id} has {len(group.members)} members, the recipe says {self.group_size}",
                where="rollout ledger",
                hint="resume with the group_size that the run began with",
            )
        if group.ended():
            group.phase = GroupPhase.FINISHED
        self.groups[group.id] = group
