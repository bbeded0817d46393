"""Which sequence lives in which row. Contract: a pure state machine over arrays; it knows no tensors and no clock.

A row is FREE, PREFILL (its prompt is being computed), DECODE (one token a step) or CACHED (finished, kept for reuse).
`content[row, :length[row]]` are the tokens whose KV the row holds; beyond that come the tokens still to be computed, up
to `target`. A row is *clean* when all its KV was computed at the policy's current version: only clean rows are reused.

The decode block is rows 0…n, n being one past the last DECODE row. Rows in the block that do not decode are *holes*:
they cost compute, so `compaction` moves rows down, but only as fast as the holes' accumulated waste pays for the
copies (a session whose tools are quick comes back to its own hole, which costs nothing).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


class State:
    """What a row is doing (plain ints: an Enum's look-ups would cost a tenth of a small model's step)."""

    FREE = 0
    PREFILL = 1
    DECODE = 2
    CACHED = 3


MOVE_COST = 8
"""What moving a row costs, in idle rows carried through one step."""
WORTH_WAITING = 32
"""A prompt waits for a neighbour's prefill when that saves at least this many tokens."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a prompt goes: `row`, whose first `reused` tokens come from row `source` (perhaps itself)."""

    row: int
    source: int | None
    reused: int


class Slots:
    """The rows of one policy. All per-row state is in arrays, so that a step costs a few array operations."""

    def __init__(self, rows: int, context: int) -> None:
        self.rows, self.context = rows, context
        self.room = rows  # rows that should suffice: those beyond are taken when nothing at rest can give way
        self.state = np.zeros(rows, dtype=np.int8)
        self.length = np.zeros(rows, dtype=np.int64)
        self.target = np.zeros(rows, dtype=np.int64)
        self.clean = np.zeros(rows, dtype=bool)
        self.used = np.zeros(rows, dtype=np.int64)
        self.content = np.zeros((rows, context), dtype=np.int64)
        self.columns: list[np.ndarray] = [self.state, self.length, self.target, self.clean, self.used, self.content]
        self._tick = 0
        self._credit = 0

    def touch(self, row: int) -> None:
        """Mark a row as used now (for least-recently-used eviction)."""
        self._tick += 1
        self.used[row] = self._tick

    @property
    def busy(self) -> int:
        """Rows with a request in them."""
        return int(np.count_nonzero((self.state == State.PREFILL) | (self.state == State.DECODE)))

    @property
    def block(self) -> int:
        """Size of the decode block."""
        decoding = np.flatnonzero(self.state == State.DECODE)
        return int(decoding[-1]) + 1 if decoding.size else 0

    def match(self, prompt: np.ndarray) -> tuple[int | None, int, int]:
        """(row, tokens) of the best reuse there is now, and how many tokens a row in prefill will offer.

        At most len(prompt) − 1 tokens are reused: the last one must be computed, for its logits.
        """
        rows = np.flatnonzero(self.clean & (self.state != State.FREE))
        most = len(prompt) - 1
        if not rows.size or most < 1:
            return None, 0, 0
        same = self.content[rows, :most] == prompt[:most]
        common = np.where(same.all(axis=1), most, same.argmin(axis=1))
        now = np.minimum(common, self.length[rows])
        later = int(np.minimum(common, self.target[rows]).max())
        # prefer a row that can be taken over, then the most recent one
        whole = (now == self.length[rows]) & (self.state[rows] == State.CACHED)
        best = int(np.lexsort((self.used[rows], whole, now))[-1])
        return int(rows[best]), int(now[best]), later

    def place(self, prompt: np.ndarray) -> Placement | None:
        """Choose a row for a prompt and mark it PREFILL; None: wait for a neighbour's prefill, or no row is left."""
        source, reused, later = self.match(prompt)
        if later >= reused + WORTH_WAITING:
            return None
        if source is not None and self._overtakable(source, reused, len(prompt)):
            return self._begin(Placement(source, source, reused), prompt)
        row = self.vacant(keep=source)
        if row is None:
            if source is None or self.state[source] != State.CACHED:
                return None
            row = source  # the only row left is the one to copy from: cut it back
        return self._begin(Placement(row, source, reused if source is not None else 0), prompt)

    def _overtakable(self, row: int, reused: int, length: int) -> bool:
        """Whether a prompt may continue in a cached row itself: nothing in it but (part of) the prompt."""
        stored = self.length[row]
        return bool(self.state[row] == State.CACHED and (stored == reused or stored == length == reused + 1))

    def twin(self, prompt: np.ndarray) -> int:
        """A row for a prompt that another row is just computing; its KV will be copied when that is done."""
        row = self.vacant()
        if row is None:
            raise RuntimeError("no row is left: more requests were admitted than there are rows")
        self._begin(Placement(row, None, 0), prompt)
        return row

    def vacant(self, keep: int | None = None) -> int | None:
        """The lowest free row within `room`, else the least recently used cached one other than `keep`, else any."""
        free = np.flatnonzero(self.state == State.FREE)
        if free.size and free[0] < self.room:
            return int(free[0])
        cached = np.flatnonzero(self.state == State.CACHED)
        cached = cached[cached != keep] if keep is not None else cached
        if cached.size:
            return int(cached[self.used[cached].argmin()])
        return int(free[0]) if free.size else None

    def _begin(self, placement: Placement, prompt: np.ndarray) -> Placement:
        row = placement.row
        self.state[row], self.clean[row] = State.PREFILL, True
        self.length[row], self.target[row] = placement.reused, len(prompt)
        self.content[row, : len(prompt)] = prompt
        self.touch(row)
        if placement.source is not None:
            self.touch(placement.source)
        return placement

    def release(self, row: int) -> None:
        """A request left its row: kept for reuse when clean, else free."""
        keep = self.clean[row] and self.length[row] > 0
        self.state[row] = State.CACHED if keep else State.FREE
        self.target[row] = self.length[row]
        if not keep:
            self.length[row] = self.target[row] = 0
        self.touch(row)

    def taint(self) -> None:
        """The weights changed: what runs is no longer clean, what is cached is gone."""
        self.clean[:] = False
        self.clear(self.state == State.CACHED)

    def clear(self, which: np.ndarray) -> None:
        """Free rows (mask)."""
        self.state[which] = State.FREE
        self.length[which] = self.target[which] = 0

    def compaction(self) -> list[tuple[int, int]]:
        """Pairs (busy row, hole) to exchange now, in order; empty while the holes are cheaper than the copies."""
        moves: list[tuple[int, int]] = []
        state = self.state
        decoding = np.flatnonzero(state == State.DECODE)
        holes = int(decoding[-1]) + 1 - decoding.size if decoding.size else 0
        if not holes:
            self._credit = 0
            return moves
        self._credit += holes
        if self._credit < MOVE_COST:
            return moves
        state = state.copy()
        for row in decoding[::-1]:
            candidates = np.flatnonzero(state[:row] != State.DECODE)
            if self._credit < MOVE_COST or not candidates.size:
                break
            free = candidates[state[candidates] == State.FREE]
            hole = int(free[0] if free.size else candidates[0])
            if state[hole] == State.PREFILL:
                break
            moves.append((int(row), hole))
            state[row], state[hole] = state[hole], state[row]
            self._credit -= MOVE_COST
        return moves

    def exchange(self, one: int, other: int) -> None:
        """Swap everything known of two rows."""
        pair, reverse = [one, other], [other, one]
        for column in self.columns:
            column[pair] = column[reverse]
