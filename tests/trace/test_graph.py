"""The message graph: what is proven identical stays as it was sampled, everything else forks and says why."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inspan.trace.graph import FORK_REASONS, MessageGraph, ToolList, canonical_json, content_text, identity
from inspan.trace.records import Session

END, OPEN = 1, 2
SECOND = 10_000  # a second spelling of the same text: token + SECOND reads like token
ROLES = {"system": 3, "user": 4, "tool": 5, "assistant": OPEN}


def text_ids(message: dict[str, Any]) -> tuple[int, ...]:
    calls = "".join(f"<{c['name']}{canonical_json(c['arguments'])}>" for c in message.get("tool_calls", ()))
    return tuple(100 + ord(c) for c in content_text(message.get("content")) + calls)


def context_delta(message: dict[str, Any]) -> tuple[int, ...]:
    return (ROLES[message["role"]], *text_ids(message), END)


class Talk:
    """A harness and a model over one graph, with plain rules of rendering: the whole rendering is the specification."""

    def __init__(self) -> None:
        self.graph = MessageGraph()
        self.graph.add_session(Session("s", "main", "policy", True))
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.minted = 0

    def lay(self, messages: list[dict[str, Any]]) -> tuple[int, str | None]:
        match = self.graph.match("s", messages)
        node, fork = match.node, match.fork
        for message in messages[match.depth :]:
            node = self.graph.add_context("s", node, message, context_delta(message), fork).id
            fork = None
        assert node is not None
        return node, match.fork

    def sample(
        self, messages: list[dict[str, Any]], content: str, *, spelling: int = 0, calls: int = 0
    ) -> dict[str, Any]:
        leaf, _ = self.lay(messages)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            self.minted += calls
            message["tool_calls"] = [
                {"id": f"call_{self.minted - i}", "name": "search", "arguments": '{"q": 1, "r": "x"}'}
                for i in range(calls)
            ]
        ids = (*(i + SECOND * spelling for i in text_ids(message)), END)
        node = self.graph.draft_sample(
            "s", leaf, message, opening=(OPEN,), tokens=ids, logprobs=(-1.0,) * len(ids), versions=(0,) * len(ids)
        )
        self.prompts[node.id] = (*self.graph.tokens(leaf), OPEN)
        self.graph.enter(node)
        return message


SYSTEM = {"role": "system", "content": "Be good."}
USER = {"role": "user", "content": "Hello"}
NEXT = {"role": "user", "content": "And then?"}


def tool(message: dict[str, Any], index: int = 0, content: str = "found") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": message["tool_calls"][index]["id"]}


# ---- what stays -------------------------------------------------------------------------------------------------


def test_a_conversation_that_goes_on_is_one_path_with_its_sampled_tokens():
    talk = Talk()
    first = talk.sample([SYSTEM, USER], "thinking", calls=2)
    second = talk.sample([SYSTEM, USER, first, tool(first, 0), tool(first, 1)], "done", spelling=1)
    leaf, fork = talk.lay([SYSTEM, USER, first, tool(first, 0), tool(first, 1), second, NEXT])
    assert fork is None
    assert [talk.graph.nodes[i].sampled for i in talk.graph.path(leaf)] == [0, 0, 1, 0, 0, 1, 0]
    assert all(node.fork is None for node in talk.graph.nodes)


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m | {"content": None} if not m["content"] else m,
        lambda m: m | {"content": [{"type": "text", "text": m["content"]}]},
        lambda m: m | {"refusal": None, "annotations": []},
        lambda m: m | {"tool_calls": [c | {"arguments": '{"r":"x",  "q":1.0}'} for c in m["tool_calls"]]},
    ],
)
def test_an_assistant_turn_that_a_client_spells_otherwise_is_still_the_sampled_one(edit):
    talk = Talk()
    first = talk.sample([SYSTEM, USER], "", calls=1)
    match = talk.graph.match("s", [SYSTEM, USER, edit(first), tool(first)])
    assert (match.depth, match.fork) == (3, None)


def test_the_same_request_again_is_a_second_sample_of_the_same_context():
    talk = Talk()
    talk.sample([SYSTEM, USER], "one")
    talk.sample([SYSTEM, USER], "two")
    one, two = talk.graph.nodes[2:]
    assert (one.parent, one.fork) == (1, None)
    assert (two.parent, two.fork) == (1, "sampled again")


# ---- what forks, and why ----------------------------------------------------------------------------------------


def fork_of(talk: Talk, messages: list[dict[str, Any]]) -> tuple[int, str | None]:
    match = talk.graph.match("s", messages)
    return match.depth, match.fork


def test_a_root_forks_on_its_system_message_or_its_tools():
    talk = Talk()
    search = ToolList([{"type": "function", "function": {"name": "search"}}])
    talk.sample([SYSTEM | {"tools": search}, USER], "one")
    assert fork_of(talk, [SYSTEM | {"tools": search}, USER]) == (2, None)
    assert fork_of(talk, [SYSTEM, USER]) == (0, "tools changed")
    assert fork_of(talk, [SYSTEM | {"content": "Be bad.", "tools": search}, USER]) == (0, "system changed")


def test_the_order_of_a_schemas_keys_is_no_change():
    one = ToolList([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": []}}}])
    two = json.loads(json.dumps(one, sort_keys=True))
    assert identity(SYSTEM | {"tools": one}) == identity(SYSTEM | {"tools": two})


def test_an_edited_assistant_message_forks_there():
    talk = Talk()
    first = talk.sample([SYSTEM, USER], "thinking", calls=1)
    for edited in (
        first | {"content": "thinking."},
        first | {"tool_calls": []},
        first | {"tool_calls": [first["tool_calls"][0] | {"id": "call_other"}]},
        first | {"tool_calls": [first["tool_calls"][0] | {"arguments": '{"q": true, "r": "x"}'}]},
    ):
        assert fork_of(talk, [SYSTEM, USER, edited, tool(first)]) == (2, "assistant edited")


def test_a_pruned_tool_result_rewrites_history_and_its_later_samples_become_context():
    talk = Talk()
    first = talk.sample([SYSTEM, USER], "a", calls=1)
    second = talk.sample([SYSTEM, USER, first, tool(first)], "b", calls=1)
    pruned = [SYSTEM, USER, first, tool(first, content="[pruned]"), second, tool(second)]
    assert fork_of(talk, pruned) == (3, "history rewritten")
    leaf, _ = talk.lay(pruned)
    assert [talk.graph.nodes[i].sampled for i in talk.graph.path(leaf)] == [0, 0, 1, 0, 0, 0]


def test_going_back_and_on_otherwise_is_a_roll_back():
    talk = Talk()
    first = talk.sample([SYSTEM, USER], "a", calls=1)
    talk.sample([SYSTEM, USER, first, tool(first)], "b")
    assert fork_of(talk, [SYSTEM, USER, first, tool(first, content="other")]) == (3, "rolled back")
    assert fork_of(talk, [SYSTEM, USER, first, tool(first), NEXT]) == (4, "rolled back")


def test_another_question_under_the_same_system_message_is_a_new_conversation():
    talk = Talk()
    talk.sample([SYSTEM, USER], "a")
    assert fork_of(talk, [SYSTEM, NEXT]) == (1, "new conversation")


def test_samples_that_read_the_same_are_not_guessed_at_until_a_continuation_tells_them_apart():
    talk = Talk()
    same = talk.sample([SYSTEM, USER], "yes")
    talk.sample([SYSTEM, USER], "yes", spelling=1)
    assert fork_of(talk, [SYSTEM, USER, same, NEXT]) == (2, "ambiguous sample")
    leaf, _ = talk.lay([SYSTEM, USER, same, NEXT])
    assert not talk.graph.nodes[talk.graph.path(leaf)[2]].sampled
    nodes = len(talk.graph.nodes)
    assert talk.lay([SYSTEM, USER, same, NEXT]) == (leaf, None), "the fork is taken again"
    assert len(talk.graph.nodes) == nodes


def test_a_sample_that_was_continued_before_its_double_came_keeps_being_continued():
    talk = Talk()
    same = talk.sample([SYSTEM, USER], "yes")
    more = talk.sample([SYSTEM, USER, same, NEXT], "more")
    talk.sample([SYSTEM, USER], "yes", spelling=1)
    leaf, fork = talk.lay([SYSTEM, USER, same, NEXT, more, USER])
    assert fork is None
    assert talk.graph.nodes[talk.graph.path(leaf)[2]].id == 2


def test_doubles_of_the_same_tokens_are_the_same_context():
    talk = Talk()
    same = talk.sample([SYSTEM, USER], "yes")
    talk.sample([SYSTEM, USER], "yes")
    assert fork_of(talk, [SYSTEM, USER, same, NEXT]) == (3, None)


def test_sessions_do_not_see_each_other():
    talk = Talk()
    talk.sample([SYSTEM, USER], "a")
    talk.graph.add_session(Session("t", "main", "policy", True, "s", "call_1"))
    match = talk.graph.match("t", [SYSTEM, USER])
    assert (match.node, match.depth, match.fork) == (None, 0, None)


def test_json_values_are_compared_as_values():
    assert canonical_json('{"a": 1, "b": [2.0]}') == canonical_json('{"b":[2],"a":1.0}')
    assert canonical_json('{"a": 1}') != canonical_json('{"a": true}')
    assert canonical_json("not json") == "not json"
    assert canonical_json("[" * 5000) == "[" * 5000


def test_records_that_lack_a_parent_are_refused():
    talk = Talk()
    talk.sample([SYSTEM, USER], "a")
    with pytest.raises(ValueError, match="parent"):
        MessageGraph.restore(talk.graph.sessions.values(), talk.graph.nodes[1:])


def test_ids_that_were_never_committed_stay_gaps():
    talk = Talk()
    first = talk.sample([SYSTEM, USER], "a")
    talk.lay([SYSTEM, NEXT])  # node 3, not committed
    talk.sample([SYSTEM, USER, first, NEXT], "b")
    kept = [node for node in talk.graph.nodes if node.id != 3]
    again = MessageGraph.restore(talk.graph.sessions.values(), kept)
    assert again.records() == kept
    assert not again.has(3)
    assert again.match("s", [SYSTEM, USER, first, NEXT]) == talk.graph.match("s", [SYSTEM, USER, first, NEXT])


# ---- any conversation -------------------------------------------------------------------------------------------


def mutate(rng: random.Random, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What harnesses do to a history: edit, prune, roll back, duplicate, or leave it."""
    out = [dict(message) for message in messages]
    what = rng.randrange(8)
    at = rng.randrange(len(out))
    if what == 0:
        out[at]["content"] = rng.choice(["", "edited", "[pruned]"])
    elif what == 1:
        del out[at + 1 :]
    elif what == 2 and len(out) > 1:
        del out[at]
    elif what == 3:
        out.insert(at, dict(out[at]))
    return out


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), turns=st.integers(1, 12))
def test_whatever_a_harness_does_the_deltas_concatenate_to_what_the_engine_saw(seed, turns):
    rng = random.Random(seed)
    talk = Talk()
    lists: list[list[dict[str, Any]]] = [[SYSTEM, USER]]
    for _ in range(turns):
        messages = mutate(rng, rng.choice(lists)) or [USER]
        before = list(talk.graph.nodes)
        leaf, fork = talk.lay(messages)
        assert talk.graph.nodes[: len(before)] == before, "a node is never changed"
        fresh = talk.graph.nodes[len(before) :]
        assert [node.fork for node in fresh] == [fork, *[None] * (len(fresh) - 1)][: len(fresh)]
        assert fork is None or fork in FORK_REASONS
        seen = [token % SECOND for token in talk.graph.tokens(leaf)]
        assert seen == [token for message in messages for token in context_delta(message)], "reads as the messages do"
        assert talk.lay(messages) == (leaf, None), "known messages are found again"
        answer = talk.sample(
            messages, rng.choice(["yes", "no"]), spelling=rng.randrange(2), calls=rng.choice([0, 0, 1])
        )
        results = [tool(answer)] if answer.get("tool_calls") else [NEXT]
        lists.append([*messages, answer, *results])
    for node, prompt in talk.prompts.items():
        record = talk.graph.nodes[node]
        assert talk.graph.tokens(record.parent) + record.tokens[: record.start] == prompt
    again = MessageGraph.restore(talk.graph.sessions.values(), talk.graph.nodes)
    for messages in lists:
        assert again.match("s", messages) == talk.graph.match("s", messages)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_an_untouched_history_with_call_ids_keeps_every_sampled_token(seed):
    rng = random.Random(seed)
    talk = Talk()
    messages: list[dict[str, Any]] = [SYSTEM, USER]
    sampled = []
    for _ in range(6):
        twins = [talk.sample(messages, "same", spelling=rng.randrange(2), calls=1) for _ in range(rng.randrange(1, 4))]
        chosen = rng.choice(twins)
        sampled.append(next(n.id for n in talk.graph.nodes if n.message is chosen))
        messages = [*messages, chosen, tool(chosen)]
    leaf, _ = talk.lay(messages)
    assert [i for i in talk.graph.path(leaf) if talk.graph.nodes[i].sampled] == sampled
