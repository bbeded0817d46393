"""What the dispatcher measures. Contract: counts and times only; it decides nothing.

`report()` gives the figures since the last report. The share of rollouts without a score (`None`) is kept by policy
version: it is an alarm, for a model may learn to break what it would fail. Times come from the injected clock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from inspan.trace.records import Rollout, Terminal


@dataclass(frozen=True, slots=True)
class DroppedRollout:
    """What was thrown away: its length (sampled tokens, model calls) and reward (None when it had none)."""

    rollout: str
    terminal: Terminal
    tokens: int
    calls: int
    reward: float | None


@dataclass(slots=True)
class Meter:
    """Counters since the last `report()`; the shares of None and the staleness histogram are of the whole run."""

    clock: Callable[[], float]
    staleness: Counter[int] = field(default_factory=Counter)  # versions → groups
    dropped: list[DroppedRollout] = field(default_factory=list)  # since the last report
    _ended: defaultdict[int, Counter[Terminal]] = field(default_factory=lambda: defaultdict(Counter))
    _terminals: Counter[Terminal] = field(default_factory=Counter)
    _retried: int = 0
    _opened: dict[str, float] = field(default_factory=dict)
    _dispatched: dict[str, float] = field(default_factory=dict)
    _waits: list[float] = field(default_factory=list)
    _queues: list[float] = field(default_factory=list)
    _lags: list[int] = field(default_factory=list)

    def opened(self, group: str) -> None:
        """A group was opened."""
        self._opened[group] = self.clock()

    def dispatched(self, group: str) -> None:
        """A member was dispatched; its time since the opening counts as time in the queue."""
        self._queues.append(self.clock() - self._opened.setdefault(group, self.clock()))

    def landed(self, rollout: Rollout, *, retried: bool) -> None:
        """An attempt ended; `retried` when that was not the rollout's end."""
        self._retried += retried
        if not retried:
            self._terminals[rollout.terminal] += 1
            self._ended[rollout.version_started][rollout.terminal] += 1
        self._dispatched[rollout.group] = self.clock()

    def taken(self, group: str, staleness: int) -> None:
        """A group was handed out, `staleness` versions after it was opened."""
        self.staleness[staleness] += 1
        self._lags.append(staleness)
        ended = self._dispatched.get(group)
        if ended is not None:
            self._waits.append(self.clock() - ended)

    def drop(self, rollout: Rollout, reward: float | None) -> DroppedRollout:
        """A rollout was thrown away."""
        tokens = sum(len(node.tokens) - node.start for node in rollout.nodes)
        entry = DroppedRollout(rollout.id, rollout.terminal, tokens, len(rollout.calls), reward)
        self.dropped.append(entry)
        return entry

    def forget(self, group: str) -> None:
        """A group left the ledger."""
        self._opened.pop(group, None)
        self._dispatched.pop(group, None)

    def none_share(self, version: int) -> float:
        """Share of the rollouts begun at a version that the infrastructure left without a score; 0 if none ended."""
        ended = self._ended.get(version, Counter())
        return ended[Terminal.INFRASTRUCTURE] / max(1, ended.total())

    def report(self) -> dict[str, float]:
        """Figures since the last report: ends, shares, means of times in seconds and of staleness in versions."""
        ends = max(1, self._terminals.total())
        figures = {f"ended_{terminal.value}": float(self._terminals[terminal]) for terminal in Terminal}
        figures |= {
            "none_share": self._terminals[Terminal.INFRASTRUCTURE] / ends,
            "retries": float(self._retried),
            "staleness_mean": _mean(self._lags),
            "staleness_max": float(max(self._lags, default=0)),
            "queue_s_mean": _mean(self._queues),
            "buffer_s_mean": _mean(self._waits),
            "dropped": float(len(self.dropped)),
        }
        if self.dropped:
            rewards = [entry.reward for entry in self.dropped if entry.reward is not None]
            figures["dropped_tokens_mean"] = _mean([entry.tokens for entry in self.dropped])
            if rewards:
                figures["dropped_reward_mean"] = _mean(rewards)
        self._terminals.clear()
        self.dropped.clear()
        self._retried = 0
        for values in (self._waits, self._queues, self._lags):
            values.clear()
        return figures


def _mean(values: list[int] | list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
