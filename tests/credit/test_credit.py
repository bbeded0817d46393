"""Credit: a rollout counts once in the baseline, a token once in the loss, and what has no gradient is counted."""

from __future__ import annotations

from statistics import fmean, pstdev
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from making import Maker, solo, swarm

from inspan.credit.gamma import turns_to_go
from inspan.credit.registry import RULES, Dropped, credit_batch, credit_group, resolve
from inspan.errors import RecipeError
from inspan.trace.records import ChainCredit, Rollout, Scored, Terminal


def forked(branches: int, turns: int = 2) -> Rollout:
    """A rollout of several chains that share their first turn."""
    make = Maker()
    main = make.session()
    make.turn(main, "search")
    shared = make.leaf[main]
    for _ in range(branches):
        make.leaf[main] = shared
        for _ in range(turns - 1):
            make.turn(main, content="x")
    return make.rollout()


def advantages(credits: list[ChainCredit]) -> dict[int, set[float]]:
    """The advantages of the trained tokens, by rollout."""
    found: dict[int, set[float]] = {}
    for credit in credits:
        values = {a for a, w in zip(credit.advantages, credit.weights, strict=True) if w}
        found.setdefault(credit.rollout, set()).update(values)
    return found


@st.composite
def groups(draw: st.DrawFn) -> list[Scored]:
    """Any scored group: forks, swarms, unscored and untrainable members, turn rewards."""
    members: list[Scored] = []
    for _ in range(draw(st.integers(0, 6))):
        rollout = draw(
            st.sampled_from([lambda: forked(1), lambda: forked(3, 3), lambda: swarm([2]), lambda: solo(4)])
        )()
        rollout.complete = draw(st.integers(0, 9)) > 0
        reward = draw(st.none() | st.sampled_from([0.0, 0.5, 1.0, 0.37]))
        turns = draw(st.dictionaries(st.integers(0, 1), st.sampled_from([-0.1, -0.2]), max_size=2))
        members.append(Scored(rollout, reward, {}, turns if reward is not None else {}))
    return members


rules = st.sampled_from([("group_mean", {}), ("group_mean_std", {}), ("per_turn", {}), ("gamma", {"gamma": 0.9})])


@given(groups(), rules)
def test_each_token_of_a_scored_trainable_rollout_is_in_the_loss_once_with_weight_one(
    group: list[Scored], rule: tuple[str, dict[str, Any]]
) -> None:
    credits, reason = credit_group(rule[0], group, rule[1])
    assert (reason is None) == bool(credits)
    for credit in credits:
        chain = credit.chain
        assert len(credit.advantages) == len(credit.weights) == len(chain.tokens)
        for on, advantage, weight in zip(chain.trained, credit.advantages, credit.weights, strict=True):
            assert weight == float(on)
            assert on or advantage == 0.0
    counted = [i for i, one in enumerate(group) if one.reward is not None and one.rollout.trainable]
    if credits:
        assert sorted({credit.rollout for credit in credits}) == counted
        for i in counted:
            trainable = {session.id for session in group[i].rollout.sessions if session.trainable}
            sampled = sum(len(n.tokens) - n.start for n in group[i].rollout.nodes if n.session in trainable)
            assert sum(sum(credit.weights) for credit in credits if credit.rollout == i) == sampled


@given(groups())
def test_group_mean_is_the_reward_minus_the_mean_over_rollouts(group: list[Scored]) -> None:
    credits, reason = credit_group("group_mean", group)
    rewards = {i: one.reward for i, one in enumerate(group) if one.reward is not None and one.rollout.trainable}
    if len(rewards) < 2:
        assert reason is Dropped.TOO_FEW
    elif len(set(rewards.values())) == 1:
        assert reason is Dropped.EQUAL
    else:
        mean = fmean(rewards.values())
        assert advantages(credits) == {i: {reward - mean} for i, reward in rewards.items()}


@given(groups())
def test_group_mean_std_divides_by_the_deviation(group: list[Scored]) -> None:
    rewards = {i: one.reward for i, one in enumerate(group) if one.reward is not None and one.rollout.trainable}
    assume(len(set(rewards.values())) > 1)
    mean, std = fmean(rewards.values()), pstdev(rewards.values())
    for i, values in advantages(credit_group("group_mean_std", group)[0]).items():
        assert list(values) == pytest.approx([(rewards[i] - mean) / std], rel=1e-4)


def test_a_rollout_with_many_chains_counts_once_in_the_baseline() -> None:
    group = [Scored(forked(5), 1.0), Scored(forked(1), 0.0), Scored(forked(1), 0.5)]
    credits, _ = credit_group("group_mean", group)
    assert len(credits) == 7
    assert advantages(credits) == {0: {0.5}, 1: {-0.5}, 2: {0.0}}


def test_infrastructure_is_in_no_baseline_and_a_failure_is() -> None:
    group = [Scored(solo(), 1.0), Scored(solo(terminal=Terminal.INFRASTRUCTURE), None)]
    group.append(Scored(solo(terminal=Terminal.TIMED_OUT), 0.0))
    assert advantages(credit_group("group_mean", group)[0]) == {0: {0.5}, 2: {-0.5}}


# ---- gamma ------------------------------------------------------------------------------------------------------


