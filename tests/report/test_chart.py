"""Charts and timelines draw what the numbers say."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from inspan.report import timeline
from inspan.report.chart import HEIGHT, WIDTH, Line, chart, moving_average, nice_ticks, number
from inspan.report.curves import draw

from . import synthetic

values = st.floats(-1e12, 1e12)


@given(values, values)
def test_ticks_are_few_and_enclose_the_range(a, b):
    low, high = min(a, b), max(a, b)
    ticks = nice_ticks(low, high)
    assert 2 <= len(ticks) <= 8 and ticks == sorted(set(ticks))
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    assert ticks[0] <= low + slack and ticks[-1] >= high - slack


@given(st.dictionaries(st.integers(0, 10_000), values, min_size=1, max_size=40), st.booleans())
def test_every_point_lies_inside_the_picture(points, zero):
    svg = chart("t", [Line("l", points)], zero=zero)
    for pair in re.findall(r'points="([^"]*)"', svg):
        for point in pair.split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= WIDTH and -1 <= y <= HEIGHT


@given(st.lists(values, min_size=1, max_size=60))
def test_the_moving_average_keeps_ends_and_range(series):
    smooth = moving_average(series)
    assert len(smooth) == len(series) and smooth[0] == series[0] and smooth[-1] == series[-1]
    slack = 1e-9 * max(1.0, *map(abs, series))
    assert min(series) - slack <= min(smooth) and max(smooth) <= max(series) + slack


def test_a_series_without_points_draws_nothing():
    assert chart("t", [Line("l", {})]) == ""
    assert draw({}) == ([], [])


def test_numbers_are_short():
    assert [number(v) for v in (0, 0.421, 12.345, 1234.5, 23456, 2e-5)] == [
        "0",
        "0.421",
        "12.3",
        "1234",
        "23.46k",
        "2e-05",
    ]


def test_every_metric_is_drawn_once_by_kind_and_term():
    names = [
        "reward",
        "terms/item_f1",
        "weights/r_parallel",
        "critical_steps_by_kind/wide",
        "dropped/equal",
        "odd",
        "entropy",
    ]
    main, more = draw({name: {1: 0.5, 2: 0.6} for name in names})
    page = "".join(main + more)
    assert len(re.findall(r'class="key"', page)) == len(names)
    assert len(more) == 1 and "odd" in more[0]


def lanes_of(width=0, count=4):
    return timeline.layout(synthetic.trajectory(count)["sessions"], width)


def test_children_of_one_turn_run_side_by_side_and_the_slowest_counts():
    lanes, total = lanes_of(count=3)  # children of 2, 3 and 4 turns
    assert [lane.bars[0].start for lane in lanes] == [0, 1, 1, 1]
    assert [lane.bars[-1].end for lane in lanes[1:]] == [3, 4, 5]
    assert total == 1 + 4 + 1


def test_beyond_the_width_children_run_in_waves():
    lanes, total = lanes_of(width=2, count=3)
    assert [lane.bars[0].start for lane in lanes[1:]] == [1, 1, 4]
    assert total == 1 + 3 + 4 + 1


def test_direct_calls_of_a_turn_count_one_step_each():
    calls = [{"id": str(i), "function": {"name": "search", "arguments": "{}"}} for i in range(3)]
    messages = [{"role": "assistant", "tool_calls": calls}, {"role": "assistant", "content": "done"}]
    assert timeline.layout([{"id": "s", "agent": "main", "messages": messages}])[1] == 4


def test_layout_agrees_with_the_gateways_count():
    from inspan.trace.records import Call, Session, ToolCall
    from inspan.trace.steps import measure

    sessions = synthetic.trajectory(5)["sessions"]
    records = [Session(s["id"], s["agent"], s["policy"], True, s["parent"], s["parent_call"]) for s in sessions]
    calls = [
        Call(
            f"{s['id']}-{turn}", s["id"], turn, 0, 1, "stop",
            tuple(ToolCall(i, n, a) for i, n, a in timeline.calls(message)),
        )
        for s in sessions
        for turn, message in enumerate(timeline.turns(s))
    ]  # fmt: skip
    for width in (1, 2, 3, 16):
        assert timeline.layout(sessions, width)[1] == measure(records, calls, width=width).critical_steps
