"""The paired interval: covers what it should, needs pairs, and sees a difference that a pooled test would not."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from inspan.bench.paired import paired_difference
from inspan.errors import InputError


def arms(rng: np.random.Generator, shift: float, tasks: int = 60) -> tuple[dict, dict]:
    hard = rng.normal(0, 1, tasks)
    keys = [(f"t{i}", s) for i in range(tasks) for s in range(2)]
    a = {k: hard[int(k[0][1:])] + shift + rng.normal(0, 0.1) for k in keys}
    return a, {k: hard[int(k[0][1:])] + rng.normal(0, 0.1) for k in keys}


def test_a_small_shift_beneath_hard_and_easy_tasks_is_seen() -> None:
    a, b = arms(np.random.default_rng(0), 0.1)
    found = paired_difference(a, b)
    assert found.excludes_zero and found.low < 0.1 < found.high and found.n == 60
    assert stats.ttest_ind(list(a.values()), list(b.values())).pvalue > 0.05


def test_the_interval_agrees_with_scipys_bootstrap_and_swaps_its_sign() -> None:
    rng = np.random.default_rng(1)
    a = {(f"t{i}", 0): float(rng.random()) for i in range(40)}
    b = {key: float(rng.random()) for key in a}
    deltas = [a[key] - b[key] for key in sorted(a)]
    reference = stats.bootstrap((deltas,), np.mean, method="percentile", n_resamples=4000, random_state=0)
    found, swapped = paired_difference(a, b), paired_difference(b, a)
    assert found.low == pytest.approx(reference.confidence_interval.low, abs=0.02)
    assert found.high == pytest.approx(reference.confidence_interval.high, abs=0.02)
    assert swapped.mean == pytest.approx(-found.mean)


def test_about_one_in_twenty_intervals_misses_a_true_zero() -> None:
    rng = np.random.default_rng(2)
    misses = sum(paired_difference(*arms(rng, 0.0, 30), resamples=500).excludes_zero for _ in range(200))
    assert 2 <= misses <= 26


def test_arms_on_other_tasks_are_refused() -> None:
    with pytest.raises(InputError, match="not paired"):
        paired_difference({("a", 0): 1.0}, {("b", 0): 1.0})
    with pytest.raises(InputError, match="not paired"):
        paired_difference({}, {})
