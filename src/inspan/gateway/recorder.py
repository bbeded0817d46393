"""Makes calls durable; those that end in one turn of the event loop share a transaction. Contract: no HTTP, no engine.

A commit costs the same whether it carries one call or ten, so a call waits one turn of the loop for others to join it:
when `record` returns, it is on disk, and only then is it answered.

Invariants
- A call enters its rollout when it is durable or known to have failed (`LiveRollout.enter`), in the order of commits.
- At most one call of a rollout waits: no other node comes beside its own, and its fate hangs on no other call.
  What reads or extends the rollout meanwhile says `settle` first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inspan.errors import StoreError
from inspan.trace.records import Call, Node
from inspan.trace.store import CallRecord, TraceStore

if TYPE_CHECKING:
    from inspan.gateway.live import LiveRollout, SessionState


@dataclass(slots=True, eq=False)
class Entry:
    """A call on its way: what it sampled, and all nodes that it brings."""

    live: LiveRollout
    state: SessionState
    call: Call
    sampled: Node | None
    nodes: Sequence[Node]
    settled: bool = False
    fault: StoreError | None = None

    def record(self) -> CallRecord:
        """What the store is to take."""
        sessions = () if self.state.stored else (self.state.record,)
        return CallRecord(self.live.id, self.call, self.nodes, sessions)


class Recorder:
    """The way of all rollouts' calls to one store; without a store they are entered at once."""

    def __init__(self, store: TraceStore | None) -> None:
        self._store = store
        self._waiting: list[Entry] = []

    async def record(self, entry: Entry) -> None:
        """Commit a call with those of other rollouts that come in this turn of the loop. Raises `StoreError`."""
        self._add(entry)
        try:
            if self._store is not None:
                await asyncio.sleep(0)
        finally:
            self._finish(entry)

    def record_now(self, entry: Entry) -> None:
        """Commit a call, and what waits, without awaiting anything. Raises `StoreError`."""
        self._add(entry)
        self._finish(entry)

    def settle(self, live: LiveRollout) -> None:
        """Commit what waits if a call of this rollout is among it."""
        if live.waiting:
            self._flush()

    def _add(self, entry: Entry) -> None:
        self.settle(entry.live)
        entry.live.waiting = True
        self._waiting.append(entry)

    def _finish(self, entry: Entry) -> None:
        if not entry.settled:
            self._flush()
        if entry.fault is not None:
            raise entry.fault

    def _flush(self) -> None:
        entries, self._waiting = self._waiting, []
        faults: Sequence[StoreError | None] = [None] * len(entries)
        if self._store is not None:
            faults = self._store.commit_calls([entry.record() for entry in entries])
        for entry, fault in zip(entries, faults, strict=True):
            entry.settled, entry.fault, entry.live.waiting = True, fault, False
            entry.live.enter(entry)
