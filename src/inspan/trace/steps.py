"""Critical steps, and what else the tree of sessions tells. Contract: pure; counts calls, knows no clock.

Cost of a session (K2.5 report, arXiv 2602.02276: Σ_t S_main(t) + max_i S_sub,i(t)), a turn being one model call that
sampled something:

    turn = max(1, direct tool calls) + Σ over waves (dearest child of the wave)

A tool call *delegates* when a child session hangs under it; every other call is direct, also one that should have
delegated and failed. The children of a turn, in the order of its tool calls, run in waves of `width`. Several
sessions under one call run one after the other, as do children that name no call.

Invariants: a turn costs at least 1, so sampling is never free; the cost only grows as sessions and calls are added,
but for a call that turns out to delegate; with `width` at least the number of children a stage costs its dearest child.

While a rollout runs, a child may spend what its parent had left when it was assigned (`left`): the parent's allowance,
less its turns before, less the direct calls of the assigning turn, less the waves before the child's own. A sibling
that has not called yet is known by its tool's name, so what a child may spend does not depend on who calls first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from inspan.trace.records import Call, Session, ToolCall, ToolEvent

Cost = Callable[[ToolCall], float]


@dataclass(slots=True)
class _Branch:
    """A session in the tree: its turns, and its children by the tool call that they answer (None: unknown)."""

    session: Session
    turns: list[tuple[ToolCall, ...]] = field(default_factory=list)
    children: dict[str | None, list[str]] = field(default_factory=dict)
    stages: set[int] = field(default_factory=set)  # turns under which children hang
    plain: int = 0  # cost of the turns without children


class StepTree:
    """The tree of sessions of one rollout, built up call by call. `width`: concurrent children; None: no limit."""

    def __init__(
        self, sessions: Iterable[Session] = (), calls: Iterable[Call] = (), *, width: int | None = None
    ) -> None:
        if width is not None and width < 1:
            raise ValueError(f"width is {width}, not at least 1")
        self.width = width
        self._branches: dict[str, _Branch] = {}
        self._turn_of: dict[str, tuple[str, int]] = {}
        for session in sessions:
            self.add_session(session)
        for call in calls:
            self.add_call(call)

    def add_session(self, session: Session) -> None:
        """Enter a session; its parent must be there. Raises ValueError otherwise."""
        if session.id in self._branches:
            raise ValueError(f"session {session.id!r} is already there")
        if session.parent is not None:
            if session.parent not in self._branches:
                raise ValueError(f"session {session.id!r} has parent {session.parent!r}, which is not there")
            self._branches[session.parent].children.setdefault(session.parent_call, []).append(session.id)
            if session.parent_call in self._turn_of:
                self._delegate(session.parent_call)
        self._branches[session.id] = _Branch(session)

    def add_call(self, call: Call) -> None:
        """Enter a call; one that sampled nothing (refused, failed) costs nothing."""
        if call.node is None:
            return
        branch = self._branches[call.session]
        branch.turns.append(call.tool_calls)
        branch.plain += max(1, len(call.tool_calls))
        for tool_call in call.tool_calls:
            self._turn_of[tool_call.id] = (call.session, len(branch.turns) - 1)
            if tool_call.id in branch.children:
                self._delegate(tool_call.id)

    def roots(self) -> list[str]:
        """Sessions without a parent."""
        return [id_ for id_, branch in self._branches.items() if branch.session.parent is None]

    def spent(self, session: str) -> int:
        """Critical steps of a session so far, its children's included."""
        branch = self._branches[session]
        total = branch.plain + sum(self._turn(branch, turn, self.spent) for turn in branch.stages)
        return int(total + sum(self.spent(child) for child in self._loose(branch)))

    def total(self) -> int:
        """Critical steps of the rollout so far: of all its roots."""
        return sum(self.spent(root) for root in self.roots())

    def allowance(self, session: str, limit: int | None) -> int | None:
        """What a session may spend in all, of an episode's `limit`; None when there is no limit. May be negative."""
        if limit is None:
            return None
        me = self._branches[session].session
        if me.parent is None:
            return limit
        granted = self.allowance(me.parent, limit)
        assert granted is not None
        if me.parent_call not in self._turn_of:
            return granted - self.spent(me.parent) + self.spent(session)
        parent = self._branches[me.parent]
        turn = self._turn_of[me.parent_call][1]
        before = sum(self._turn(parent, t, self.spent) for t in range(turn))
        return int(granted - before - self._direct_when_assigned(parent, turn) - self._waves_before(parent, turn, me))

    def left(self, session: str, limit: int | None) -> int | None:
        """What a session may still spend; at 0 or below its next call must be refused."""
        allowance = self.allowance(session, limit)
        return None if allowance is None else allowance - self.spent(session)

    def time(self, events: Iterable[ToolEvent], seconds_per_turn: float) -> float:
        """Seconds along the critical path: model time a turn, the slowest direct call, the slowest child of each wave.

        Latencies are those that the tools declare; several events of one call happen one after the other.
        """
        latency: dict[str, float] = {}
        for event in events:
            latency[event.call] = latency.get(event.call, 0.0) + event.latency_s

        def seconds(session: str) -> float:
            branch = self._branches[session]
            total = sum(seconds(child) for child in self._loose(branch))
            for calls in branch.turns:
                direct = [latency.get(call.id, 0.0) for call in calls if call.id not in branch.children]
                total += seconds_per_turn + max(direct, default=0.0) + self._waves(self._stage(branch, calls), seconds)
            return total

        return sum(seconds(root) for root in self.roots())

    def stages(self, session: str) -> list[int]:
        """How many tool calls were delegated in each turn of a session that delegated any."""
        branch = self._branches[session]
        return [len(self._stage(branch, branch.turns[turn])) for turn in sorted(branch.stages)]

    # ---- inside -------------------------------------------------------------------------------------------------

    def _delegate(self, tool_call: str) -> None:
        session, turn = self._turn_of[tool_call]
        branch = self._branches[session]
        if turn not in branch.stages:
            branch.stages.add(turn)
            branch.plain -= max(1, len(branch.turns[turn]))

    def _loose(self, branch: _Branch) -> list[str]:
        """Children that hang under no recorded call of their parent."""
        me = branch.session.id
        return [
            child
            for call, children in branch.children.items()
            if self._turn_of.get(call or "", ("", 0))[0] != me
            for child in children
        ]

    def _stage(self, branch: _Branch, calls: Sequence[ToolCall]) -> list[list[str]]:
        """The child sessions of a turn, by delegating call, in the order of the tool calls."""
        return [branch.children[call.id] for call in calls if call.id in branch.children]

    def _waves(self, stage: list[list[str]], cost: Callable[[str], float]) -> float:
        width = self.width or max(1, len(stage))
        costs = [sum(cost(child) for child in children) for children in stage]
        return sum(max(costs[at : at + width]) for at in range(0, len(costs), width))

    def _turn(self, branch: _Branch, turn: int, cost: Callable[[str], float]) -> float:
        calls = branch.turns[turn]
        stage = self._stage(branch, calls)
        return max(1, len(calls) - len(stage)) + self._waves(stage, cost)

    def _direct_when_assigned(self, parent: _Branch, turn: int) -> int:
        calls = parent.turns[turn]
        delegating = {call.name for call in calls if call.id in parent.children}
        return max(1, sum(call.name not in delegating for call in calls))

    def _waves_before(self, parent: _Branch, turn: int, child: Session) -> float:
        calls = parent.turns[turn]
        index = next(i for i, call in enumerate(calls) if call.id == child.parent_call)
        stage = self._stage(parent, calls[:index])
        whole = len(stage) - len(stage) % (self.width or len(stage) + 1)
        return self._waves(stage[:whole], self.spent)


