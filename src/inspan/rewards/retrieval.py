"""`retrieval`: the reward of a search agent, and the figures of its trajectory (Context-1 report; recipes: search).

    clamp(f·F_β + trajectory·recall of all that was seen + answer − p_prune − p_turn, ε, max(ε, before the fines))

It judges the *unpruned* trajectory: what tools brought at any time, by their events. Each term cures a degeneration and
is switched off by a 0: `trajectory` (search once and quit), `answer` (on topic, without the answer), `prune_step`
(pruning one at a time), `turn_cap` (endless search). Only a rollout that ended with an answer has the floor; any other
earns 0. A chunk in the answer that was never shown counts as wrong, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from inspan.errors import RecipeError
from inspan.rewards.ranking import Facts, f_beta, ndcg, precision, recall, reciprocal_rank
from inspan.schedule import Schedule
from inspan.tasks.retrieval.answer import parse_ranked
from inspan.tasks.retrieval.evidence import Evidence, evidence_of
from inspan.trace.records import Rollout, Terminal

Level = Literal["chunk", "document"]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What a search agent saw, pruned and answered: chunk ids. `documents` are those of the chunks it saw."""

    seen: tuple[str, ...]
    pruned: tuple[str, ...]
    output: tuple[str, ...]
    documents: dict[str, str]
    prunes: tuple[int, ...]  # of each tool call in order: chunks that a prune_chunks named in view, -1 of any other
    turns: int

    @property
    def streak(self) -> int:
        """The longest run of calls that each prune one chunk at most [D]."""
        longest = run = 0
        for pruned in self.prunes:
            run = run + 1 if 0 <= pruned <= 1 else 0
            longest = max(longest, run)
        return longest

    def listed(self, level: Level) -> list[str]:
        """The answer as chunks, or as the documents of its chunks; what was never seen stays what it is: wrong."""
        if level == "chunk":
            return [id if id in self.documents else f"unseen {id}" for id in self.output]
        return list(dict.fromkeys(self.documents.get(id, f"unseen {id}") for id in self.output))


def trajectory_of(rollout: Rollout) -> Trajectory:
    """The trajectory by the events of its tools."""
    documents: dict[str, str] = {}
    pruned: list[str] = []
    prunes: list[int] = []
    for event in rollout.tool_events:
        documents.update(zip(event.data.get("chunks", ()), event.data.get("documents", ()), strict=True))
        pruned += event.data.get("pruned", ())
        prunes.append(len(event.data.get("pruned", ())) if event.name == "prune_chunks" else -1)
    trainable = {session.id for session in rollout.sessions if session.trainable}
    turns = sum(call.session in trainable or not trainable for call in rollout.calls)
    output = tuple(row.id for row in parse_ranked(rollout.answer or "", documents))
    return Trajectory(tuple(documents), tuple(pruned), output, documents, tuple(prunes), turns)


def retrieval_figures(rollout: Rollout) -> dict[str, float]:
    """The figures of a retrieval task's rollout; empty when its task has no evidence.

    `output_recall`, `precision`, `f1`, `answer_found`, `ndcg`, `mrr` of the answer; `trajectory_recall`;
    `prune_accuracy` (share of the pruned chunks that hold no fact) where something was pruned; `pruned` (chunks);
    `tool_calls_per_turn` (over the turns that call tools).
    """
    evidence = evidence_of(rollout.task)
    if evidence is None:
        return {}
    path = trajectory_of(rollout)
    listed, facts = path.listed("chunk"), evidence.facts
    p, r = precision(listed, facts), recall(listed, facts)
    figures = {
        "f1": f_beta(p, r, 1.0),
        "output_recall": r,
        "precision": p,
        "answer_found": float(_answered(path, evidence)),
        "trajectory_recall": recall(path.seen, facts),
        "ndcg": ndcg(listed, facts),
        "mrr": reciprocal_rank(listed, facts),
        "pruned": float(len(path.pruned)),
    }
    if path.pruned:
        figures["prune_accuracy"] = sum(id not in evidence.chunks for id in path.pruned) / len(path.pruned)
    calling = [len(call.tool_calls) for call in rollout.calls if call.tool_calls]
    if calling:
        figures["tool_calls_per_turn"] = sum(calling) / len(calling)
    return figures


