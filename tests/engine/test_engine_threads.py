"""The number of threads follows what steps cost: quickly up when that helps, quickly back when it hurts."""

from __future__ import annotations

from inspan.engine.threads import LATEST, PROBE, SOONEST, ThreadTuner


def play(tuner: ThreadTuner, steps: int, seconds: dict[int, float]) -> dict[int, int]:
    """Run steps that take `seconds` by thread count; how many ran at each."""
    used = dict.fromkeys((1, 2), 0)
    for _ in range(steps):
        threads = tuner.choose()
        used[threads] += 1
        tuner.record(seconds[threads], 1.0)
    return used


def test_a_second_thread_that_helps_is_kept():
    tuner = ThreadTuner(2)
    used = play(tuner, 1000, {1: 1.0, 2: 0.6})
    assert tuner.threads == 2 and used[2] > 800


def test_a_second_thread_that_hurts_costs_little_and_less_and_less():
    tuner = ThreadTuner(2)
    first = play(tuner, 2000, {1: 1.0, 2: 30.0})
    later = play(tuner, 2 * LATEST, {1: 1.0, 2: 30.0})
    assert tuner.threads == 1
    assert first[2] <= 5 and later[2] <= 3  # a trial this bad ends at its first step


def test_a_neighbour_that_comes_and_goes_is_noticed():
    tuner = ThreadTuner(2)
    play(tuner, 500, {1: 1.0, 2: 0.6})
    play(tuner, 2 * SOONEST + 200, {1: 1.1, 2: 9.0})
    assert tuner.threads == 1
    play(tuner, 4000, {1: 1.0, 2: 0.6})
    assert tuner.threads == 2


def test_steps_of_unknown_size_teach_nothing_and_one_core_has_no_choice():
    tuner = ThreadTuner(2)
    for _ in range(10 * SOONEST):
        tuner.record(1.0, 0.0)
    assert tuner.choose() == 1
    alone = ThreadTuner(1)
    assert play(alone, 10 * SOONEST, {1: 1.0})[1] == 10 * SOONEST


def test_a_trial_is_over_after_a_few_steps():
    tuner = ThreadTuner(2)
    play(tuner, SOONEST, {1: 1.0, 2: 1.0})
    assert play(tuner, SOONEST, {1: 1.0, 2: 1.0})[2] == PROBE
