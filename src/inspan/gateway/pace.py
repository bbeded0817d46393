"""How fast, and how much at once, one key may ask. Contract: pure; the time is given."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from inspan.errors import InputError, RequestError


@dataclass(frozen=True, slots=True)
class Pace:
    """Limits of a key; None: none. `rate` requests a second after a first `burst`; `concurrent` requests at once;
    `body` bytes of a request; `sampled` tokens over all requests."""

    rate: float | None = None
    burst: int = 1
    concurrent: int | None = None
    body: int | None = None
    sampled: int | None = None

    def __post_init__(self) -> None:
        for name in ("rate", "burst", "concurrent", "body", "sampled"):
            value = getattr(self, name)
            fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
            if value is not None and not (fits and (name == "rate" or isinstance(value, int))):
                kind = "number" if name == "rate" else "whole number"
                raise InputError(f"{name} is {value!r}, not a {kind} above 0", where="pace")


@dataclass(slots=True)
class Meter:
    """What a key has used of its pace. Raises `RequestError` (429) for what comes too fast or beside too much."""

    pace: Pace
    running: int = 0
    _level: float = 0.0  # requests that the bucket holds
    _at: float = field(default=-math.inf)

    def begin(self, now: float) -> None:
        """A request comes at `now` seconds; `end` must follow unless this raises."""
        pace = self.pace
        if pace.concurrent is not None and self.running >= pace.concurrent:
            raise RequestError(
                f"{self.running} requests of this key are running, of {pace.concurrent} that may",
                status=429, code="rate_limit_exceeded", retry_after=1.0,
            )  # fmt: skip
        if pace.rate is not None:
            self._level = max(0.0, self._level - max(0.0, now - self._at) * pace.rate)
            self._at = max(now, self._at)
            if self._level + 1 > pace.burst + 1e-9:
                wait = (self._level + 1 - pace.burst) / pace.rate
                raise RequestError(
                    f"this key may ask {pace.rate:g} times a second, {pace.burst} at once; try again in {wait:.2f} s",
                    status=429, code="rate_limit_exceeded", retry_after=wait,
                )  # fmt: skip
            self._level += 1
        self.running += 1

    def end(self) -> None:
        """A request that had begun is over."""
        self.running -= 1
