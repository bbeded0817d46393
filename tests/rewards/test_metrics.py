"""The figures that tables show."""

from __future__ import annotations

import pytest
from making import Maker, solo, swarm

from inspan.rewards.metrics import mean_metrics, recovery, rollout_metrics, summarise
from inspan.trace.records import Terminal, ToolEvent


def test_the_figures_of_a_swarm() -> None:
    figures = rollout_metrics(swarm([4, 2], turns=3), width=2, seconds_per_turn=1.0)
    assert figures == {
        "failed": 0.0,
        "critical_steps": 1 + 2 * 3 + 1 + 3 + 1,
        "parallel_width": 3.0,
        "spawned": 6.0,
        "tool_calls": 6.0 + 6 * 2,
        "invalid_calls": 0.0,
        "turns": 3.0 + 6 * 3,
        "critical_path_s": pytest.approx(3 + 3 * (3 * 1.0 + 2 * 0.5)),
        "item_f1": 1.0,
        "exact": 1.0,
        "finish_rate": 1.0,
    }


@pytest.mark.parametrize(
    ("terminal", "share"), [(Terminal.FAILED, 0.5), (Terminal.TIMED_OUT, 0.5), (Terminal.LIMIT, 0.0)]
)
def test_a_harness_that_fails_is_a_figure(terminal: Terminal, share: float) -> None:
    assert summarise([solo(), solo(terminal=terminal, answer=None)])["failed"] == share


def test_a_figure_that_is_undefined_is_left_out_of_the_mean() -> None:
    alone, together = rollout_metrics(solo()), rollout_metrics(swarm([2]))
    assert "finish_rate" not in alone and "recovery" not in alone
    assert mean_metrics([alone, together])["finish_rate"] == 1.0
    assert mean_metrics([alone, together])["spawned"] == 1.0


def test_recovery_is_a_later_success_in_the_same_session() -> None:
    make = Maker()
    main = make.session()
    (first,) = make.turn(main, "search", ok=False)
    (second,) = make.turn(main, "search", ok=False)
    (call,) = make.turn(main, "assign_task", ok=None)
    child = make.session(main, call)
    make.turn(child, "search")
    rollout = make.rollout()
    assert recovery(rollout) == 0.0, "another agent's success mends nothing"
    rollout.tool_events.insert(1, ToolEvent("whatever the harness calls it", first, "search", True))
    assert recovery(rollout) == 0.5
    rollout.tool_events.append(ToolEvent("", second, "search", True))
    assert recovery(rollout) == 1.0
    assert recovery(solo()) is None


def test_a_row_of_the_table_leaves_out_what_has_no_score() -> None:
    row = summarise([swarm([2]), solo(answer="wrong"), solo(terminal=Terminal.INFRASTRUCTURE)])
    assert (row["n"], row["item_f1"], row["spawn_rate"], row["parallel_width"]) == (2, 0.5, 0.5, 1.0)
    assert summarise([solo(terminal=Terminal.CANCELLED)]) == {"n": 0}
