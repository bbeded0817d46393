"""Demonstrations of the search agent as rows to train on. Contract: an example follows from its generator alone.

A view that was pruned, or that showed a note, is a new prefix: an episode gives one row for each, and every turn is
learnt in one of them, in exactly the context in which it is said. A draw takes one row of one episode.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from inspan.gateway.render import ChatML
from inspan.harness.search.tokens import Count
from inspan.learner.sft import Example
from inspan.tasks.facts import atlas
from inspan.tasks.facts.world import INFOBOX, PROSE, build
from inspan.tasks.retrieval import multihop
from inspan.tasks.retrieval.passages import FactCorpus, corpus_of
from inspan.warmstart.fantasy import LAYOUTS, chained_world
from inspan.warmstart.recipe import PhaseSection, WarmstartRecipe
from inspan.warmstart.searcher import TOOLS, Searcher, SearchHabits, Turn
from inspan.warmstart.source import REAL_WORLDS, copy_example

SCAFFOLD = (
    "search_corpus",
    "grep_corpus",
    "read_document",
    "prune_chunks",
    '", "arguments": {"chunk_ids": ["',
    '"]}}\n</tool_call>',
    "[Token usage: ",
    "Prune chunks or conclude.",
    "[pruned]",
    "pruned ",
    " tokens are used: only prune_chunks works now; prune or answer",
    "nothing new found",
    "not in view: ",
    " more do not fit",
)
"""Tokens of their own for what the harness and its calls repeat."""
MAX_TOKENS = 1200


def rows_of(renderer: ChatML, turns: Sequence[Turn], *, reading: float = 0.0) -> list[Example]:
    """An episode as rows: exactly the tokens that the gateway would have recorded, each turn learnt once.

    `reading` is the weight of the tokens that the agent reads (beyond the first message); its own weigh 1.
    """
    rows: list[Example] = []
    shown: list[dict[str, Any]] = []
    learnt: set[int] = set()
    for turn in turns:
        if shown and turn.prompt[: len(shown)] != shown:
            rows.append(_row(renderer, shown, learnt, reading))
            learnt = set()
        shown = [*turn.prompt, turn.reply]
        learnt.add(len(shown) - 1)
    return [*rows, _row(renderer, shown, learnt, reading)]


def _row(renderer: ChatML, messages: Sequence[dict[str, Any]], learnt: set[int], reading: float) -> Example:
    tokens = list(renderer.context({**messages[0], "tools": TOOLS}))
    weights = [0.0] * len(tokens)
    after: Any = "context"
    for at, message in enumerate(messages[1:], 1):
        if message["role"] != "assistant":
            delta = renderer.context(message, after=after)
            tokens, weights, after = [*tokens, *delta], [*weights, *[reading] * len(delta)], "context"
            continue
        delta, said = renderer.opening(after=after), renderer.spoken(_internal(message))
        tokens = [*tokens, *delta, *said]
        weights = [*weights, *[reading] * len(delta), *[float(at in learnt)] * len(said)]
        after = "stopped"
    return Example(tuple(tokens), tuple(weights))


def _internal(message: dict[str, Any]) -> dict[str, Any]:
    """A reply as the gateway keeps it: calls without the API's wrapping."""
    calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
    return {"role": "assistant", "content": message["content"], **({"tool_calls": calls} if calls else {})}


class Corpora:
    """Searchers by number: over the real entities of the training split, and over made-up worlds."""

    def __init__(self, recipe: WarmstartRecipe, count: Count) -> None:
        self.recipe, self.count = recipe, count
        self._names = atlas.other_names()
        self.real = lru_cache(maxsize=REAL_WORLDS)(self._real)
        self.fantasy = lru_cache(maxsize=recipe.worlds)(self._fantasy)

    def searcher(self, corpus: FactCorpus, habits: SearchHabits | None = None) -> Searcher:
        """A searcher in a corpus under the recipe's budget."""
        search = self.recipe.search.scaled(self.recipe.search.limit or self.recipe.shape.positions)
        rng = random.Random(0)
        return Searcher(corpus, search, self.count, self.recipe.system, rng, habits or SearchHabits())

    def _real(self, number: int) -> Searcher:
        layouts = (INFOBOX, PROSE)
        world = build(atlas.entities("train"), seed=number, layouts=layouts)
        return self.searcher(corpus_of(world, layouts, seed=number))

    def _fantasy(self, number: int) -> Searcher:
        rng = random.Random(f"chained {number}")
        return self.searcher(corpus_of(chained_world(rng, self._names), LAYOUTS, seed=number))


def demonstrate(rng: random.Random, corpora: Corpora, phase: PhaseSection) -> list[Turn]:
    """One episode of a phase."""
    recipe = corpora.recipe
    hops = int(rng.choices(list(phase.kinds), list(phase.kinds.values()))[0].removeprefix("hops_"))
    real = rng.random() < recipe.real_share
    searcher = corpora.real(rng.randrange(REAL_WORLDS)) if real else corpora.fantasy(rng.randrange(recipe.worlds))
    searcher.rng, searcher.habits = rng, SearchHabits(**phase.search_habits.model_dump())
    return searcher.episode(multihop.draw(searcher.corpus, hops, rng, id="demo"))


def source_of(
    recipe: WarmstartRecipe, phase: PhaseSection, renderer: ChatML, vocabulary: int, first: int, count: Count
) -> Callable[[np.random.Generator], Example]:
    """The example source of a phase. `first` is the lowest token id that copy rows use."""
    corpora = Corpora(recipe, count)

    def draw(generator: np.random.Generator) -> Example:
        if phase.kind == "copy" or generator.random() < phase.copy_share:
            return copy_example(generator, vocabulary, first=first, small=phase.small_alphabet)
        rng = random.Random(int(generator.integers(2**62)))
        while True:
            rows = rows_of(renderer, demonstrate(rng, corpora, phase), reading=recipe.reading_weight)
            row = rng.choice(rows)
            if len(row.tokens) <= MAX_TOKENS:
                return row

    return draw


def held_out_rows(recipe: WarmstartRecipe, renderer: ChatML, count: Count, episodes: int) -> dict[str, list[Example]]:
    """Clean demonstrations on entities that training never saw, by number of hops."""
    layouts = (INFOBOX, PROSE)
    corpus = corpus_of(build(atlas.entities("held_out"), seed=1, layouts=layouts), layouts, seed=1)
    habits = SearchHabits(apart=0.0, read=0.0, grep=0.0, fault=0.0)
    searcher = Corpora(recipe, count).searcher(corpus, habits)
    rng = random.Random("held out")
    return {
        multihop.kind(hops): [
            row
            for _ in range(episodes)
            for row in rows_of(renderer, searcher.episode(multihop.draw(corpus, hops, rng, id="held")))
        ]
        for hops in multihop.HOPS
    }
