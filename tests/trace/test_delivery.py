"""Every token that the policy sampled has one fate; what was not explained would be a loss."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_verify import MAIN, rollout

from inspan.trace.chains import trained_chains
from inspan.trace.delivery import Delivery, delivery, given_up, leave_out, total
from inspan.trace.records import Call, Node, Session, Terminal


def test_all_that_the_trained_agent_sampled_is_trained_and_a_frozen_ones_is_not_counted():
    found = delivery(rollout())
    assert (found.sampled, found.trained, found.excluded, found.unexplained, found.fraction) == (4, 4, {}, 0, 1.0)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"complete": False}, "incomplete capture"),
        ({"terminal": Terminal.INFRASTRUCTURE}, "no reward"),
        ({"terminal": Terminal.CANCELLED, "complete": False}, "no reward"),
    ],
)
def test_a_rollout_that_is_not_trained_says_why(fields, reason):
    found = delivery(rollout(**fields))
    assert (found.trained, found.excluded, found.unexplained) == (0, {reason: 4}, 0)


def test_what_the_policy_says_in_a_role_that_is_not_trained_is_a_side_request():
    title = Session("help", "title", "policy", False)
    found = delivery(rollout(sessions=[MAIN, title]))
    assert (found.sampled, found.trained, found.excluded) == (5, 4, {"side request": 1})


def test_a_branch_that_was_left_is_excluded_where_the_recipe_wants_it():
    assert given_up(rollout().nodes) == {3: "superseded retry"}
    found = delivery(rollout(), abandoned=False)
    assert (found.sampled, found.trained, found.excluded, found.unexplained) == (4, 3, {"superseded retry": 1}, 0)
    kept = leave_out(rollout(), given_up(rollout().nodes))
    assert sum(sum(chain.trained) for chain in trained_chains(kept)) == 3
    assert rollout().nodes[3].sampled, "the record itself stays whole"


def test_a_branch_that_the_harness_came_back_to_was_not_left():
    made = rollout()
    made.nodes += [
        Node(7, "main", 3, {"role": "user", "content": "more"}, (2,), 1),
        Node(8, "main", 7, {"role": "assistant", "content": "d"}, (3, 5), 1, (-0.1,), (1,)),
    ]
    made.calls.append(Call("m3", "main", 3, 7, 8, "stop", (), 10, 1))
    assert given_up(made.nodes) == {}


def test_a_loss_is_seen():
    made = rollout()
    made.nodes[4] = replace(made.nodes[4], start=2, logprobs=(), versions=())
    made.calls[3] = replace(made.calls[3], node=None)
    found = delivery(made)
    assert (found.unexplained, found.fraction) == (1, 0.75)
    assert found.figures()["unexplained_tokens"] == 1


@given(seed=st.integers(0, 2**32), abandoned=st.booleans())
def test_nothing_is_unexplained_in_any_tree(seed, abandoned):
    rng = random.Random(seed)
    nodes: list[Node] = [Node(0, "main", None, {"role": "user", "content": ""}, (1,), 1)]
    calls: list[Call] = []
    for _ in range(rng.randint(1, 12)):
        parent = rng.choice(nodes)
        fork = rng.choice([None, "rolled back", "sampled again", "history rewritten"])
        if parent.sampled:
            nodes.append(Node(len(nodes), "main", parent.id, {"role": "user", "content": ""}, (2,), 1, fork=fork))
            continue
        count = rng.randint(1, 3)
        said = {"role": "assistant", "content": ""}
        made = Node(len(nodes), "main", parent.id, said, (9,) * count, 0, (-1.0,) * count, (0,) * count, fork)
        nodes.append(made)
        calls.append(Call(f"c{made.id}", "main", len(calls), parent.id, made.id, "stop", (), 0, count))
    found = delivery(rollout(sessions=[MAIN], nodes=nodes, calls=calls), abandoned=abandoned)
    assert found.unexplained == 0 and found.sampled == sum(call.completion_tokens for call in calls)
    if abandoned:
        assert found.trained == found.sampled


def test_deliveries_add_up():
    one, other = delivery(rollout()), delivery(rollout(complete=False))
    assert total([one, other]) == Delivery(8, 4, other.excluded) and total([]).fraction == 1.0
