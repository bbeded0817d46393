"""The swarm's terms: what each pays for, and what it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import Maker, solo, swarm

from inspan.errors import RecipeError
from inspan.rewards.invalid_calls import InvalidCalls
from inspan.rewards.r_finish import finish_rate
from inspan.rewards.registry import resolve
from inspan.trace.records import Call, Rollout, ToolEvent


def value(name: str, rollout: Rollout, **params: float) -> float:
    found = resolve(name, params)(rollout)
    assert isinstance(found, float)
    return found


# ---- r_parallel -------------------------------------------------------------------------------------------------


def test_parallel_work_pays_by_its_width_not_by_its_number() -> None:
    assert value("r_parallel", solo()) == 0.0
    assert value("r_parallel", swarm([1] * 8)) == 0.0, "serial spawning earns nothing"
    assert value("r_parallel", swarm([4]), w_max=8) == pytest.approx(3 / 7)
    assert value("r_parallel", swarm([8])) == value("r_parallel", swarm([12])) == 1.0
    assert value("r_parallel", swarm([8, 1]), w_max=8) == pytest.approx(3.5 / 7)


def test_the_zoos_counting_variant_is_earned_by_serial_spawning() -> None:
    assert value("r_parallel_count", swarm([1] * 8), n_max=8) == 1.0
    assert value("r_parallel_count", swarm([4]), n_max=8) == 0.5


@given(st.lists(st.integers(0, 6), max_size=5), st.floats(1.5, 10))
def test_r_parallel_is_the_formula(stages: list[int], w_max: float) -> None:
    assigned = [size for size in stages if size]
    width = sum(assigned) / len(assigned) if assigned else 0
    expected = min(max((width - 1) / (w_max - 1), 0), 1)
    assert value("r_parallel", swarm(stages, turns=1), w_max=w_max) == pytest.approx(expected)


# ---- r_finish ---------------------------------------------------------------------------------------------------


def one_child(**options: object) -> Rollout:
    """An orchestrator with one sub-agent that works as told: its tools go `ok`, it ends with `content`, `finish`."""
    make = Maker()
    main = make.session()
    (call,) = make.turn(main, "assign_task", ok=None)
    child = make.session(main, call)
    if options.get("work", True):
        make.turn(child, "search", ok=bool(options.get("ok", True)))
    last = ("search",) if options.get("calling") else ()
    make.turn(child, *last, content=str(options.get("content", "found")), finish=str(options.get("finish", "")))
    if "told" in options:
        message = {"role": "tool", "tool_call_id": call, "content": options["told"]}
        make.leaf[main] = make.node(main, make.leaf[main], message, (4,), 0)
    make.turn(main, content="an answer")
    return make.rollout()


def test_a_sub_task_that_worked_and_reported_is_validated() -> None:
    assert finish_rate(one_child()) == 1.0
    assert finish_rate(one_child(told="found")) == 1.0


@pytest.mark.parametrize(
    "fault",
    [
        {"work": False},  # answered without looking
        {"ok": False},  # every tool call failed
        {"content": " \n"},  # said nothing
        {"calling": True},  # was cut off while still calling tools
        {"finish": "length"},  # its result was cut off
        {"told": "error: the sub-agent ran out of steps"},  # its parent was told of an error
    ],
)
def test_a_sub_task_that_only_seems_to_work_is_not_validated(fault: dict[str, object]) -> None:
    assert finish_rate(one_child(**fault)) == 0.0


def test_a_limit_or_a_failed_assignment_is_not_validated() -> None:
    rollout = one_child()
    rollout.calls.append(Call("x", "s1", 2, None, None, "limit"))
    assert finish_rate(rollout) == 0.0
    rollout = one_child()
    rollout.tool_events.append(ToolEvent("s0", "c0-0", "assign_task", False))
    assert finish_rate(rollout) == 0.0


def test_r_finish_is_a_share_and_zero_when_nothing_was_assigned() -> None:
    assert value("r_finish", solo()) == 0.0
    rollout = swarm([4])
    rollout.tool_events = [event for event in rollout.tool_events if event.session != "s2"]
    assert value("r_finish", rollout) == 0.75


def test_the_truth_is_never_looked_at() -> None:
    assert value("r_finish", swarm([2], answer="wrong")) == 1.0


# ---- invalid calls ----------------------------------------------------------------------------------------------


def broken(*turns: int, trainable: bool = True) -> Rollout:
    make = Maker()
    main = make.session(trainable=trainable)
    for wrong in turns:
        make.turn(main, "search", *["!search"] * wrong)
    return make.rollout()


def test_each_invalid_call_is_fined_up_to_the_cap() -> None:
    assert value("invalid_calls", broken(0, 0)) == 0.0
    assert value("invalid_calls", broken(1, 2)) == pytest.approx(-0.3)
    assert value("invalid_calls", broken(9), penalty=0.2, cap=0.7) == pytest.approx(-0.7)


def test_a_frozen_sub_agents_invalid_calls_are_not_the_orchestrators_fault() -> None:
    assert value("invalid_calls", broken(3, trainable=False)) == 0.0


@given(st.lists(st.integers(0, 4), max_size=6), st.floats(0, 1), st.floats(0, 2))
def test_the_fines_of_the_turns_sum_to_the_fine(turns: list[int], penalty: float, cap: float) -> None:
    term, rollout = InvalidCalls(penalty, cap), broken(*turns)
    parts = term.turns(rollout)
    assert sum(parts.values()) == term(rollout) == pytest.approx(-min(cap, penalty * sum(turns)))
    assert all(part < 0 and turns[turn] > 0 for turn, part in parts.items())


# ---- outcome ----------------------------------------------------------------------------------------------------


def test_outcome_terms_score_the_answer_and_have_no_score_without_a_truth() -> None:
    assert value("exact_match", solo()) == value("item_f1", solo()) == 1.0
    assert value("exact_match", solo(answer="x")) == value("item_f1", solo(answer=None)) == 0.0
    unknown = solo()
    unknown.task = replace(unknown.task, answer=None)
    assert resolve("item_f1")(unknown) is None and resolve("exact_match")(unknown) is None


# ---- by name ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("item_f2", {}, "did you mean 'item_f1'"),
        ("nonsense", {}, "module:function"),
        ("r_parallel", {"wmax": 8}, "unknown parameter 'wmax' .*did you mean 'w_max'"),
        ("r_parallel", {"w_max": 1}, "above 1"),
        ("r_parallel", {"w_max": "eight"}, "wrong type"),
        ("r_parallel_count", {"n_max": 0}, "at least 1"),
        ("invalid_calls", {"cap": -1}, "not negative"),
        ("item_f1", {"x": 1}, "it takes no parameters"),
        ("no_such_module:f", {}, "no module 'no_such_module'"),
        ("my_terms:polit", {}, "my_terms:polite"),
        ("my_terms:LIMIT", {}, "not a function"),
        ("my_terms:nothing", {}, "cannot be called as a reward"),
        ("my_terms:polite", {"x": 1}, "unknown parameter 'x'"),
    ],
)
def test_a_faulty_name_or_parameter_says_what_would_be_right(
    my_terms: None, name: str, params: dict[str, object], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        resolve(name, params)


def test_a_users_term_is_found_in_the_working_directory_and_gets_its_parameters(my_terms: None) -> None:
    assert resolve("my_terms:polite")(solo()) == 1.0
    assert resolve("my_terms:bounded", {"limit": 3})(solo()) == 3.0


@pytest.fixture
def my_terms(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_terms.py").write_text(
        "LIMIT = 3\n"
        "def polite(rollout): return 1.0\n"
        "def bounded(rollout, *, limit): return float(limit)\n"
        "def nothing(): return 0.0\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "my_terms", raising=False)
