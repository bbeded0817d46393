"""Cost against quality: where a curve first reaches a level. Contract: pure."""

from __future__ import annotations

from collections.abc import Iterable


def first_reached(curve: Iterable[tuple[float, float]], level: float) -> float:
    """The least cost at which a curve of (cost, quality) points reaches `level`, linear between its points.

    A point that is above the level already counts as it stands when no cheaper one is below it. Raises ValueError when
    the curve never reaches the level.
    """
    before: tuple[float, float] | None = None
    for cost, quality in sorted(curve):
        if quality >= level:
            if before is None:
                return cost
            return before[0] + (level - before[1]) / (quality - before[1]) * (cost - before[0])
        before = (cost, quality)
    raise ValueError(f"no point of the curve reaches {level}")
