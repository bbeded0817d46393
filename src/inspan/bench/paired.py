"""Paired comparison of two arms on the same tasks. Contract: pure; the generator decides the resampling.

Tasks are resampled as clusters (all seeds of a task together), since two runs on one task are not independent; the
interval is the percentile bootstrap's (Efron & Tibshirani 1993).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from inspan.errors import InputError


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of a − b over paired observations, with its confidence interval. `n` counts tasks."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return self.low > 0 or self.high < 0


def paired_difference(
    a: Mapping[tuple[str, int], float],
    b: Mapping[tuple[str, int], float],
    *,
    level: float = 0.95,
    resamples: int = 4000,
    seed: int = 0,
) -> Difference:
    """The difference of two arms whose scores are keyed by (task, seed).

    Raises InputError unless both have the same keys: a comparison on other tasks, or with failures left out, is none.
    """
    if a.keys() != b.keys() or not a:
        odd = sorted(a.keys() ^ b.keys())[:3]
        raise InputError(f"the arms are not paired: {odd or 'no observations'}", hint="run both on the same tasks")
    tasks = sorted({task for task, _ in a})
    place = {task: i for i, task in enumerate(tasks)}
    sums, counts = np.zeros(len(tasks)), np.zeros(len(tasks))
    for key, value in a.items():
        sums[place[key[0]]] += value - b[key]
        counts[place[key[0]]] += 1
    draws = np.random.default_rng(seed).integers(0, len(tasks), (resamples, len(tasks)))
    means = sums[draws].sum(1) / counts[draws].sum(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Difference(float(sums.sum() / counts.sum()), float(low), float(high), len(tasks))
