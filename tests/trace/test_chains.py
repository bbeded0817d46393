"""Chains: what is trained was sampled in exactly that context, once, for a trainable agent."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import Maker, solo, swarm

from inspan.errors import InspanError
from inspan.trace.chains import chains, trained_chains
from inspan.trace.records import Call, Chain, Node, Session, Terminal


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Session], list[Node], list[Call]]:
    """Any forest of messages in some sessions: forks, samples under samples, empty deltas, frozen agents."""
    sessions = [Session(f"s{i}", "a", "p", draw(st.booleans())) for i in range(draw(st.integers(1, 3)))]
    nodes: list[Node] = []
    calls: list[Call] = []
    token = 0
    for id_ in range(0, 2 * draw(st.integers(0, 14)), 2):  # ids may have gaps
        session = draw(st.sampled_from(sessions)).id
        parent = draw(st.sampled_from([None, *(node.id for node in nodes if node.session == session)]))
        size = draw(st.integers(0, 4))
        start = draw(st.integers(0, size)) if draw(st.booleans()) else size
        tokens = tuple(range(token, token + size))  # every token of the forest is another one
        token += size
        sampled = tokens[start:]
        probs, versions = tuple(-float(t) for t in sampled), tuple(t % 5 for t in sampled)
        nodes.append(Node(id_, session, parent, {"role": "x", "content": ""}, tokens, start, probs, versions))
        if sampled:
            calls.append(Call(f"c{id_}", session, 0, parent, id_, "stop"))
    return sessions, nodes, calls


Graph = tuple[list[Session], list[Node], list[Call]]


@given(graphs())
def test_deltas_along_a_path_concatenate_to_the_chain(graph: Graph) -> None:
    by_id = {node.id: node for node in graph[1]}
    for chain in chains(*graph):
        path = [by_id[id_] for id_ in chain.nodes]
        assert path[0].parent is None
        assert [node.parent for node in path[1:]] == [node.id for node in path[:-1]]
        assert chain.tokens == tuple(token for node in path for token in node.tokens)
        lengths = {len(column) for column in (chain.tokens, chain.trained, chain.logprobs, chain.versions, chain.turns)}
        assert lengths == {len(chain.tokens)}


@given(graphs())
def test_each_leaf_has_one_chain_and_every_node_is_in_one(graph: Graph) -> None:
    _, nodes, _ = graph
    parents = {node.parent for node in nodes}
    found = chains(*graph)
    assert Counter(chain.nodes[-1] for chain in found) == Counter(node.id for node in nodes if node.id not in parents)
    assert {id_ for chain in found for id_ in chain.nodes} == {node.id for node in nodes}


@given(graphs())
def test_each_sampled_token_of_a_trainable_agent_is_trained_exactly_once(graph: Graph) -> None:
    sessions, nodes, calls = graph
    trainable = {session.id for session in sessions if session.trainable}
    expected = {
        token: (logprob, version, node.id)
        for node in nodes
        if node.session in trainable
        for token, logprob, version in zip(node.tokens[node.start :], node.logprobs, node.versions, strict=True)
    }
    seen: Counter[int] = Counter()
    for chain in chains(*graph):
        for token, on, logprob, version, turn in columns(chain):
            if on:
                seen[token] += 1
                assert (logprob, version, calls[turn].node) == expected[token]
    assert seen == Counter(dict.fromkeys(expected, 1))


@given(graphs())
def test_what_nobody_sampled_has_no_logprob_version_or_turn(graph: Graph) -> None:
    sampled = {token for node in graph[1] for token in node.tokens[node.start :]}
    for chain in chains(*graph):
        for token, on, logprob, version, turn in columns(chain):
            if token not in sampled:
                assert (on, logprob, version, turn) == (False, 0.0, -1, -1)
            else:
                assert turn >= 0


def columns(chain: Chain) -> zip[tuple[int, bool, float, int, int]]:
    return zip(chain.tokens, chain.trained, chain.logprobs, chain.versions, chain.turns, strict=True)


def test_a_fork_trains_the_shared_turn_in_the_first_chain_only() -> None:
    make = Maker()
    main = make.session()
    make.turn(main, "search")
    shared = make.leaf[main]
    make.turn(main, content="first try")
    make.leaf[main] = shared  # the harness rolls back
    make.turn(main, content="second try")
    first, second = chains(make.sessions, make.nodes, make.calls)
    assert first.nodes == (0, 1, 2, 3) and second.nodes == (0, 1, 4, 5)
    assert sorted({t for t, on in zip(first.turns, first.trained, strict=True) if on}) == [0, 1]
    assert sorted({t for t, on in zip(second.turns, second.trained, strict=True) if on}) == [2]
    assert second.turns[4:6] == (0, 0), "the shared turn still says which call sampled it"


def test_a_sampled_suffix_under_another_prefix_is_context() -> None:
    make = Maker()
    main = make.session()
    make.turn(main, content="kept")
    kept = make.nodes[1]
    pruned = make.node(main, None, {"role": "user", "content": "summary"}, (7,), 0)
    copy = make.node(main, pruned, dict(kept.message), kept.tokens, 0)
    make.leaf[main] = copy
    make.turn(main, content="next")
    _, other = chains(make.sessions, make.nodes, make.calls)
    assert other.tokens[:4] == (7, *kept.tokens)
    assert not any(other.trained[:4]) and any(other.trained)


def test_frozen_sub_agents_are_recorded_and_never_trained() -> None:
    rollout = swarm([2])
    everything = chains(rollout.sessions, rollout.nodes, rollout.calls)
    assert [chain.session for chain in everything] == ["s0", "s1", "s2"]
    assert [chain.session for chain in trained_chains(rollout)] == ["s0"]
    assert not any(any(chain.trained) for chain in everything[1:])


def test_a_rollout_without_a_reward_or_with_a_lost_capture_trains_nothing() -> None:
    assert trained_chains(solo())
    assert not trained_chains(solo(complete=False))
    assert not trained_chains(solo(terminal=Terminal.INFRASTRUCTURE))
    assert trained_chains(solo(terminal=Terminal.TIMED_OUT))


def broken(change: str) -> Graph:
    rollout = solo(turns=3)
    sessions, nodes, calls = rollout.sessions, rollout.nodes, rollout.calls
    if change == "parent":
        nodes[2] = replace(nodes[2], parent=99)
    elif change == "later parent":
        nodes[2] = replace(nodes[2], parent=4)
    elif change == "lists":
        nodes[1] = replace(nodes[1], logprobs=(-0.5,))
    elif change == "call":
        del calls[1]
    elif change == "context":
        calls[1] = replace(calls[1], context=0)
    elif change == "session":
        sessions.clear()
    return sessions, nodes, calls


@pytest.mark.parametrize("change", ["parent", "later parent", "lists", "call", "context", "session"])
def test_a_damaged_trace_raises_instead_of_becoming_a_shorter_chain(change: str) -> None:
    with pytest.raises(InspanError, match=r"node \d of session 's0'"):
        chains(*broken(change))
