"""What a store holds, summed up. Contract: reads a store that is being written, or was cut off, as far as it got."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from inspan.trace.delivery import Delivery, delivery
from inspan.trace.records import Call, Node, Session
from inspan.trace.store import TraceStore

UNFINISHED = "unfinished"


@dataclass(slots=True)
class Continued:
    """How the calls of a role got their context."""

    calls: int = 0
    exact: int = 0  # the conversation went on, or began
    forks: Counter[str] = field(default_factory=Counter[str])

    def rates(self) -> dict[str, float]:
        """Shares of the calls: `exact`, and `fork:<reason>`."""
        shares = {"exact": self.exact / self.calls} if self.calls else {}
        return shares | {f"fork:{reason}": count / self.calls for reason, count in self.forks.most_common()}


@dataclass(slots=True)
class Inspection:
    """Sums over the rollouts of a store. Tokens of prompts are counted as processed, and once where they are shared."""

    rollouts: Counter[str] = field(default_factory=Counter[str])
    finishes: Counter[str] = field(default_factory=Counter[str])
    roles: dict[str, Continued] = field(default_factory=lambda: defaultdict(Continued))
    processed: int = 0
    unique: int = 0
    sampled: int = 0
    tool_calls: int = 0
    invalid: Counter[str] = field(default_factory=Counter[str])
    delivered: Delivery = field(default_factory=Delivery)

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "rollouts": dict(self.rollouts),
            "calls": dict(self.finishes),
            "continued": {role: one.rates() | {"calls": one.calls} for role, one in sorted(self.roles.items())},
            "tokens": {"processed": self.processed, "unique": self.unique, "sampled": self.sampled},
            "tool_calls": {"all": self.tool_calls, "invalid": dict(self.invalid)},
            "delivery": {
                "sampled": self.delivered.sampled,
                "trained": self.delivered.trained,
                **self.delivered.figures(),
            },
        }


def inspect(store: TraceStore, *, abandoned: bool = True) -> Inspection:
    """All rollouts of a store. Unfinished ones count with what they have so far, except in the delivery."""
    out = Inspection()
    for row in store.rollouts():
        out.rollouts[UNFINISHED if row.terminal is None else row.terminal.value] += 1
        sessions, nodes, calls = store.load(row.id)
        _count(out, sessions, nodes, calls)
        if row.terminal is not None:
            out.delivered += delivery(store.load_rollout(row.id), abandoned=abandoned)
    return out


def _count(out: Inspection, sessions: Sequence[Session], nodes: Sequence[Node], calls: Sequence[Call]) -> None:
    roles = {session.id: session.agent for session in sessions}
    by_id = {node.id: node for node in nodes}
    seen: set[int] = set()
    out.unique += sum(len(node.tokens) for node in nodes)
    for call in calls:
        out.finishes[call.finish] += 1
        out.tool_calls += len(call.tool_calls)
        out.invalid.update(one.error for one in call.tool_calls if one.error)
        if call.node is None:
            continue
        out.processed += call.prompt_tokens + call.completion_tokens
        out.sampled += call.completion_tokens
        fork = _fork(call.node, by_id, seen)
        role = out.roles[roles[call.session]]
        role.calls += 1
        if fork is None:
            role.exact += 1
        else:
            role.forks[fork] += 1


def _fork(leaf: int, by_id: dict[int, Node], seen: set[int]) -> str | None:
    """The reason of the newest fork among the nodes that a call brought; None when it only went on."""
    found = None
    at: int | None = leaf
    while at is not None and at not in seen:
        seen.add(at)
        found = found or by_id[at].fork
        at = by_id[at].parent
    return found


def tree(rollout: str, sessions: Sequence[Session], nodes: Sequence[Node], calls: Sequence[Call]) -> Iterator[str]:
    """A rollout's messages as an indented tree, a line each: forks with their reason, tokens, calls."""
    below: dict[int | None, list[Node]] = defaultdict(list)
    for node in nodes:
        below[node.parent].append(node)
    call_of = {call.node: call for call in calls if call.node is not None}
    yield rollout
    for session in sessions:
        kind = "trained" if session.trainable else "frozen"
        under = f", for {session.parent_call} of {session.parent}" if session.parent_call else ""
        yield f"  {session.id}: {session.agent}, {session.policy}, {kind}{under}"
        todo = [(node, 2) for node in reversed(below[None]) if node.session == session.id]
        while todo:
            node, depth = todo.pop()
            yield _line(node, depth, call_of.get(node.id))
            children = below[node.id]
            todo += [(child, depth + (len(children) > 1)) for child in reversed(children)]
        for call in calls:
            if call.session == session.id and call.node is None:
                yield f"    call {call.id}: {call.finish}" + (f" ({call.error})" if call.error else "")


def _line(node: Node, depth: int, call: Call | None) -> str:
    message = node.message
    text = " ".join(str(message.get("content") or "").split())
    names = [str(one["name"]) for one in message.get("tool_calls") or ()]
    said = (text[:60] + "…" if len(text) > 60 else text) + "".join(f" [{name}]" for name in names)
    counts = f"+{node.start}" + (f" ~{len(node.tokens) - node.start}" if node.sampled else "")
    fork = f"  <fork: {node.fork}>" if node.fork else ""
    ended = f"  ({call.finish})" if call else ""
    return f"{'  ' * depth}{node.id:>3} {message['role']:<9} {counts:<10} {said}{fork}{ended}"
