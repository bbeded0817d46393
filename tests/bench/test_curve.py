"""Where a curve of cost against quality reaches a level."""

import pytest

from inspan.bench.curve import first_reached


@pytest.mark.parametrize(
    ("reached", "steps"),
    [(0.6, 15.0), (0.1, 5.0), (0.2, 5.0), (0.8, 20.0)],
)
def test_steps_at_an_f1_lie_between_the_points_of_the_curve(reached: float, steps: float) -> None:
    assert first_reached([(20, 0.8), (5, 0.2), (10, 0.4)], reached) == pytest.approx(steps)


def test_an_f1_that_no_budget_reaches_is_an_error() -> None:
    with pytest.raises(ValueError, match="reaches"):
        first_reached([(5, 0.2)], 0.5)


def test_a_curve_that_falls_counts_where_it_first_arrives() -> None:
    assert first_reached([(5, 0.2), (10, 0.6), (20, 0.5)], 0.55) == pytest.approx(5 + 5 * 0.35 / 0.4)
