"""The task sampler: which prompts come, how often, and that a resumed run draws what the other would have drawn."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inspan.errors import CheckpointError, RecipeError, TaskError
from inspan.tasks.base import Task
from inspan.tasks.sampler import SAMPLERS, Failure, Harder, Hops, Sampler, Uniform, make_sampler, thin_negatives


def tasks(count: int) -> list[Task]:
    return [Task(f"t{i}", "?", "!", meta={"hops": 1 + i % 4}) for i in range(count)]


def ids(drawn: list[Task]) -> list[str]:
    return [task.id for task in drawn]


@given(st.integers(1, 20), st.lists(st.integers(0, 7), max_size=12), st.integers(0, 2**32))
def test_uniform_repeats_no_task_before_the_epoch_ends(size: int, draws: list[int], seed: int) -> None:
    sampler = Uniform(tasks(size), random.Random(seed))
    drawn = [task for count in draws for task in ids(sampler.draw(count))]
    for start in range(0, len(drawn), size):
        epoch = drawn[start : start + size]
        assert len(set(epoch)) == len(epoch)


def used(sampler: Sampler, rng: random.Random, count: int) -> list[str]:
    drawn: list[str] = []
    for step in range(count):
        (task,) = sampler.draw(1, step / count)
        drawn.append(task.id)
        sampler.report(task.id, rng.random(), turns=rng.randrange(9), thinking_tokens=rng.randrange(500))
    return drawn


@pytest.mark.parametrize("rule", sorted(SAMPLERS))
def test_a_restored_sampler_goes_on_as_the_other_would_have(rule: str) -> None:
    first = make_sampler(rule, tasks(11), random.Random(1))
    used(first, random.Random(2), 17)
    state = json.loads(json.dumps(first.state()))
    second = make_sampler(rule, tasks(11), random.Random(99))
    second.restore(state)
    assert used(first, random.Random(3), 40) == used(second, random.Random(3), 40)


def test_a_state_of_another_rule_or_task_set_is_refused() -> None:
    state = Uniform(tasks(5), random.Random(0)).state()
    with pytest.raises(CheckpointError, match="tasks changed"):
        Uniform(tasks(6), random.Random(0)).restore(state)
    with pytest.raises(CheckpointError, match="rule changed"):
        Failure(tasks(5), random.Random(0)).restore(state)


def test_failure_draws_in_proportion_to_one_minus_success() -> None:
    sampler = Failure(tasks(3), random.Random(0), spacing=0)
    for _ in range(200):
        sampler.report("t0", 1.0)
        sampler.report("t1", 0.5)
        sampler.report("t2", 0.0)
    shares = Counter(ids(sampler.draw(6000)))
    assert shares["t0"] / 6000 < 0.01
    assert shares["t1"] / 6000 == pytest.approx(1 / 3, abs=0.03)
    assert shares["t2"] / 6000 == pytest.approx(2 / 3, abs=0.03)


def test_an_unexplored_task_counts_as_the_prior_and_a_solved_one_keeps_a_chance() -> None:
    sampler = Failure(tasks(2), random.Random(0), prior=0.4)
    assert sampler.success("t0") == 0.4
    sampler.report("t0", 1.0)
    assert 0.4 < sampler.success("t0") < 1.0


@given(st.integers(2, 40), st.integers(0, 50), st.integers(0, 2**32))
def test_weighted_rules_keep_their_spacing(size: int, spacing: int, seed: int) -> None:
    sampler = Failure(tasks(size), random.Random(seed), spacing=spacing)
    drawn = ids(sampler.draw(3 * size))
    window = min(spacing, size // 2) + 1
    assert all(len(set(part)) == len(part) for i in range(len(drawn)) if (part := drawn[i : i + window]))


def test_hops_go_from_few_to_many_in_two_phases_without_repeats() -> None:
    sampler = Hops(tasks(16), random.Random(0))
    early, late = sampler.draw(8, 0.49), sampler.draw(8, 0.5)
    assert {task.meta["hops"] for task in early} == {1, 2} and {task.meta["hops"] for task in late} == {3, 4}
    assert len(set(ids(early + late))) == 16


def test_phases_can_be_given_and_must_make_sense() -> None:
    sampler = Hops(tasks(8), random.Random(0), phases=[(0.2, 1, 1), (1.0, 1, 4)])
    assert {task.meta["hops"] for task in sampler.draw(4, 0.1)} == {1}
    assert {task.meta["hops"] for task in sampler.draw(8, 1.0)} == {1, 2, 3, 4}
    with pytest.raises(RecipeError, match="the last"):
        Hops(tasks(8), random.Random(0), phases=[(0.5, 1, 4)])
    with pytest.raises(TaskError, match="no task has 7 to 9 hops"):
        Hops(tasks(8), random.Random(0), phases=[(1.0, 7, 9)])
    with pytest.raises(TaskError, match="task 'x': hops is None"):
        Hops([Task("x", "?", "!")], random.Random(0))
    with pytest.raises(TaskError, match="all tasks have 1 hops"):
        Hops(tasks(1), random.Random(0))


def test_harder_tasks_come_more_often_later() -> None:
    sampler = Harder(tasks(4), random.Random(0), spacing=0)
    for i in range(4):
        sampler.report(f"t{i}", 0.5, turns=i, thinking_tokens=100 * i)
    difficulty = sampler.difficulty()
    assert sorted(difficulty, key=lambda task: difficulty[task]) == ["t0", "t1", "t2", "t3"]
    early, late = Counter(ids(sampler.draw(2000, 0.0))), Counter(ids(sampler.draw(2000, 1.0)))
    assert early["t3"] / 2000 == pytest.approx(0.25, abs=0.04)
    assert late["t3"] > 1.5 * early["t3"] and late["t0"] < 0.5 * early["t0"]


def test_faults_are_named() -> None:
    with pytest.raises(RecipeError, match="did you mean 'uniform'"):
        make_sampler("unifrom", tasks(2), random.Random(0))
    with pytest.raises(TaskError, match="no task"):
        make_sampler("uniform", [], random.Random(0))
    with pytest.raises(TaskError, match="same id"):
        make_sampler("uniform", tasks(1) * 2, random.Random(0))
    with pytest.raises(ValueError, match="unknown"):
        make_sampler("failure", tasks(2), random.Random(0)).report("unknown", 1.0)


rewards = st.lists(st.none() | st.floats(-1, 1), max_size=12)


@given(rewards, st.floats(0, 1), st.integers(0, 2**32))
def test_thinning_drops_only_negatives(values: list[float | None], keep: float, seed: int) -> None:
    kept = thin_negatives(values, keep, random.Random(seed))
    known = [value for value in values if value is not None]
    mean = sum(known) / len(known) if known else 0.0
    assert kept == sorted(set(kept))
    assert all(values[i] is not None for i in kept)
    assert set(kept) >= {i for i, value in enumerate(values) if value is not None and value > mean + 1e-9}


def test_thinning_keeps_the_share_it_is_told_to() -> None:
    values = [0.0, 1.0] * 2000
    kept = thin_negatives(values, 0.25, random.Random(0))
    assert sum(values[i] == 0.0 for i in kept) / 2000 == pytest.approx(0.25, abs=0.03)
    assert thin_negatives(values, 1.0, random.Random(0)) == list(range(4000))
    assert thin_negatives(values, 0.0, random.Random(0)) == list(range(1, 4000, 2))
