"""The row table: whatever is admitted, finished, branched and swapped, contents and block stay right."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inspan.engine.slots import MOVE_COST, Slots, State

ROWS, CONTEXT, ACTIVE = 6, 60, 4


class Rows(RuleBasedStateMachine):
    """Plays the lane's part with a model of what KV each row holds, and checks every reuse against it."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(ROWS, CONTEXT)
        self.kv: dict[int, tuple[int, ...]] = {r: () for r in range(ROWS)}  # what was really computed in a row

    def rows(self, state: State) -> list[int]:
        return [int(r) for r in np.flatnonzero(self.slots.state == state)]

    @precondition(lambda self: self.slots.busy < ACTIVE)
    @rule(data=st.data())
    def admit(self, data) -> None:
        cached = [self.kv[r] for r in range(ROWS) if self.kv[r]]
        stem = data.draw(st.sampled_from(cached)) if cached and data.draw(st.booleans()) else ()
        stem = stem[: data.draw(st.integers(0, len(stem)))]
        prompt = (*stem, *data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=12)))[: CONTEXT - 10]
        place = self.slots.place(np.array(prompt))
        if place is None:
            assert self.rows(State.PREFILL)  # only worth waiting for a neighbour in prefill
            return
        assert place.reused < len(prompt)
        if place.source is not None:
            assert self.kv[place.source][: place.reused] == prompt[: place.reused]
        self.kv[place.row] = prompt[: place.reused]

    @precondition(lambda self: self.rows(State.PREFILL))
    @rule(data=st.data())
    def prefill(self, data) -> None:
        row = data.draw(st.sampled_from(self.rows(State.PREFILL)))
        begin, end = int(self.slots.length[row]), int(self.slots.target[row])
        stop = data.draw(st.integers(begin + 1, end))
        self.kv[row] += tuple(self.slots.content[row, begin:stop].tolist())
        self.slots.length[row] = stop
        if stop == end:
            self.slots.state[row] = State.DECODE
            self.slots.content[row, stop] = 0

    @precondition(lambda self: self.rows(State.DECODE))
    @rule(token=st.integers(0, 1))
    def decode(self, token) -> None:
        for row in self.rows(State.DECODE):
            length = int(self.slots.length[row])
            if length + 1 < CONTEXT:
                self.kv[row] += (int(self.slots.content[row, length]),)
                self.slots.length[row] += 1
                self.slots.content[row, length + 1] = token

    @precondition(lambda self: self.slots.busy)
    @rule(data=st.data())
    def finish(self, data) -> None:
        row = data.draw(st.sampled_from(self.rows(State.DECODE) + self.rows(State.PREFILL)))
        self.slots.release(row)

    @rule()
    def new_weights(self) -> None:
        self.slots.taint()
        assert not self.rows(State.CACHED)

    @rule()
    def compact(self) -> None:
        before = self.slots.block
        for busy, hole in self.slots.compaction():
            assert self.slots.state[busy] == State.DECODE and self.slots.state[hole] != State.DECODE and hole < busy
            self.slots.exchange(busy, hole)
            self.kv[busy], self.kv[hole] = self.kv[hole], self.kv[busy]
        assert self.slots.block <= before

    @invariant()
    def contents_are_what_was_computed(self) -> None:
        for row in range(ROWS):
            length = int(self.slots.length[row])
            assert self.slots.state[row] != State.FREE or length == 0
            if self.slots.state[row] != State.FREE:
                assert tuple(self.slots.content[row, :length].tolist()) == self.kv[row][:length]

    @invariant()
    def the_block_ends_with_a_busy_row(self) -> None:
        decoding = self.rows(State.DECODE)
        assert self.slots.block == (max(decoding) + 1 if decoding else 0)


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_session_returns_to_its_own_row_without_a_copy():
    slots = Slots(4, 20)
    place = slots.place(np.array([1, 2, 3]))
    assert place is not None and place.source is None
    slots.length[0] = 3
    slots.release(0)
    again = slots.place(np.array([1, 2, 3, 4]))
    assert again is not None and (again.row, again.source, again.reused) == (0, 0, 3)


def test_one_idle_row_is_tolerated_for_a_while_many_are_not():
    slots = Slots(40, 8)
    slots.state[[0, 2]] = State.DECODE
    steps = 0
    while not (moves := slots.compaction()):
        steps += 1
    assert moves == [(2, 1)] and steps == MOVE_COST - 1
    slots = Slots(40, 8)
    slots.state[[20, 39]] = State.DECODE
    assert slots.compaction() == [(39, 0), (20, 1)]
