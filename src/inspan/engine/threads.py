"""How many threads a step should use. Contract: a pure state machine; it is told what steps took and knows no clock.

Two threads halve a step that reads much KV on a quiet machine, and make any step many times slower when a neighbour
holds the other core: a parallel region ends when its last thread has run. Neither can be known ahead, so it is
measured: now and then a few steps run at the other setting, and the better one, by mean time per unit of work, goes on.
"""

from __future__ import annotations

PROBE = 4
"""Steps of a trial."""
SOONEST, LATEST = 96, 3072
"""Steps from one trial to the next: soon after a close result, late after a clear one."""
CLEAR = 1.3
"""A trial that cost so many times what the present setting costs is a clear loss."""
MARGIN = 0.95
"""The other setting must cost less than this share of the present one to replace it."""


class ThreadTuner:
    """Chooses between one thread and `most`, for the steps of one model; begins with `threads`."""

    def __init__(self, most: int, threads: int = 1) -> None:
        self.most, self.threads = most, threads
        self._cost = 0.0  # of the present setting: seconds per unit of work, averaged over the last steps
        self._trial: list[float] = []
        self._trying = False
        self._seen = 0
        self._gap = SOONEST

    def choose(self) -> int:
        """Threads for the next step."""
        return self._other() if self._trying else self.threads

    def record(self, seconds: float, work: float) -> None:
        """Say what a step took that ran with `choose()` threads; `work` is any fair measure of its size."""
        if self.most < 2 or work <= 0:
            return
        cost = seconds / work
        if self._trying:
            self._trial.append(cost)
            if len(self._trial) == PROBE or sum(self._trial) > 3 * PROBE * self._cost:
                self._decide(sum(self._trial) / len(self._trial))
            return
        self._seen += 1
        self._cost = cost if self._seen == 1 else self._cost + (cost - self._cost) / min(self._seen, 32)
        if self._seen >= self._gap:
            self._trying, self._trial = True, []

    def _decide(self, trial: float) -> None:
        if trial < MARGIN * self._cost:
            self.threads, self._cost, self._gap = self._other(), trial, SOONEST
        elif trial > CLEAR * self._cost:
            self._gap = min(2 * self._gap, LATEST)
        else:
            self._gap = min(self._gap + SOONEST, LATEST)
        self._trying, self._seen = False, 0

    def _other(self) -> int:
        return self.most if self.threads == 1 else 1
