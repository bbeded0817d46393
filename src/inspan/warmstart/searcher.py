"""Demonstrations of the search agent: a scripted searcher in the real harness. Contract: what a model is shown is what
`SearchSession` shows it, so a demonstration looks exactly like a rollout.

`SearchHabits` sets how faulty the searcher is; the defaults are clean: a search for each fact of the chain, what is not
needed pruned in the same turn as the next search, and an answer that lists the facts in order. Reinforcement learning
is to mend what the faulty habits spoil.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inspan.config.search import Search
from inspan.harness.loop import requests_of
from inspan.harness.search.agent import PRUNE
from inspan.harness.search.budget import Budget
from inspan.harness.search.corpus_tools import SCHEMAS, CorpusTools
from inspan.harness.search.session import PRUNE_NAME, SearchSession
from inspan.harness.search.tokens import Count
from inspan.harness.tools import FAULTS, Faults
from inspan.retrieval.memory import MemoryIndex, index_passages
from inspan.tasks.base import Task
from inspan.tasks.retrieval.answer import Ranked, format_ranked
from inspan.tasks.retrieval.passages import FactCorpus

NOTHING = "Nothing was found."
MOST_RETRIES = 2
MOST_TOKENS = 128  # of an answer
TOOLS = [*SCHEMAS, PRUNE]
"""The schemas that a demonstration offers."""

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class SearchHabits:
    """How the searcher behaves: rates per episode (quit, single, apart), search (forget, wrong, read, grep, fault) and
    chunk (partial, sloppy)."""

    quit: float = 0.0  # answers after some of the facts
    forget: float = 0.0  # goes on without pruning
    wrong: float = 0.0  # prunes a chunk that is needed
    partial: float = 0.0  # leaves a chunk that is not needed
    sloppy: float = 0.0  # lists a chunk that holds no fact
    single: float = 0.0  # prunes one at a time
    apart: float = 0.25  # prunes in a turn of its own
    read: float = 0.2  # reads a document that it knows a part of, rather than search
    grep: float = 0.05  # greps for a name, rather than search
    fault: float = 0.02  # a tool fails (and is tried again)


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call of an episode: the messages that were shown, and what is to be said."""

    prompt: list[dict[str, Any]]
    reply: dict[str, Any]


@dataclass(slots=True)
class Searcher:
    """The scripted searcher in one corpus."""

    corpus: FactCorpus
    search: Search
    count: Count
    system: str
    rng: random.Random
    habits: SearchHabits = field(default_factory=SearchHabits)
    index: MemoryIndex = field(init=False)

    def __post_init__(self) -> None:
        self.index = index_passages(self.corpus.passages)

    def episode(self, task: Task, *, steps: int = 24) -> list[Turn]:
        """Work on a task to its end."""
        return _Episode(self, task, steps).play()


@dataclass(slots=True)
class _Planned(Faults):
    """Tools that fail when they are told to."""

    error: str | None = None

    def draw(self, name: str, arguments: Mapping[str, Any], session: str = "") -> str | None:
        return self.error


