"""The names that a recipe may use are those that the rooms know: neither more nor fewer."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest

from inspan.config import from_dict, sections
from inspan.config.recipe import Recipe
from inspan.errors import RecipeError


def test_reward_terms_are_those_of_the_rewards():
    from inspan.rewards.registry import BUILT_IN

    assert set(sections.TERMS) == set(BUILT_IN)


def test_credit_rules_are_those_of_credit():
    from inspan.credit.registry import RULES

    assert set(sections.CREDITS) == set(RULES)


def test_samplers_and_kinds_are_those_of_the_tasks():
    from inspan.tasks.facts.questions import KINDS
    from inspan.tasks.retrieval import multihop
    from inspan.tasks.sampler import SAMPLERS

    assert set(get_args(sections.Sampler)) == set(SAMPLERS)
    assert set(sections.KINDS["facts"]) == set(KINDS)
    assert set(sections.KINDS["retrieval"]) == {multihop.kind(hops) for hops in multihop.HOPS}


def test_objectives_with_their_parameters_and_aggregations_are_those_of_the_learner():
    from inspan.learner.losses import AGGREGATIONS, ESTIMATORS, OBJECTIVES

    known = {
        name: (s.aggregation, tuple(inspect.signature(s.function).parameters)[2:]) for name, s in OBJECTIVES.items()
    }
    assert known == sections.OBJECTIVES
    assert set(get_args(sections.Objective)) == set(known)
    assert set(get_args(sections.Aggregation)) == set(AGGREGATIONS)
    assert set(get_args(sections.KL.model_fields["estimator"].annotation)) == set(ESTIMATORS)


def test_the_aggregation_follows_the_objective_unless_it_is_given():
    assert from_dict({"train": {"objective": "cispo"}}).train.aggregation == "token"
    assert from_dict({"train": {"objective": "cispo", "aggregation": "rollout"}}).train.aggregation == "rollout"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            {"train": {"objective_params": {"alfa": 1.0}}},
            'parameter of objective "kimi": "alfa"; did you mean "alpha"?',
        ),
        ({"tasks": {"kinds": {"wid": 1.0}}}, 'unknown kind of task "wid"; did you mean "wide"?'),
    ],
)
def test_names_inside_tables_are_checked_too(data, expected):
    with pytest.raises(RecipeError) as caught:
        from_dict(data)
    assert expected in str(caught.value)


def test_every_key_has_a_description():
    def walk(model, path):
        for name, field in model.model_fields.items():
            assert field.description, f"{path}{name}"
            if inspect.isclass(field.annotation) and issubclass(field.annotation, sections.Section):
                walk(field.annotation, f"{path}{name}.")

    walk(Recipe, "")
