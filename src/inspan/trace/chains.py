"""From nodes to chains. Contract: pure; a chain is the path from a root to a leaf of one session's message graph.

Invariants
1. The deltas along a path concatenate to exactly the ids that the engine saw, and nothing is tokenised here.
2. A token is trained when the engine sampled it for a trainable agent, in exactly the context that stands before it in
   the chain. What was sampled under another prefix stands in its chain as context (its node says so: it has no sample).
3. A sampled node that several chains share is trained in the first of them only (leaves in the order of their ids), so
   each sampled token is trained once; the other chains hold it as context.
4. Tokens of frozen agents are never trained.

A record that breaks this (a parent that is missing, lists of unequal length, a sample that no call accounts for) raises
`InspanError`: it must not become a shorter or wrong chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inspan.errors import InspanError
from inspan.trace.records import Call, Chain, Node, Rollout, Session


def chains(sessions: Iterable[Session], nodes: Sequence[Node], calls: Sequence[Call]) -> list[Chain]:
    """All chains of a rollout: sessions in the given order, leaves by id. Frozen sessions' chains train nothing."""
    by_id = {node.id: node for node in nodes}
    turn_of = {call.node: index for index, call in enumerate(calls) if call.node is not None}
    owners = {session.id: session for session in sessions}
    parents = set()
    leaves: dict[str, list[Node]] = {session: [] for session in owners}
    for node in nodes:
        _check(node, by_id, owners)
        if node.sampled and (node.id not in turn_of or calls[turn_of[node.id]].context != node.parent):
            raise _broken(node, "was sampled, but no call accounts for it in this context")
        parents.add(node.parent)
    for node in sorted(nodes, key=lambda node: node.id):
        if node.id not in parents:
            leaves[node.session].append(node)
    trained: set[int] = set()
    return [
        _chain(owners[session], _path(leaf, by_id), turn_of, trained) for session in owners for leaf in leaves[session]
    ]


def trained_chains(rollout: Rollout) -> list[Chain]:
    """The chains of a rollout that train at least one token; none when the rollout is not trainable."""
    if not rollout.trainable:
        return []
    return [chain for chain in chains(rollout.sessions, rollout.nodes, rollout.calls) if any(chain.trained)]


def _path(leaf: Node, by_id: dict[int, Node]) -> list[Node]:
    path = [leaf]
    while path[-1].parent is not None:
        path.append(by_id[path[-1].parent])
    path.reverse()
    return path


def _chain(session: Session, path: list[Node], turn_of: dict[int, int], done: set[int]) -> Chain:
    tokens: list[int] = []
    trained: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    turns: list[int] = []
    for node in path:
        sampled = len(node.tokens) - node.start
        fresh = session.trainable and node.sampled and node.id not in done
        tokens += node.tokens
        trained += [False] * node.start + [fresh] * sampled
        logprobs += [0.0] * node.start
        logprobs += node.logprobs
        versions += [-1] * node.start
        versions += node.versions
        turns += [-1] * node.start + [turn_of.get(node.id, -1)] * sampled
        if node.sampled:
            done.add(node.id)
    return Chain(
        session=session.id,
        agent=session.agent,
        policy=session.policy,
        tokens=tuple(tokens),
        trained=tuple(trained),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        turns=tuple(turns),
        nodes=tuple(node.id for node in path),
    )


def _check(node: Node, by_id: dict[int, Node], owners: dict[str, Session]) -> None:
    sampled = len(node.tokens) - node.start
    if node.session not in owners:
        raise _broken(node, f"belongs to session {node.session!r}, which is not in the records")
    if node.parent is not None:
        parent = by_id.get(node.parent)
        if parent is None or parent.session != node.session or parent.id >= node.id:
            raise _broken(node, f"has parent {node.parent}, which is not an earlier node of its session")
    if not 0 <= node.start <= len(node.tokens) or not sampled == len(node.logprobs) == len(node.versions):
        found = f"{sampled} sampled tokens, {len(node.logprobs)} log-probs, {len(node.versions)} versions"
        raise _broken(node, f"has {found}")


def _broken(node: Node, what: str) -> InspanError:
    where = f"node {node.id} of session {node.session!r}"
    return InspanError(what, where=where, hint="the trace is damaged; leave this rollout out")
