"""The invariants of a record, checked against what a witness at the engine saw. Contract: pure; every breach is named.

What is checked of one rollout
- *as sampled*: each call's path concatenates to exactly the prompt and completion ids of one request that the engine
  served, with its log-probs and versions; no two calls share a request.
- *nothing lost*: each sample that the engine gave for the rollout is one call's, or of a call that ended as cancelled
  or refused while it came.
- *sound record*: ids are unique, parents come before their children, each sample is accounted for by one call.
- *trained once*: each sampled token of a trainable agent is trained in exactly one chain, at its own log-prob and
  version, and no token of a frozen agent or of a context.
- *incomplete is untrained*: a rollout with a failed capture, or without a reward, yields no chain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inspan.errors import InspanError
from inspan.trace.chains import chains, trained_chains
from inspan.trace.records import Chain, Node, Rollout, Tokens


@dataclass(frozen=True, slots=True)
class Witnessed:
    """One request as the engine served it: what went in and what came out."""

    policy: str
    prompt: Tokens
    tokens: Tokens
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Breach:
    """An invariant that a record breaks, and where."""

    invariant: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.what} ({self.where})"


def breaches(rollout: Rollout, seen: Sequence[Witnessed]) -> Iterator[Breach]:
    """All that is wrong with a rollout's record, given all that the engine gave for it."""
    broken = list(_unsound(rollout))
    yield from broken
    if broken:
        return  # paths cannot be walked
    yield from _unlike(rollout, seen)
    yield from _untrue_chains(rollout)


def _unsound(rollout: Rollout) -> Iterator[Breach]:
    ids = [node.id for node in rollout.nodes]
    if len(set(ids)) < len(ids) or len({call.id for call in rollout.calls}) < len(rollout.calls):
        yield Breach("sound record", rollout.id, "two nodes or two calls share an id")
        return
    try:
        chains(rollout.sessions, rollout.nodes, rollout.calls)
    except InspanError as error:
        yield Breach("sound record", error.where or rollout.id, error.what)
    sampled = [call.node for call in rollout.calls if call.node is not None]
    if len(set(sampled)) < len(sampled):
        yield Breach("sound record", rollout.id, "two calls claim one sample")


def _unlike(rollout: Rollout, seen: Sequence[Witnessed]) -> Iterator[Breach]:
    by_id = {node.id: node for node in rollout.nodes}
    policies = {session.id: session.policy for session in rollout.sessions}
    left: dict[Tokens, list[Witnessed]] = defaultdict(list)
    for one in seen:
        left[one.tokens].append(one)
    for call in rollout.calls:
        if call.node is None:
            continue
        node = by_id[call.node]
        prompt, tokens = _path_tokens(node, by_id)
        where = f"call {call.id}, node {node.id}"
        if (call.prompt_tokens, call.completion_tokens) != (len(prompt), len(tokens)):
            yield Breach("as sampled", where, f"counts {call.prompt_tokens} + {call.completion_tokens} tokens, "
                         f"and its path has {len(prompt)} + {len(tokens)}")  # fmt: skip
        recorded = Witnessed(policies[call.session], prompt, tokens, node.logprobs, node.versions)
        candidates = left[tokens]
        if recorded in candidates:
            candidates.remove(recorded)
        else:
            yield Breach("as sampled", where, _difference(recorded, candidates or seen))
    given_up = sum(call.node is None for call in rollout.calls)
    for one in [one for rest in left.values() for one in rest][given_up:]:
        where = f"{len(one.prompt)} + {len(one.tokens)} tokens of {one.policy}"
        yield Breach("nothing lost", where, "the engine gave a sample that no call recorded")


def _untrue_chains(rollout: Rollout) -> Iterator[Breach]:
    found = trained_chains(rollout)
    if not rollout.trainable:
        if found:
            yield Breach("incomplete is untrained", rollout.id, f"{len(found)} chains of an untrainable rollout")
        return
    by_id = {node.id: node for node in rollout.nodes}
    trainable = {session.id: session.trainable for session in rollout.sessions}
    times: dict[tuple[int, int], int] = defaultdict(int)
    for chain in found:
        for position, at in _sampled_positions(chain, by_id):
            node = by_id[at[0]]
            if not chain.trained[position]:
                continue
            if not trainable[node.session]:
                yield Breach("trained once", f"node {node.id}", "a token of a frozen agent is trained")
            same = (chain.tokens[position], chain.logprobs[position], chain.versions[position]) == (
                node.tokens[at[1]], node.logprobs[at[1] - node.start], node.versions[at[1] - node.start],
            )  # fmt: skip
            if not same:
                yield Breach("trained once", f"node {node.id}", f"token {at[1]} is trained as another")
            times[at] += 1
        inside = sum(len(by_id[id].tokens) - by_id[id].start for id in chain.nodes)
        if sum(chain.trained) > inside:
            yield Breach("trained once", f"chain {chain.nodes[-1]}", "a token of a context is trained")
    for node in rollout.nodes:
        counts = {times[node.id, at] for at in range(node.start, len(node.tokens))}
        if trainable[node.session] and counts - {1}:
            yield Breach("trained once", f"node {node.id}", f"its tokens are trained {sorted(counts)} times")


def _sampled_positions(chain: Chain, by_id: dict[int, Node]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Positions of a chain that its nodes sampled, with (node, index in the node)."""
    begin = 0
    for id in chain.nodes:
        node = by_id[id]
        for at in range(node.start, len(node.tokens)):
            yield begin + at, (id, at)
        begin += len(node.tokens)


def _path_tokens(leaf: Node, by_id: dict[int, Node]) -> tuple[Tokens, Tokens]:
    """The ids before the leaf's sample, and the sample."""
    deltas = [leaf.tokens[: leaf.start]]
    parent = leaf.parent
    while parent is not None:
        deltas.append(by_id[parent].tokens)
        parent = by_id[parent].parent
    return tuple(token for delta in reversed(deltas) for token in delta), leaf.tokens[leaf.start :]


def _difference(recorded: Witnessed, candidates: Sequence[Witnessed]) -> str:
    """Where a record departs from the request that is most like it."""
    if not candidates:
        return "the engine served no such request"

    def shared(one: Witnessed) -> int:
        return _common(recorded.prompt + recorded.tokens, one.prompt + one.tokens)

    nearest = max(candidates, key=shared)
    mine, its = recorded.prompt + recorded.tokens, nearest.prompt + nearest.tokens
    if mine != its:
        at = shared(nearest)
        return f"the engine saw {its[at : at + 1] or 'nothing'} at position {at}, the record has {mine[at : at + 1]}"
    for name in ("policy", "prompt", "versions", "logprobs"):
        if getattr(recorded, name) != getattr(nearest, name):
            return f"its {name} differ from the engine's"
    return "its request is another call's already"


def _common(one: Tokens, other: Tokens) -> int:
    at = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        at += 1
    return at
