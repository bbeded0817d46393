"""Weights anneal over the real number of updates, end exactly where they should, and are read from a recipe."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inspan.config.sections import Weight
from inspan.errors import RecipeError
from inspan.schedule import Schedule, constant, parse, progress

numbers = st.floats(-1e6, 1e6)
shares = st.floats(0.0, 1.0)
schedules = st.builds(Schedule, numbers, numbers, st.floats(0.01, 1.0))


@given(schedules, shares)
def test_a_weight_stays_between_its_ends_and_is_exactly_the_end_from_over_on(schedule: Schedule, at: float) -> None:
    low, high = sorted((schedule.start, schedule.end))
    assert low <= schedule.at(at) <= high
    assert schedule.at(0.0) == schedule.start
    if at >= schedule.over:
        assert schedule.at(at) == schedule.end


@given(schedules, shares, shares)
def test_a_weight_moves_in_one_direction(schedule: Schedule, one: float, other: float) -> None:
    early, late = schedule.at(min(one, other)), schedule.at(max(one, other))
    slack = 1e-9 * (abs(schedule.start) + abs(schedule.end))
    assert early <= late + slack if schedule.start <= schedule.end else early >= late - slack


@given(st.integers(1, 500))
def test_an_annealed_weight_is_zero_in_the_last_two_fifths_of_any_run(updates: int) -> None:
    schedule = parse({"from": 0.3, "to": 0.0, "over": 0.6})
    weights = [schedule.at(progress(update, updates)) for update in range(updates)]
    assert weights[0] == 0.3
    assert all((weight == 0.0) == (10 * update >= 6 * updates) for update, weight in enumerate(weights))


@given(numbers, shares)
def test_a_constant_never_changes(value: float, at: float) -> None:
    assert constant(value).at(at) == value and constant(value).constant


def test_a_recipe_gives_a_number_a_table_or_its_own_section() -> None:
    assert parse(1) == constant(1.0)
    assert parse({"from": 0.3, "to": 0}) == Schedule(0.3, 0.0, 0.6)
    assert parse(Weight.model_validate({"from": 0.3, "to": 0.0, "over": 0.5})) == Schedule(0.3, 0.0, 0.5)
    assert parse(Weight.model_validate(2.0)) == constant(2.0)
    assert parse(constant(3.0)) == constant(3.0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0.3", "give a number"),
        (True, "give a number"),
        ({"from": 0.3}, "'to' is missing"),
        ({"from": 0.3, "to": 0.0, "ovr": 0.6}, "unknown key 'ovr'"),
        ({"from": 0.3, "to": 0.0, "over": 0.0}, "share of the updates"),
        ({"from": 0.3, "to": 0.0, "over": 24}, "share of the updates"),
        (float("nan"), "finite"),
    ],
)
def test_a_faulty_weight_is_named(value: object, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse(value, where="rewards.1.weight")


def test_progress_is_a_share_of_the_real_updates() -> None:
    assert [progress(u, 4) for u in range(5)] == [0.0, 0.25, 0.5, 0.75, 1.0]
    for update, updates in ((5, 4), (-1, 4), (0, 0)):
        with pytest.raises(ValueError, match=f"update {update} of {updates}"):
            progress(update, updates)
    with pytest.raises(ValueError, match="progress is 24"):
        constant(1.0).at(24)
