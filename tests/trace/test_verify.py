"""What the verifier sees: an intact record passes, and each way of breaking one is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inspan.trace.records import Call, Node, Rollout, Session, Terminal
from inspan.trace.verify import Witnessed, breaches

MAIN, HELP = Session("main", "main", "policy", True), Session("help", "help", "policy@v0", False, "main", "c1")


def rollout(**fields) -> Rollout:
    """Two turns of the trained agent, the second twice, and one turn of a frozen one."""
    nodes = [
        Node(0, "main", None, {"role": "user", "content": "q"}, (1, 2), 2),
        Node(1, "main", 0, {"role": "assistant", "content": "a"}, (3, 4, 5), 1, (-0.1, -0.2), (0, 0)),
        Node(2, "main", 1, {"role": "tool", "content": "r"}, (6,), 1),
        Node(3, "main", 2, {"role": "assistant", "content": "b"}, (3, 7), 1, (-0.3,), (1,)),
        Node(4, "main", 2, {"role": "assistant", "content": "c"}, (3, 8), 1, (-0.4,), (1,), "sampled again"),
        Node(5, "help", None, {"role": "user", "content": "h"}, (9,), 1),
        Node(6, "help", 5, {"role": "assistant", "content": "i"}, (3, 4), 1, (-0.5,), (0,)),
    ]
    calls = [
        Call("m0", "main", 0, 0, 1, "tool_calls", (), 3, 2),
        Call("h0", "help", 0, 5, 6, "stop", (), 2, 1),
        Call("m1", "main", 1, 2, 3, "stop", (), 7, 1),
        Call("m2", "main", 2, 2, 4, "stop", (), 7, 1),
    ]
    defaults = {"sessions": [MAIN, HELP], "nodes": nodes, "calls": calls, "terminal": Terminal.COMPLETED}
    return Rollout(**{"id": "r", "task": None, "group": "g", "member": 0, "answer": "b", **defaults, **fields})


SEEN = [
    Witnessed("policy", (1, 2, 3), (4, 5), (-0.1, -0.2), (0, 0)),
    Witnessed("policy@v0", (9, 3), (4,), (-0.5,), (0,)),
    Witnessed("policy", (1, 2, 3, 4, 5, 6, 3), (7,), (-0.3,), (1,)),
    Witnessed("policy", (1, 2, 3, 4, 5, 6, 3), (8,), (-0.4,), (1,)),
]


def found(made: Rollout, seen=SEEN) -> list[str]:
    return [str(one) for one in breaches(made, seen)]


def changed(at: int, **fields) -> Rollout:
    made = rollout()
    made.nodes[at] = replace(made.nodes[at], **fields)
    return made


def test_an_intact_record_passes():
    assert found(rollout()) == []
    assert found(rollout(terminal=Terminal.INFRASTRUCTURE)) == []
    assert found(rollout(complete=False)) == []


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (changed(0, tokens=(1, 9)), "the engine saw (2,) at position 1, the record has (9,) (call m0, node 1)"),
        (changed(2, tokens=(), start=0), "as sampled: counts 7 + 1 tokens, and its path has 6 + 1 (call m1, node 3)"),
        (changed(1, tokens=(3, 4, 6)), "the engine saw (5,) at position 4, the record has (6,)"),
        (changed(1, logprobs=(-0.1, -0.9)), "as sampled: its logprobs differ from the engine's (call m0"),
        (changed(3, versions=(2,)), "as sampled: its versions differ from the engine's (call m1"),
        (changed(1, logprobs=(-0.1,)), "sound record: has 2 sampled tokens, 1 log-probs"),
        (changed(2, parent=5), "sound record: has parent 5, which is not an earlier node of its session"),
        (changed(4, id=3), "sound record: two nodes or two calls share an id"),
        (changed(4, parent=1), "sound record: was sampled, but no call accounts for it in this context"),
    ],
)  # fmt: skip
def test_a_node_that_is_not_what_was_sampled_is_named(made, expected):
    assert any(expected in one for one in found(made)), found(made)


def test_a_policy_that_was_not_asked_is_named():
    other = [replace(SEEN[0], policy="policy@v0"), *SEEN[1:]]
    assert any("its policy differ" in one for one in found(rollout(), other))


def test_a_call_that_was_forgotten_and_a_sample_that_two_calls_claim_are_named():
    made = rollout()
    made.calls.pop()
    made.nodes.pop(4)
    assert found(made) == ["nothing lost: the engine gave a sample that no call recorded (7 + 1 tokens of policy)"]
    made = rollout()
    made.calls[3] = replace(made.calls[3], node=3)
    assert any("two calls claim one sample" in one or "no call accounts" in one for one in found(made))


def test_a_sample_of_a_call_that_was_given_up_is_not_lost():
    made = rollout()
    made.nodes.pop(4)
    made.calls[3] = Call("m2", "main", 2, 2, None, "cancelled")
    assert found(made) == []


def test_one_request_cannot_stand_for_two_calls():
    made = changed(4, tokens=(3, 7), logprobs=(-0.3,))
    assert any("its request is another call's already" in one or "logprobs" in one for one in found(made))
