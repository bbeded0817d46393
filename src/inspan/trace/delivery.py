"""What became of the tokens that the policy sampled. Contract: pure; every token has one fate, from a closed list.

delivered_fraction = trained / (sampled − excluded). What is neither trained nor excluded for one of `REASONS` is
*unexplained*: it must be 0, and a run says so loudly when it is not. Sampled tokens are counted from the calls, trained
ones from the chains that the learner gets, so that a loss between the two cannot hide.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from inspan.trace.chains import trained_chains
from inspan.trace.records import Node, Rollout

Reason = Literal[
    "side request",  # the policy spoke for a role that is not trained: titles, summaries, token counts
    "superseded retry",  # the same context was sampled again, and only the later sample went on (by recipe)
    "rolled back",  # the harness went back and left the branch (by recipe)
    "incomplete capture",  # a call of the rollout could not be recorded whole
    "no reward",  # the rollout ended by a fault of the infrastructure, or was cancelled
]
REASONS: tuple[str, ...] = get_args(Reason)
_LEFT: dict[str, Reason] = {"rolled back": "rolled back", "sampled again": "superseded retry"}


@dataclass(slots=True)
class Delivery:
    """Counts of tokens. Adding two gives those of both."""

    sampled: int = 0
    trained: int = 0
    excluded: Counter[str] = field(default_factory=Counter[str])

    @property
    def unexplained(self) -> int:
        """Tokens without a fate: a loss."""
        return self.sampled - self.trained - self.excluded.total()

    @property
    def fraction(self) -> float:
        """delivered_fraction; 1 when there was nothing to deliver."""
        due = self.sampled - self.excluded.total()
        return self.trained / due if due else 1.0

    def __add__(self, other: Delivery) -> Delivery:
        return Delivery(self.sampled + other.sampled, self.trained + other.trained, self.excluded + other.excluded)

    def figures(self) -> dict[str, object]:
        """As metrics."""
        return {
            "delivered_fraction": self.fraction,
            "unexplained_tokens": self.unexplained,
            "excluded_tokens": {reason: self.excluded[reason] for reason in REASONS if self.excluded[reason]},
        }


def delivery(rollout: Rollout, *, abandoned: bool = True) -> Delivery:
    """The fates of a rollout's tokens; without `abandoned`, branches that the harness left are not trained."""
    trainable = {session.id: session.trainable for session in rollout.sessions}
    trained_policies = {session.policy for session in rollout.sessions if session.trainable}
    side = {s.id for s in rollout.sessions if not s.trainable and s.policy in trained_policies}
    left = {} if abandoned else given_up(rollout.nodes)
    out = Delivery()
    whole: Reason | None = None
    if not rollout.trainable:
        whole = "no reward" if not rollout.terminal.scored else "incomplete capture"
    for call in rollout.calls:
        if not trainable[call.session] and call.session not in side:
            continue
        out.sampled += call.completion_tokens
        reason: str | None = whole or left.get(-1 if call.node is None else call.node)
        if call.session in side:
            reason = "side request"
        if reason is not None:
            out.excluded[reason] += call.completion_tokens
    kept = rollout if abandoned else leave_out(rollout, left)
    out.trained = sum(sum(chain.trained) for chain in trained_chains(kept))
    return out


def total(deliveries: Iterable[Delivery]) -> Delivery:
    """All together."""
    return sum(deliveries, Delivery())


def given_up(nodes: Sequence[Node]) -> dict[int, Reason]:
    """Sampled nodes on branches that the harness left for a later one from the same context, and why.

    A branch counts as left when nothing was added to it after the later one had begun.
    """
    below: dict[int | None, list[int]] = defaultdict(list)
    for node in nodes:
        below[node.parent].append(node.id)
    newest: dict[int, int] = {}
    for node in sorted(nodes, key=lambda node: node.id, reverse=True):  # children have larger ids than parents
        newest[node.id] = max([node.id, *(newest[child] for child in below[node.id])])
    sampled = {node.id for node in nodes if node.sampled}
    sessions = {node.id: node.session for node in nodes}
    out: dict[int, Reason] = {}
    for node in nodes:
        reason = _LEFT.get(node.fork or "")
        if reason is None:
            continue
        for sibling in below[node.parent]:
            if sibling < node.id and newest[sibling] < node.id and sessions[sibling] == node.session:
                todo = [sibling]
                while todo:
                    at = todo.pop()
                    todo += below[at]
                    if at in sampled:
                        out.setdefault(at, reason)
    return out


def leave_out(rollout: Rollout, nodes: Iterable[int]) -> Rollout:
    """The rollout with some samples turned into context: they stay where they are, and are not trained."""
    out = set(nodes)
    return replace(
        rollout,
        nodes=[replace(n, start=len(n.tokens), logprobs=(), versions=()) if n.id in out else n for n in rollout.nodes],
        calls=[replace(call, node=None) if call.node in out else call for call in rollout.calls],
    )