@dataclass(frozen=True, slots=True)
class Steps:
    """What a finished rollout's tree tells. `width` is assigned tasks / stages of the root, 0.0 when nothing was."""

    critical_steps: int
    assigned: int  # child sessions' tool calls in the whole tree
    stages: int  # turns of root sessions with at least one assignment
    parallel_width: float
    turns: int  # model calls that sampled something
    tool_calls: int
    invalid_calls: int


def measure(sessions: Sequence[Session], calls: Sequence[Call], *, width: int | None = None) -> Steps:
    """Count a rollout's tree. `width`: concurrent sub-agents, beyond which they go in waves; None: no limit."""
    tree = StepTree(sessions, calls, width=width)
    stages = [size for root in tree.roots() for size in tree.stages(root)]
    tool_calls = [tool_call for call in calls for tool_call in call.tool_calls]
    return Steps(
        critical_steps=tree.total(),
        assigned=len({session.parent_call for session in sessions if session.parent_call is not None}),
        stages=len(stages),
        parallel_width=sum(stages) / len(stages) if stages else 0.0,
        turns=sum(call.node is not None for call in calls),
        tool_calls=len(tool_calls),
        invalid_calls=sum(tool_call.error is not None for tool_call in tool_calls),
    )


def spent(session: str, sessions: Iterable[Session], calls: Iterable[Call], *, width: int | None = None) -> int:
    """Critical steps of a session so far. For a running rollout keep a `StepTree` instead."""
    return StepTree(sessions, calls, width=width).spent(session)


def critical_path_s(
    sessions: Iterable[Session],
    calls: Iterable[Call],
    events: Iterable[ToolEvent],
    *,
    seconds_per_turn: float = 1.0,
    width: int | None = None,
) -> float:
    """Seconds along the critical path on declared latencies (see `StepTree.time`)."""
    return StepTree(sessions, calls, width=width).time(events, seconds_per_turn)