def test_gamma_decays_back_from_the_last_turn() -> None:
    group = [Scored(solo(turns=3), 1.0), Scored(solo(turns=1), 0.0)]
    credits, _ = credit_group("gamma", group, {"gamma": 0.5})
    chain = credits[0]
    by_turn = {t: a for t, a, on in zip(chain.chain.turns, chain.advantages, chain.chain.trained, strict=True) if on}
    assert by_turn == {0: 0.125, 1: 0.25, 2: 0.5}
    assert advantages(credits)[1] == {-0.5}


@given(groups())
def test_gamma_one_is_group_mean(group: list[Scored]) -> None:
    assert credit_group("gamma", group, {"gamma": 1.0}) == credit_group("group_mean", group)


def test_each_session_counts_back_from_its_own_last_turn() -> None:
    make = Maker()
    main = make.session()
    (call,) = make.turn(main, "assign_task")
    child = make.session(main, call, trainable=True)
    for _ in range(3):
        make.turn(child, "search")
    make.turn(main, content="done")
    assert turns_to_go(make.rollout()) == {0: 1, 1: 2, 2: 1, 3: 0, 4: 0}


# ---- per turn ---------------------------------------------------------------------------------------------------


def test_per_turn_terms_reach_their_own_turn_only() -> None:
    group = [Scored(solo(turns=2), 0.6, {}, {0: -0.4}), Scored(solo(turns=2), 0.0)]
    credits, _ = credit_group("per_turn", group)
    mean = -0.4 / 4  # over the four turns of the group
    found = [
        {t: a for t, a, on in zip(c.chain.turns, c.advantages, c.chain.trained, strict=True) if on} for c in credits
    ]
    assert found[0] == pytest.approx({0: 0.5 - 0.4 - mean, 1: 0.5 - mean})
    assert found[1] == pytest.approx({0: -0.5 - mean, 1: -0.5 - mean})


def test_per_turn_learns_from_turns_when_the_outcomes_are_equal() -> None:
    group = [Scored(solo(), 0.9, {}, {0: -0.1}), Scored(solo(), 0.9, {}, {1: -0.1})]
    assert credit_group("group_mean", group)[1] is Dropped.EQUAL
    assert credit_group("per_turn", group)[0]
    assert credit_group("per_turn", [Scored(solo(), 1.0), Scored(solo(), 1.0)])[1] is Dropped.EQUAL


@given(groups(), st.floats(2, 100))
def test_per_turn_never_blows_up_small_differences(group: list[Scored], large: float) -> None:
    credits, _ = credit_group("per_turn", group)
    for values in advantages(credits).values():
        assert all(abs(value) <= 2.0 for value in values)
    for one in group:
        one.turn_rewards = {turn: large * value for turn, value in one.turn_rewards.items()}
    turns = [t for one in group for t in one.turn_rewards.values()]
    for credit in credit_group("per_turn", group)[0]:
        assert all(abs(a) <= 2 + 2 * sum(map(abs, turns)) for a in credit.advantages)


# ---- groups and batches -----------------------------------------------------------------------------------------


def test_a_batch_numbers_its_rollouts_and_counts_what_it_dropped() -> None:
    frozen = [swarm([1]), swarm([1])]
    for rollout in frozen:
        rollout.sessions[0] = type(rollout.sessions[0])("s0", "main", "policy@v0", False)
    batch = credit_batch(
        "group_mean",
        [
            [Scored(solo(), 1.0), Scored(solo(), 1.0)],
            [Scored(solo(), 1.0), Scored(solo(), None)],
            [Scored(solo(), 1.0), Scored(forked(2), 0.0)],
            [Scored(rollout, float(i)) for i, rollout in enumerate(frozen)],
        ],
    )
    assert [(credit.group, credit.rollout) for credit in batch.credits] == [(2, 4), (2, 5), (2, 5)]
    assert batch.dropped == {Dropped.EQUAL: 1, Dropped.TOO_FEW: 1, Dropped.UNTRAINED: 1}


def test_thinned_members_stay_in_the_baseline() -> None:
    group = [Scored(solo(), 1.0), Scored(solo(), 0.0), Scored(solo(), 0.0)]
    batch = credit_batch("group_mean", [group], keep=[{0, 2}])
    assert {i: min(values) for i, values in advantages(batch.credits).items()} == pytest.approx({0: 2 / 3, 2: -1 / 3})


def test_differences_within_rounding_are_no_differences() -> None:
    group = [Scored(solo(), 0.1 + 0.2), Scored(solo(), 0.3)]
    for rule in RULES:
        assert credit_group(rule, group) == ([], Dropped.EQUAL)


def test_a_faulty_name_or_parameter_is_named() -> None:
    with pytest.raises(RecipeError, match="did you mean 'group_mean'"):
        resolve("group_maen")
    with pytest.raises(RecipeError, match=r"unknown parameter 'eps' \(it takes none"):
        credit_group("group_mean", [], {"eps": 1})
    with pytest.raises(RecipeError, match=r"gamma is 1\.5"):
        credit_group("gamma", [], {"gamma": 1.5})


def test_the_recipe_knows_the_rules_and_terms_that_there_are() -> None:
    from inspan.config.sections import CREDITS, TERMS
    from inspan.rewards.registry import BUILT_IN

    assert set(CREDITS) == set(RULES)
    assert set(TERMS) <= set(BUILT_IN)
