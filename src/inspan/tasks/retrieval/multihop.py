"""Multi-hop questions over the facts of a world, made and verified by a program. Contract: pure and seeded.

    Find the population of the capital of the country of Maradi.        three facts, two bridges

A question names its first entity; the bridges (Niger, Niamey) stand in passages only. What is kept is verified: every
fact is held by a passage, the question names no bridge and no answer, and no passage but those that hold the last fact
so much as mentions the answer. `Made.dropped` counts what was not kept, by reason.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from inspan.errors import TaskError
from inspan.tasks.base import Task
from inspan.tasks.facts.world import World
from inspan.tasks.retrieval.passages import FactCorpus

HOPS = (1, 2, 3)
NEAR_SHARE = 0.5
"""Share of the questions whose first entity is drawn among those with a near-named one [D]."""
MOST_TRIES = 400

Fact = tuple[str, str]
"""Entity and attribute."""


@dataclass(slots=True)
class Made:
    """Questions, and why others were dropped."""

    tasks: list[Task] = field(default_factory=list[Task])
    dropped: Counter[str] = field(default_factory=Counter[str])


def kind(hops: int) -> str:
    """The kind of task by its number of hops."""
    return f"hops_{hops}"


def prompt(world: World, chain: list[Fact]) -> str:
    """The question of a chain: its attributes from the last to the first, and the first entity."""
    wanted = " of the ".join(world.label(attribute) for _, attribute in reversed(chain))
    return f"Find the {wanted} of {chain[0][0]}."


def draw_chain(world: World, hops: int, rng: random.Random) -> list[Fact] | None:
    """A chain of facts, each but the last leading to the entity of the next; None when the draw leads nowhere."""
    near = rng.random() < NEAR_SHARE
    names = [name for name in world.entities if world.neighbours[name] or not near]
    if not names:
        return None
    name = rng.choice(names)
    chain: list[Fact] = []
    for hop in range(1, hops + 1):
        values = world.entities[name].values
        able = [a for a in values if hop == hops or values[a] in world.entities]
        if not able:
            return None
        attribute = rng.choice(able)
        chain.append((name, attribute))
        name = values[attribute]
    entities = [entity for entity, _ in chain]
    return chain if len(set(entities)) == hops else None


def why_not(corpus: FactCorpus, chain: list[Fact], text: str) -> str | None:
    """Why a chain makes no good question; None when it does."""
    world = corpus.world
    answer = world.value(*chain[-1])
    holders = [corpus.holders(*fact) for fact in chain]
    if not all(holders):
        return "a fact that no passage holds"
    if any(hidden in text for hidden in [answer, *(name for name, _ in chain[1:])]):
        return "the question gives away a bridge or the answer"
    if corpus.mentioning(answer) - set(holders[-1]):
        return "another passage mentions the answer"
    return None


def make(corpus: FactCorpus, hops: int, rng: random.Random, dropped: Counter[str], *, id: str) -> Task:
    """One verified question. Raises TaskError when the world gives none."""
    if hops not in HOPS:
        raise TaskError(f"{hops} hops", where="tasks.hops", hint=f"known: {', '.join(map(str, HOPS))}")
    for _ in range(MOST_TRIES):
        chain = draw_chain(corpus.world, hops, rng)
        if chain is None:
            continue
        text = prompt(corpus.world, chain)
        reason = why_not(corpus, chain, text)
        if reason is None:
            return _task(corpus, chain, text, id)
        dropped[reason] += 1
    raise TaskError(f"{MOST_TRIES} draws gave no question of {hops} hops", where=id, hint="ask for other hops")


def _task(corpus: FactCorpus, chain: list[Fact], text: str, id: str) -> Task:
    evidence = [corpus.holders(*fact) for fact in chain]
    of_chunk = {passage.id: passage.document for passage in corpus.passages}
    meta = {
        "hops": len(chain),
        "chain": [list(fact) for fact in chain],
        "evidence": evidence,
        "documents": [sorted({of_chunk[chunk] for chunk in chunks}) for chunks in evidence],
        "answer_chunks": evidence[-1],
    }
    return Task(id, text, corpus.world.value(*chain[-1]), kind(len(chain)), meta=meta)


def make_set(corpus: FactCorpus, hops: Mapping[int, float], count: int, *, seed: int, prefix: str) -> Made:
    """`count` questions with the given shares of hops (rounded by largest remainder), in shuffled order, each once."""
    total = sum(hops.values())
    if count < 1 or total <= 0:
        raise TaskError(f"an empty task set: {count} tasks of {dict(hops)}", hint="give hops a positive share")
    exact = {number: count * share / total for number, share in hops.items()}
    counts = {number: int(x) for number, x in exact.items()}
    for number in sorted(exact, key=lambda n: counts[n] - exact[n])[: count - sum(counts.values())]:
        counts[number] += 1
    rng = random.Random(f"multihop {seed} {prefix}")
    order = [number for number, n in counts.items() for _ in range(n)]
    rng.shuffle(order)
    made, asked = Made(), set()
    for number in order:
        for _ in range(MOST_TRIES):
            task = make(corpus, number, rng, made.dropped, id=f"{prefix}-{len(made.tasks):04d}-{kind(number)}")
            if task.prompt not in asked:
                break
            made.dropped["asked before"] += 1
        else:
            raise TaskError(f"the world has too few questions of {number} hops", where=prefix, hint="ask for fewer")
        asked.add(task.prompt)
        made.tasks.append(task)
    return made
