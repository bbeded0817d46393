"""The ledger: exactly once, bounded, never too stale, never stuck, and the same after a restart."""

from __future__ import annotations

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inspan.errors import CheckpointError
from inspan.rollout.states import GroupPhase, Ledger, Phase, Ticket, Verdict
from inspan.trace.records import Terminal

ENDS = [Terminal.COMPLETED, Terminal.FAILED, Terminal.TIMED_OUT, Terminal.LIMIT, Terminal.INFRASTRUCTURE]


def pump(ledger: Ledger, tasks: int = 10**6) -> list[Ticket]:
    """Dispatch all that the ledger allows, opening groups on tasks t0, t1, ..."""
    tickets = []
    while True:
        ticket = ledger.dispatch()
        if ticket is not None:
            tickets.append(ticket)
        elif ledger.may_open() and ledger._next < tasks:
            ledger.open(f"t{ledger._next}")
        else:
            return tickets


class LedgerMachine(RuleBasedStateMachine):
    """Anything that a dispatcher may do, in any order."""

    @initialize(
        batch=st.integers(1, 3),
        size=st.integers(1, 3),
        concurrency=st.integers(1, 7),
        staleness=st.integers(0, 3),
        stale=st.sampled_from(["wait", "drop"]),
        retries=st.integers(0, 2),
        lockstep=st.booleans(),
    )
    def begin(self, batch, size, concurrency, staleness, stale, retries, lockstep):
        self.config = dict(
            batch=batch,
            group_size=size,
            concurrency=concurrency,
            max_staleness=staleness,
            stale=stale,
            retries=retries,
            lockstep=lockstep,
        )
        self.ledger = Ledger(**self.config)
        self.flying: list[Ticket] = []
        self.spent: list[Ticket] = []
        self.emitted: set[tuple[str, int]] = set()
        self.trained: set[str] = set()
        self.taken: set[str] = set()
        self.faults: dict[tuple[str, int], int] = {}

    @rule()
    def dispatch(self):
        self.flying += pump(self.ledger)

    @rule(count=st.integers(1, 2))
    def dispatch_some(self, count):
        for _ in range(count):
            if self.ledger.may_open():
                self.ledger.open(f"t{self.ledger._next % 3}")
            ticket = self.ledger.dispatch()
            if ticket:
                self.flying.append(ticket)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), started=st.booleans())
    def finish(self, data, started):
        ticket = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        dropped = ticket.group in self.ledger.groups and self.ledger.groups[ticket.group].phase is GroupPhase.DROPPED
        terminal = Terminal.CANCELLED if dropped else data.draw(st.sampled_from(ENDS))
        if started:
            self.ledger.started(ticket)
        verdict = self.ledger.finish(ticket, terminal)
        self.spent.append(ticket)
        key = (ticket.group, ticket.member)
        if verdict is Verdict.RETRY:
            assert terminal is Terminal.INFRASTRUCTURE
            self.faults[key] = self.faults.get(key, 0) + 1
            assert self.faults[key] <= self.config["retries"]
        else:
            assert verdict is Verdict.EMIT
            assert key not in self.emitted, "emitted twice"
            self.emitted.add(key)
            if terminal is Terminal.INFRASTRUCTURE:
                assert self.faults.get(key, 0) == self.config["retries"], "gave up before the last retry"

    @precondition(lambda self: self.spent)
    @rule(data=st.data())
    def report_again(self, data):
        ticket = data.draw(st.sampled_from(self.spent))
        before = self.ledger.state()
        assert self.ledger.finish(ticket, Terminal.COMPLETED) is Verdict.IGNORED
        assert self.ledger.state() == before

    @rule()
    def take(self):
        at = self.ledger.version + self.ledger._outstanding
        groups = self.ledger.take()
        for group in groups or ():
            assert group.id not in self.trained | self.taken, "handed out twice"
            assert group.ended()
            assert at - group.version <= self.config["max_staleness"], "too stale"
            self.taken.add(group.id)
        assert groups is None or len(groups) == self.config["batch"]

    @precondition(lambda self: self.taken)
    @rule()
    def advance(self):
        before = {g.id: g for g in self.ledger.live()}
        dropped = {g.id for g in self.ledger.advance(self.ledger.version + 1)}
        assert self.config["stale"] == "drop" or not dropped
        for name in before.keys() - dropped:
            assert self.ledger.version - before[name].version <= self.config["max_staleness"]
        self.trained |= self.taken
        self.taken = set()

    @rule()
    def restart(self):
        state = json.loads(json.dumps(self.ledger.state()))
        done = {
            (g.id, i)
            for g in self.ledger.groups.values()
            if g.phase is not GroupPhase.DROPPED
            for i, m in enumerate(g.members)
            if m.phase is Phase.DONE
        }
        live = {g.id for g in self.ledger.groups.values() if g.phase is not GroupPhase.DROPPED}
        self.ledger = Ledger(**self.config)
        self.ledger.restore(state)
        assert {g.id for g in self.ledger.groups.values()} == live, "groups lost or made up"
        again = {
            (g.id, i) for g in self.ledger.groups.values() for i, m in enumerate(g.members) if m.phase is Phase.DONE
        }
        assert again == done, "a finished rollout was lost, or an unfinished one made up"
        assert self.ledger.running == 0
        self.spent += self.flying
        self.flying, self.taken = [], set()

    @invariant()
    def bounded(self):
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.running == len(self.flying) <= self.config["concurrency"]
        limit = (self.config["max_staleness"] + 1) * self.config["batch"]
        assert len(self.ledger.live()) <= limit, "the buffer grows without bound"

    @invariant()
    def never_stuck(self):
        """When nothing runs, something can be done: dispatch, take, or (with a batch out) advance."""
        if not hasattr(self, "ledger") or self.flying:
            return
        ledger = Ledger(**self.config)
        ledger.restore(self.ledger.state())
        while tickets := pump(ledger):
            for ticket in tickets:
                ledger.finish(ticket, Terminal.COMPLETED)
        if self.config["stale"] == "wait":
            assert ledger.take() is not None


LedgerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestLedger = LedgerMachine.TestCase


def test_sync_opens_exactly_the_batch_and_nothing_before_it_is_trained():
    ledger = Ledger(batch=2, group_size=3, concurrency=100)
    tickets = pump(ledger)
    assert [(t.group, t.member) for t in tickets] == [(f"g00000{g}", m) for g in (0, 1) for m in (0, 1, 2)]
    for ticket in tickets[:-1]:
        ledger.finish(ticket, Terminal.COMPLETED)
    assert ledger.take() is None
    ledger.finish(tickets[-1], Terminal.FAILED)
    assert [g.id for g in ledger.take() or []] == ["g000000", "g000001"]
    assert pump(ledger) == []
    ledger.advance(1)
    assert len(pump(ledger)) == 6


def test_wait_holds_a_batch_back_until_the_old_group_that_could_become_too_stale_has_ended():
    ledger = Ledger(batch=1, group_size=1, concurrency=10, max_staleness=1)
    slow, quick = pump(ledger)
    ledger.finish(quick, Terminal.COMPLETED)
    taken = ledger.take()
    assert taken and taken[0].id == quick.group
    ledger.advance(1)
    (newer,) = pump(ledger)
    ledger.finish(newer, Terminal.COMPLETED)
    assert ledger.take() is None, "taking the newer group would leave the slow one too stale"
    ledger.finish(slow, Terminal.COMPLETED)
    taken = ledger.take()
    assert taken and taken[0].id == slow.group


def test_drop_throws_away_what_became_too_stale_and_says_so():
    ledger = Ledger(batch=1, group_size=2, concurrency=10, max_staleness=1, stale="drop")
    first = pump(ledger)
    for version in (1, 2):
        mine = [t for t in first if t.number == version - 1]
        if version == 1:
            for ticket in mine:
                ledger.finish(ticket, Terminal.COMPLETED)
            assert ledger.take()
        dropped = ledger.advance(version)
    assert [g.id for g in dropped] == ["g000001"]
    assert ledger.finish(first[2], Terminal.CANCELLED) is Verdict.EMIT
    assert ledger.finish(first[3], Terminal.COMPLETED) is Verdict.EMIT
    assert not ledger.groups


def test_only_infrastructure_faults_are_retried():
    ledger = Ledger(batch=1, group_size=1, concurrency=1, retries=1)
    (ticket,) = pump(ledger)
    assert ledger.finish(ticket, Terminal.INFRASTRUCTURE) is Verdict.RETRY
    (again,) = pump(ledger)
    assert again.attempt == 1 and again.id != ticket.id
    assert ledger.finish(ticket, Terminal.COMPLETED) is Verdict.IGNORED
    assert ledger.finish(again, Terminal.FAILED) is Verdict.EMIT
    assert ledger.take()


def test_what_a_shutdown_cancels_is_run_anew_after_the_restart():
    ledger = Ledger(batch=1, group_size=2, concurrency=2)
    one, two = pump(ledger)
    ledger.finish(one, Terminal.COMPLETED)
    ledger.shutdown()
    assert ledger.finish(two, Terminal.CANCELLED) is Verdict.REQUEUED
    assert ledger.dispatch() is None
    fresh = Ledger(batch=1, group_size=2, concurrency=2)
    fresh.restore(ledger.state())
    (again,) = pump(fresh)
    assert (again.group, again.member, again.attempt) == (two.group, two.member, 1)


def test_lockstep_admits_in_waves_whatever_ends_first():
    ledger = Ledger(batch=2, group_size=2, concurrency=2, lockstep=True)
    one, two = pump(ledger)
    ledger.finish(two, Terminal.COMPLETED)
    assert pump(ledger) == []
    ledger.finish(one, Terminal.COMPLETED)
    assert [t.member for t in pump(ledger)] == [0, 1]


def test_a_task_that_comes_again_is_another_visit():
    ledger = Ledger(batch=3, group_size=1, concurrency=9)
    assert [ledger.open("same").visit for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("change", [{"group_size": 3}, {"max_staleness": 0, "batch": 1}])
def test_a_state_that_does_not_fit_the_recipe_is_refused(change):
    config = dict(batch=2, group_size=2, concurrency=8, max_staleness=1)
    ledger = Ledger(**config)
    pump(ledger)
    with pytest.raises(CheckpointError):
        Ledger(**{**config, **change}).restore(ledger.state())


def test_a_damaged_state_is_a_checkpoint_error():
    with pytest.raises(CheckpointError, match="damaged"):
        Ledger(batch=1, group_size=1, concurrency=1).restore({"version": 0})
