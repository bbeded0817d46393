"""The view while a run runs, and the table at its end."""

from __future__ import annotations

import io
import json
import random

import pytest
from rich.console import Console

from inspan.config import from_dict
from inspan.report import make_progress, print_summary
from inspan.report.progress import LiveProgress, PlainProgress, sparkline

from . import synthetic


class Clock:
    """A clock that is moved by hand."""

    now = 0.0

    def __call__(self):
        return self.now


def test_without_a_terminal_each_update_is_one_line():
    lines, clock = [], Clock()
    progress = PlainProgress(lines.append, clock)
    progress.start(from_dict(synthetic.RECIPE), 40)
    for update in range(1, 11):
        clock.now += 6.0
        progress.phase("rollouts")
        progress.update(synthetic.metrics(update, 40, random.Random(0)))
    progress.phase("evaluating trained")
    progress.finish({})
    assert lines[0] == "swarm: 40 updates"
    assert lines[1].startswith("update  1/40  reward 0.302  F1 0.202  width 1.15") and "λ r_parallel 0.2" in lines[1]
    assert lines[10].endswith("3 min 0 s left")
    assert lines[11:] == ["evaluating trained …", "10 of 40 updates in 1 min 0 s"]


def test_a_resumed_run_counts_on_and_estimates_from_its_own_pace():
    lines, clock = [], Clock()
    progress = PlainProgress(lines.append, clock)
    progress.start("r", 40, 30)
    clock.now = 5.0
    progress.update({"reward": 0.5})
    assert lines[0] == "r: 40 updates, going on from 30"
    assert lines[1] == "update 31/40  reward 0.5  45 s left"


def test_metrics_that_are_missing_or_no_numbers_are_left_out():
    lines = []
    progress = PlainProgress(lines.append, Clock())
    progress.start("r", 2)
    progress.update({"reward": None, "item_f1": float("nan"), "entropy": 0.25})
    assert "reward" not in lines[1] and "F1" not in lines[1] and "entropy 0.25" in lines[1]


def test_on_a_terminal_a_panel_shows_the_state():
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=100, height=40, color_system=None)
    progress = LiveProgress(console, clock)
    progress.start(from_dict(synthetic.RECIPE), 40)
    progress.phase("learning")
    clock.now = 12.0
    progress.update(synthetic.metrics(1, 40, random.Random(0)))
    panel = Console(file=io.StringIO(), width=100, record=True)
    panel.print(progress.panel())
    text = panel.export_text()
    progress.finish(None)
    progress.finish(None)
    assert (
        "swarm" in text
        and "1/40" in text
        and "learning" in text
        and "λ r_parallel" in text
        and "7 min 48 s left" in text
    )
    assert "stopped" in out.getvalue()


def test_the_console_decides_which_view():
    assert isinstance(make_progress(Console(file=io.StringIO())), PlainProgress)
    terminal = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"})
    assert isinstance(make_progress(terminal), LiveProgress)


@pytest.mark.parametrize(
    ("values", "line"), [([], ""), ([1.0], "▄"), ([1.0, 1.0], "▄▄"), ([0.0, 0.5, 1.0], "▁▅█"), ([1.0, 0.0], "█▁")]
)
def test_sparklines_span_the_range(values, line):
    assert sparkline(values) == line
    assert len(sparkline(values * 50, width=20)) <= 20


def test_the_table_shows_every_arm_and_kind_without_a_terminal(tmp_path):
    summary = json.loads((synthetic.write_run(tmp_path / "run") / "summary.json").read_text())
    out = io.StringIO()
    print_summary(summary, Console(file=out))
    text = out.getvalue()
    for wanted in (
        "On held-out tasks",
        "warm start",
        "single agent",
        "trained",
        "0.780",
        "narrow tasks",
        "path s",
    ):
        assert wanted in text
    assert "\x1b" not in text and "recovery" not in text


def test_a_summary_without_arms_says_so():
    out = io.StringIO()
    print_summary({"arms": None}, Console(file=out))
    assert out.getvalue() == "no arm was evaluated\n"


def test_what_never_started_tells_no_time() -> None:
    lines: list[str] = []
    PlainProgress(lines.append).finish(None)
    assert lines == []
