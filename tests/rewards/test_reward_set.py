"""How terms become a reward: None is not 0, groups are compared on the same terms, a broken judge stalls nobody."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import Maker, solo, swarm

from inspan.config.sections import Reward
from inspan.errors import RecipeError
from inspan.rewards.base import process
from inspan.rewards.registry import resolve
from inspan.rewards.reward_set import RewardSet, WeightedTerm
from inspan.schedule import Schedule, constant
from inspan.trace.records import Rollout, Terminal


def use(name: str, term: Any, weight: float = 1.0, *, optional: bool = False, inline: bool = False) -> WeightedTerm:
    return WeightedTerm(name, term, constant(weight), optional, inline)


def by_member(values: list[float | None]) -> Callable[[Rollout], float | None]:
    return lambda rollout: values[rollout.member]


def group(count: int, **options: Any) -> list[Rollout]:
    return [solo(id=f"r{i}", member=i, **options) for i in range(count)]


async def rewards(terms: list[WeightedTerm], rollouts: list[Rollout], progress: float = 0.0) -> list[float | None]:
    return [one.reward for one in await RewardSet(terms).score(rollouts, progress)]


async def test_the_reward_is_the_weighted_sum_at_this_point_of_the_run() -> None:
    recipe = [
        Reward(use="item_f1"),
        Reward.model_validate({"use": "r_parallel", "w_max": 4, "weight": {"from": 0.3, "to": 0.0, "over": 0.5}}),
        Reward.model_validate({"use": "invalid_calls", "weight": 0.5}),
    ]
    terms = RewardSet.from_recipe(recipe)
    (early,), (late,) = await terms.score([swarm([4])], 0.25), await terms.score([swarm([4])], 0.5)
    assert early.reward == pytest.approx(1.0 + 0.15)
    assert late.reward == 1.0
    assert early.terms == late.terms == {"item_f1": 1.0, "r_parallel": 1.0, "invalid_calls": 0.0}
    assert terms.weights(0.25) == {"item_f1": 1.0, "r_parallel": 0.15, "invalid_calls": 0.5}


@pytest.mark.parametrize(
    "change", [{"terminal": Terminal.INFRASTRUCTURE}, {"terminal": Terminal.CANCELLED}, {"complete": False}]
)
async def test_what_was_not_the_models_doing_has_no_reward(change: dict[str, Any]) -> None:
    scored = await RewardSet([use("a", lambda r: 1.0)]).score([solo(), solo(**change)], 0.0)
    assert [one.reward for one in scored] == [1.0, None]
    assert scored[1].terms == {"a": None}


@pytest.mark.parametrize("terminal", [Terminal.FAILED, Terminal.TIMED_OUT])
async def test_a_failure_of_the_harness_is_scored_as_one_and_its_fines_stand(terminal: Terminal) -> None:
    make = Maker()
    make.turn(make.session(), "!search")
    rollout = make.rollout(answer=None, terminal=terminal)

    def never(_: Rollout) -> float:
        raise AssertionError("an outcome term is not asked about a failure")

    terms = [
        use("judge", never),
        use("item_f1", resolve("item_f1"), inline=True),
        use("fine", resolve("invalid_calls")),
    ]
    (scored,) = await RewardSet(terms).score([rollout], 0.0)
    assert scored.terms == {"judge": 0.0, "item_f1": 0.0, "fine": -0.1}
    assert scored.reward == pytest.approx(-0.1)
    assert scored.turn_rewards == {0: -0.1}


async def test_a_users_process_term_is_computed_for_failures_too() -> None:
    assert await rewards([use("p", process(lambda r: -1.0))], [solo(terminal=Terminal.FAILED)]) == [-1.0]


async def test_a_required_term_without_a_score_leaves_its_rollout_unscored() -> None:
    terms = [use("a", by_member([1.0, None, 0.0])), use("b", lambda r: 1.0)]
    assert await rewards(terms, group(3)) == [2.0, None, 1.0]


async def test_an_optional_term_is_skipped_for_the_whole_group() -> None:
    terms = [use("a", lambda r: 1.0), use("b", by_member([5.0, None, 5.0]), optional=True)]
    scored = await RewardSet(terms).score(group(3), 0.0)
    assert [one.reward for one in scored] == [1.0, 1.0, 1.0]
    assert all(one.terms == {"a": 1.0, "b": None} for one in scored)


async def test_an_unscored_member_does_not_make_the_others_lose_an_optional_term() -> None:
    terms = [use("a", by_member([1.0, None])), use("b", by_member([5.0, None]), optional=True)]
    assert await rewards(terms, group(2)) == [6.0, None]


async def test_a_term_annealed_to_zero_is_shown_and_no_longer_needed() -> None:
    term = WeightedTerm("a", by_member([1.0, None]), Schedule(1.0, 0.0, 0.5))
    scored = await RewardSet([term, use("b", lambda r: 2.0)]).score(group(2), 0.5)
    assert [(one.reward, one.terms["a"]) for one in scored] == [(2.0, 1.0), (2.0, None)]


@pytest.mark.parametrize("fault", ["raise", "exit", float("nan"), float("inf"), -1e308, "good", [1.0], 1j, 10**400])
async def test_a_term_at_fault_gives_no_score_is_counted_and_told_once(fault: Any, caplog) -> None:
    def term(rollout: Rollout) -> Any:
        if fault == "raise":
            raise RuntimeError("the judge is down")
        if fault == "exit":
            raise SystemExit(1)
        return fault

    terms = RewardSet([use("judge", term)])
    with caplog.at_level(logging.WARNING):
        scored = await terms.score(group(3), 0.0)
    assert [one.reward for one in scored] == [None] * 3
    assert terms.failures == {"judge": 3}
    assert len(caplog.records) == 1 and "judge" in caplog.text and "unscored" in caplog.text


async def test_on_a_rollout_without_an_answer_a_raising_outcome_term_counts_as_zero() -> None:
    def term(rollout: Rollout) -> float:
        assert rollout.answer is not None
        return float(len(rollout.answer))

    terms = RewardSet([use("length", term)])
    scored = await terms.score([solo(answer="four"), solo(answer=None, terminal=Terminal.LIMIT)], 0.0)
    assert [one.reward for one in scored] == [4.0, 0.0]
    assert not terms.failures


async def test_a_term_that_takes_its_rollout_to_pieces_leaves_the_record_whole() -> None:
    def term(rollout: Rollout) -> float:
        for part in (rollout.nodes, rollout.calls, rollout.sessions, rollout.tool_events, rollout.metrics):
            part.clear()
        return 1.0

    rollout = solo()
    nodes, calls = list(rollout.nodes), list(rollout.calls)
    assert await rewards([use("wild", term)], [rollout]) == [1.0]
    assert nodes and (rollout.nodes, rollout.calls) == (nodes, calls)


async def test_async_terms_and_callable_objects_work_and_integers_are_numbers() -> None:
    async def plain(rollout: Rollout) -> float:
        await asyncio.sleep(0)
        return 1.0

    class Judge:
        async def __call__(self, rollout: Rollout) -> int:
            return 2

    assert await rewards([use("a", plain), use("b", Judge()), use("c", lambda r: True)], [solo()]) == [4.0]


async def test_a_blocking_term_stalls_nobody() -> None:
    """The term waits for something that only the event loop can do: on the loop it would wait for ever."""
    released = threading.Event()

    def term(rollout: Rollout) -> float:
        return 1.0 if released.wait(timeout=30) else 0.0

    async def release() -> None:
        released.set()

    found, _ = await asyncio.gather(rewards([use("slow", term)], group(2)), release())
    assert found == [1.0, 1.0]


async def test_a_term_that_hangs_is_given_up() -> None:
    async def term(rollout: Rollout) -> float:
        await asyncio.Event().wait()
        return 1.0

    terms = RewardSet([use("hang", term)], timeout_s=0.01)
    (scored,) = await terms.score([solo()], 0.0)
    assert scored.reward is None and terms.failures == {"hang": 1}


async def test_cancelling_the_scoring_cancels_it() -> None:
    started = asyncio.Event()

    async def term(rollout: Rollout) -> float:
        started.set()
        await asyncio.Event().wait()
        return 1.0

    task = asyncio.create_task(RewardSet([use("hang", term)]).score([solo()], 0.0))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_parts_of_turn_terms_are_within_the_reward() -> None:
    make = Maker()
    main = make.session()
    make.turn(main, "!search")
    make.turn(main, "search", "!search", "!search")
    make.turn(main, content="an answer")
    recipe = [Reward(use="item_f1"), Reward.model_validate({"use": "invalid_calls", "weight": 2.0})]
    (scored,) = await RewardSet.from_recipe(recipe).score([make.rollout()], 0.0)
    assert scored.turn_rewards == pytest.approx({0: -0.2, 1: -0.4})
    assert scored.reward == pytest.approx(1.0 - 0.6)


values = st.none() | st.floats(-2, 2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(values, values, values), min_size=1, max_size=5))
def test_members_of_a_group_are_compared_on_the_same_terms(table: list[tuple[float | None, ...]]) -> None:
    names = ("required", "optional 1", "optional 2")
    terms = [
        WeightedTerm(name, by_member([row[i] for row in table]), constant(1.0), optional=i > 0, inline=True)
        for i, name in enumerate(names)
    ]
    scored = asyncio.run(RewardSet(terms).score(group(len(table)), 0.0))
    standing = [row for row in table if row[0] is not None]
    counted = [i for i in range(3) if all(row[i] is not None for row in standing)]
    for one, row in zip(scored, table, strict=True):
        if row[0] is None:
            assert one.reward is None
        else:
            assert one.reward == pytest.approx(sum(row[i] or 0.0 for i in counted))


def test_a_term_used_twice_has_two_names_and_an_empty_set_is_refused() -> None:
    terms = RewardSet.from_recipe([Reward(use="item_f1"), Reward(use="item_f1"), Reward(use="exact_match")])
    assert [term.name for term in terms.terms] == ["item_f1", "item_f1#2", "exact_match"]
    with pytest.raises(RecipeError, match="at least one term"):
        RewardSet([])