def _answered(path: Trajectory, evidence: Evidence) -> bool:
    return not evidence.answer.isdisjoint(path.listed("chunk"))


@dataclass(frozen=True, slots=True)
class Retrieval:
    """The term. `beta` is a schedule; called without `at`, a rollout is judged by its end."""

    beta: Schedule
    f: float
    trajectory: float
    answer: float
    prune_step: float
    prune_free: int
    prune_cap: float
    turn_from: float
    turn_to: float
    turn_cap: float
    floor: float
    level: Level

    def at(self, progress: float, /) -> Retrieval:
        """The term as it is at `progress` of the run."""
        now = self.beta.at(progress)
        return replace(self, beta=Schedule(now, now))

    def __call__(self, rollout: Rollout, /) -> float | None:
        """The reward of one rollout; None when its task has no evidence."""
        evidence = evidence_of(rollout.task)
        if evidence is None or (self.level == "document" and not evidence.documents):
            return None
        if rollout.terminal is not Terminal.COMPLETED:
            return 0.0
        path = trajectory_of(rollout)
        before = self.earned(path, evidence)
        fined = before - self.p_prune(path.streak) - self.p_turn(path.turns)
        return min(max(fined, self.floor), max(self.floor, before))

    def earned(self, path: Trajectory, evidence: Evidence) -> float:
        """What a trajectory earns before the fines."""
        facts: Facts = evidence.facts if self.level == "chunk" else evidence.documents
        seen: Sequence[str] = path.seen if self.level == "chunk" else tuple(path.documents.values())
        listed = path.listed(self.level)
        outcome = f_beta(precision(listed, facts), recall(listed, facts), self.beta.end)
        return self.f * outcome + self.trajectory * recall(seen, facts) + self.answer * float(_answered(path, evidence))

    def p_prune(self, streak: int) -> float:
        """The fine for pruning one at a time."""
        return min(self.prune_cap, self.prune_step * max(0, streak - self.prune_free))

    def p_turn(self, turns: int) -> float:
        """The fine for endless search: from 0 at `turn_from` linearly to `turn_cap` at `turn_to` turns."""
        share = (turns - self.turn_from) / (self.turn_to - self.turn_from)
        return self.turn_cap * min(max(share, 0.0), 1.0)


def retrieval(
    *,
    beta_from: float = 4.0,
    beta_to: float = 2.0,
    beta_over: float = 1.0,
    f: float = 0.7,
    trajectory: float = 0.3,
    answer: float = 1.0,
    prune_step: float = 0.1,
    prune_free: int = 3,
    prune_cap: float = 0.5,
    turn_from: float = 64,
    turn_to: float = 128,
    turn_cap: float = 0.5,
    floor: float = 0.001,
    level: Level = "chunk",
) -> Retrieval:
    """The reward with Context-1's numbers [P; ε from code, C]. `turn_from` and `turn_to` scale with the recipe."""
    amounts = {"f": f, "trajectory": trajectory, "answer": answer, "prune_step": prune_step, "prune_cap": prune_cap}
    amounts |= {"turn_cap": turn_cap, "floor": floor, "prune_free": prune_free, "turn_from": turn_from}
    for name, value in amounts.items():
        if value < 0:
            raise RecipeError(f"{name} is {value}", where="retrieval", hint="give 0 (off) or more")
    if turn_to <= turn_from:
        raise RecipeError(f"turn_to {turn_to} is not above turn_from {turn_from}", where="retrieval")
    if min(beta_from, beta_to) <= 0:
        raise RecipeError(f"beta goes from {beta_from} to {beta_to}", where="retrieval", hint="give numbers above 0")
    if level not in ("chunk", "document"):
        raise RecipeError(f"level is {level!r}", where="retrieval", hint="chunk or document")
    beta = Schedule(float(beta_from), float(beta_to), float(beta_over))
    return Retrieval(
        beta, f, trajectory, answer, prune_step, prune_free, prune_cap, turn_from, turn_to, turn_cap, floor, level
    )
