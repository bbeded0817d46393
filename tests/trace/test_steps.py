"""Critical steps: the arithmetic of the swarm's budget, while a rollout runs and after."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import Maker, solo, swarm

from inspan.trace.records import Rollout, Session, ToolEvent
from inspan.trace.steps import StepTree, critical_path_s, measure, spent


def cost(rollout: Rollout, width: int | None = None) -> int:
    return measure(rollout.sessions, rollout.calls, width=width).critical_steps


def test_a_plain_turn_costs_one_and_parallel_direct_calls_are_not_cheaper_than_serial_ones() -> None:
    assert cost(solo(turns=4)) == 4
    make = Maker()
    main = make.session()
    make.turn(main, *["search"] * 5)
    make.turn(main, content="done")
    assert cost(make.rollout()) == 6


def test_a_stage_costs_its_slowest_child_and_one_for_the_turn() -> None:
    assert cost(swarm([8], turns=3)) == (1 + 3) + 1
    assert cost(swarm([4, 4], turns=3)) == 2 * (1 + 3) + 1
    assert cost(swarm([1] * 8, turns=3)) == 8 * (1 + 3) + 1


@pytest.mark.parametrize(("width", "waves"), [(None, 1), (8, 1), (7, 2), (4, 2), (3, 3), (1, 8)])
def test_sub_agents_beyond_the_width_go_in_waves(width: int | None, waves: int) -> None:
    assert cost(swarm([8], turns=3), width) == 1 + waves * 3 + 1


def test_a_wave_costs_its_dearest_child_in_the_order_of_the_tool_calls() -> None:
    make = Maker()
    main = make.session()
    calls = make.turn(main, *["assign_task"] * 4)
    for turns, call in reversed(list(zip([5, 1, 2, 4], calls, strict=True))):  # the order of arrival does not matter
        make.worker(main, call, turns)
    assert cost(make.rollout(), width=2) == 1 + 5 + 4
    assert cost(make.rollout(), width=3) == 1 + 5 + 4
    assert cost(make.rollout()) == 1 + 5


def test_direct_calls_beside_assignments_and_failed_assignments_cost_a_step_each() -> None:
    make = Maker()
    main = make.session()
    calls = make.turn(main, "create_subagent", "create_subagent", "assign_task", "assign_task", "assign_task")
    make.worker(main, calls[2], 3)
    make.worker(main, calls[3], 2)
    assert cost(make.rollout()) == 3 + 3


def test_a_refused_call_costs_nothing_and_an_invalid_tool_call_costs_a_step() -> None:
    make = Maker()
    main = make.session()
    make.turn(main, "!search", "!search")
    rollout = make.rollout()
    refused = make.calls[0].__class__("x", main, 1, 1, None, "limit")
    rollout.calls.append(refused)
    steps = measure(rollout.sessions, rollout.calls)
    assert (steps.critical_steps, steps.turns, steps.invalid_calls, steps.tool_calls) == (2, 1, 2, 2)


def test_mean_width_is_assigned_tasks_over_stages_of_the_root() -> None:
    steps = measure(*graph(swarm([4, 2, 1])))
    assert (steps.assigned, steps.stages, steps.parallel_width) == (7, 3, 7 / 3)
    assert measure(*graph(solo())).parallel_width == 0.0
    make = Maker()
    main = make.session()
    (call,) = make.turn(main, "assign_task")
    child = make.session(main, call)
    for inner in make.turn(child, "assign_task", "assign_task"):
        make.worker(child, inner)
    steps = measure(*graph(make.rollout()))
    assert (steps.assigned, steps.stages, steps.parallel_width) == (3, 1, 1.0), (
        "a child's own stages are not the root's"
    )


def graph(rollout: Rollout) -> tuple[list[Session], list]:
    return rollout.sessions, rollout.calls


# ---- against the definition -------------------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn) -> Rollout:
    """Any tree of agents: turns with direct calls and delegated ones, up to three levels deep."""
    make = Maker()

    def agent(session: str, depth: int) -> None:
        for _ in range(draw(st.integers(0, 3))):
            kinds = draw(st.lists(st.sampled_from(["search", "assign_task"]), max_size=4))
            calls = make.turn(session, *kinds)
            started = [c for c, kind in zip(calls, kinds, strict=True) if kind == "assign_task" and draw(st.booleans())]
            if depth < 2:
                for call in draw(st.permutations(started)):
                    agent(make.session(session, call), depth + 1)

    agent(make.session(), 0)
    return make.rollout()


def naive(rollout: Rollout, session: str, width: int) -> int:
    """The definition, word for word."""
    child = {s.parent_call: s.id for s in rollout.sessions if s.parent == session}
    total = 0
    for call in rollout.calls:
        if call.session == session:
            costs = [naive(rollout, child[t.id], width) for t in call.tool_calls if t.id in child]
            total += max(1, len(call.tool_calls) - len(costs))
            while costs:
                total += max(costs[:width])
                costs = costs[width:]
    return total


@given(trees(), st.integers(1, 4))
def test_steps_are_the_definition(rollout: Rollout, width: int) -> None:
    assert cost(rollout, width) == naive(rollout, "s0", width)
    assert cost(rollout) == naive(rollout, "s0", 99)
    assert spent("s0", rollout.sessions, rollout.calls, width=width) == cost(rollout, width)


@given(trees(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_tree_is_the_same_in_whatever_order_it_grew(rollout: Rollout, width: int, rng) -> None:
    tree = StepTree(width=width)
    queues = [[("s", s)] for s in rollout.sessions]
    for call in rollout.calls:
        queues[int(call.session[1:])].append(("c", call))
    waiting, there = dict(enumerate(queues)), set()
    while any(waiting.values()):
        ready = [i for i, q in waiting.items() if q and (rollout.sessions[i].parent in (None, *there))]
        kind, record = waiting[chosen := rng.choice(ready)].pop(0)
        there.add(rollout.sessions[chosen].id)
        tree.add_session(record) if kind == "s" else tree.add_call(record)
    for session in rollout.sessions:
        assert tree.spent(session.id) == naive(rollout, session.id, width)


@given(trees(), st.integers(1, 4))
def test_no_limit_on_the_width_is_fastest_and_every_turn_costs(rollout: Rollout, width: int) -> None:
    turns = sum(call.session == "s0" for call in rollout.calls)
    assert turns <= cost(rollout) <= cost(rollout, width) <= cost(rollout, 1)


@given(trees())
def test_the_time_path_with_unit_latencies_is_turns_and_tools_along_the_slowest_children(rollout: Rollout) -> None:
    def seconds(session: str) -> float:
        child = {s.parent_call: s.id for s in rollout.sessions if s.parent == session}
        total = 0.0
        for call in rollout.calls:
            if call.session == session:
                direct = [0.5 for t in call.tool_calls if t.id not in child]
                total += 2.0 + max(direct, default=0.0)
                total += max((seconds(child[t.id]) for t in call.tool_calls if t.id in child), default=0.0)
        return total

    found = critical_path_s(rollout.sessions, rollout.calls, rollout.tool_events, seconds_per_turn=2.0)
    assert found == pytest.approx(seconds("s0"))


def test_retries_of_one_call_take_their_time_one_after_the_other() -> None:
    rollout = solo()
    (tool_call,) = rollout.calls[0].tool_calls
    events = [ToolEvent("s0", tool_call.id, "search", ok, 2.0) for ok in (False, True)]
    assert critical_path_s(rollout.sessions, rollout.calls, events, seconds_per_turn=1.0) == 2 + 4.0


# ---- the hard stop ----------------------------------------------------------------------------------------------


def test_a_child_may_spend_what_its_parent_had_left() -> None:
    make = Maker()
    main = make.session()
    make.turn(main, "search", "search")  # 2
    calls = make.turn(main, "create_subagent", "assign_task", "assign_task")  # 1 direct
    first = make.session(main, calls[1])
    tree = StepTree(make.sessions, make.calls)
    assert tree.allowance(first, 10) == 7, "the sibling that has not called yet is no direct call"
    make.turn(first, "search")
    second = make.worker(main, calls[2], 3)
    tree = StepTree(make.sessions, make.calls)
    assert (tree.left(first, 10), tree.left(second, 10)) == (6, 4)
    assert tree.left(main, 10) == 10 - 2 - 1 - 3
    assert tree.left(main, None) is None and tree.allowance(first, None) is None


def test_a_later_wave_has_less() -> None:
    make = Maker()
    main = make.session()
    calls = make.turn(main, *["assign_task"] * 3)
    make.worker(main, calls[0], 3)
    make.worker(main, calls[1], 4)
    third = make.session(main, calls[2])
    assert StepTree(make.sessions, make.calls, width=2).allowance(third, 10) == 10 - 1 - 4
    assert StepTree(make.sessions, make.calls, width=3).allowance(third, 10) == 10 - 1


def test_a_grandchild_has_what_its_own_parent_has_left() -> None:
    make = Maker()
    main = make.session()
    (call,) = make.turn(main, "assign_task")
    child = make.session(main, call)
    make.turn(child, "search", "search")
    (inner,) = make.turn(child, "assign_task")
    grandchild = make.session(child, inner)
    assert StepTree(make.sessions, make.calls).allowance(grandchild, 10) == 10 - 1 - 2 - 1


@given(st.data(), st.integers(1, 12), st.integers(1, 3))
def test_agents_that_stop_when_nothing_is_left_keep_the_whole_within_the_limit(data, limit: int, width: int) -> None:
    make = Maker()

    def left(session: str) -> int:
        found = StepTree(make.sessions, make.calls, width=width).left(session, limit)
        assert found is not None
        return found

    def agent(session: str, depth: int) -> None:
        while left(session) > 0 and data.draw(st.booleans()):
            tasks = data.draw(st.integers(0, 4)) if depth < 2 else 0
            for call in make.turn(session, *["assign_task"] * tasks):
                agent(make.session(session, call), depth + 1)

    agent(make.session(), 0)
    assert cost(make.rollout(), width) <= limit


def test_a_child_that_names_no_known_call_is_not_free() -> None:
    make = Maker()
    main = make.session()
    make.turn(main, content="x")
    stray = make.worker(main, "unknown", 3)
    tree = StepTree(make.sessions, make.calls)
    assert tree.total() == 4
    assert tree.left(stray, 10) == 10 - 4


def test_a_session_without_its_parent_or_entered_twice_is_refused() -> None:
    tree = StepTree([Session("a", "main", "policy", True)])
    with pytest.raises(ValueError, match="already there"):
        tree.add_session(Session("a", "main", "policy", True))
    with pytest.raises(ValueError, match="not there"):
        tree.add_session(Session("b", "main", "policy", True, "x", "c"))
    with pytest.raises(ValueError, match="width"):
        StepTree(width=0)