class _Episode:
    """The state of one episode. A method that acts returns whether the episode goes on."""

    def __init__(self, searcher: Searcher, task: Task, steps: int) -> None:
        self.who, self.rng, self.habits = searcher, searcher.rng, searcher.habits
        self.world = searcher.corpus.world
        self.faults = _Planned()
        tools = CorpusTools(searcher.index, searcher.search.candidates, searcher.search.grep_chunks, self.faults)
        budget = Budget(searcher.search)
        self.session = SearchSession(task.prompt, searcher.system, tools, budget, searcher.count, steps)
        self.chain = [tuple(fact) for fact in task.meta["chain"]]
        self.evidence = [set(chunks) for chunks in task.meta["evidence"]]
        self.apart, self.single = self._chance(self.habits.apart), self._chance(self.habits.single)
        self.turns: list[Turn] = []

    def play(self) -> list[Turn]:
        """Hop after hop, then the answer."""
        hops = len(self.chain)
        stop = self.rng.randint(1, hops - 1) if hops > 1 and self._chance(self.habits.quit) else hops
        for hop in range(stop):
            if not self._hop(hop):
                break
        self._say(self._answer())
        return self.turns

    def _hop(self, hop: int) -> bool:
        """Find one fact; False when it is not found, or the budget asks for the answer."""
        name, attribute = self.chain[hop]
        query = f"{name} {self.world.label(attribute)}"
        call: Call = ("search_corpus", {"query": query})
        known = [c.document for c in self.session.view.seen.values() if self.who.corpus.about[c.id][0] == name]
        if known and self._chance(self.habits.read):
            call = ("read_document", {"doc_id": known[-1]})
        elif self._chance(self.habits.grep):
            call = ("grep_corpus", {"pattern": name})
        for attempt in range(MOST_RETRIES + 1):
            if hop or attempt:
                if not self._prune(hop, call):
                    return False
            elif not self._act(call):
                return False
            if self.session.last or self._found(hop):
                return not self.session.last
            call = ("search_corpus", {"query": query})
        return False

    def _prune(self, hop: int, then: Call) -> bool:
        """Prune what is not needed, and go on with the next call, in one turn or in several."""
        ids = [] if self._chance(self.habits.forget) and not self._tight() else self._junk()
        needed = [id for at in range(hop) for id in self._visible(at)]
        if self.apart and hop:
            needed = [id for id in needed if id not in self.evidence[hop - 1]]  # or the next query could not be written
        if ids and needed and self._chance(self.habits.wrong):
            ids.insert(self.rng.randint(0, len(ids)), self.rng.choice(needed))
        if not ids:
            return self._act(then)
        if self.single:
            return all(self._act((PRUNE_NAME, {"chunk_ids": [id]})) for id in ids) and self._act(then)
        prune: Call = (PRUNE_NAME, {"chunk_ids": ids})
        return self._act(prune) and self._act(then) if self.apart else self._act(prune, then)

    def _junk(self) -> list[str]:
        """The chunks in view that hold no fact of the chain, some of them overlooked."""
        held = set().union(*self.evidence)
        junk = [id for id in self.session.view.visible if id not in held]
        return [id for id in junk if not self._chance(self.habits.partial)]

    def _tight(self) -> bool:
        """Whether the tools refuse to work."""
        return self.session.budget.refusal(self.session.view.used()) is not None

    def _visible(self, hop: int) -> list[str]:
        return [id for id in self.session.view.visible if id in self.evidence[hop]]

    def _found(self, hop: int) -> bool:
        return bool(self._visible(hop))

    def _answer(self) -> str:
        """The visible chunks of the chain, fact by fact, and some that do not belong."""
        ids = [id for hop in range(len(self.chain)) for id in self._visible(hop)]
        held = set(ids)
        for id in self.session.view.visible:
            if id not in held and self._chance(self.habits.sloppy):
                ids.append(id)
        rows = [Ranked(id, self._why(id)) for id in dict.fromkeys(ids)]
        while self.who.count(format_ranked(rows)) >= self.session.room(MOST_TOKENS):
            rows.pop()
        return format_ranked(rows) or NOTHING

    def _why(self, id: str) -> str:
        for (name, attribute), chunks in zip(self.chain, self.evidence, strict=True):
            if id in chunks:
                return f"{name} {self.world.label(attribute)}"
        name, attribute = self.who.corpus.about[id]
        return f"{name} {self.world.label(attribute)}"

    def _act(self, *calls: Call) -> bool:
        """One turn of tool calls, again after a fault; False when the budget asks for the answer."""
        while True:
            work = [call for call in calls if call[0] != PRUNE_NAME]
            self.faults.error = (
                f"error: {self.rng.choice(FAULTS)}" if work and self._chance(self.habits.fault) else None
            )
            self._take(calls)
            if self.session.last or self.faults.error is None:
                return not self.session.last
            calls = tuple(work)

    def _take(self, calls: Sequence[Call]) -> None:
        number = len(self.turns)
        made = [
            {
                "id": f"c{number}-{at}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for at, (name, arguments) in enumerate(calls)
        ]
        reply = {"role": "assistant", "content": "", "tool_calls": made}
        self.turns.append(Turn(self.session.prompt(), reply))
        self.session.take(reply, requests_of(reply))

    def _say(self, text: str) -> None:
        self.turns.append(Turn(self.session.prompt(), {"role": "assistant", "content": text}))

    def _chance(self, rate: float) -> bool:
        return self.rng.random() < rate
