"""Where examples come from: repeated random tokens, and demonstrations as rendered rows.

Contract: an example follows from the generator it is drawn with alone (worlds are made from their number), so that a
training that is resumed sees what it would have seen. The loss is on what the assistant writes, its end of turn
included, and with a small weight on what it reads: much of that repeats what was said, a dense signal for copying.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from inspan.gateway.render import ChatML
from inspan.learner.sft import Example
from inspan.tasks.facts import atlas, questions
from inspan.tasks.facts.world import INFOBOX, PROSE, World, build
from inspan.warmstart.demos import SUBAGENT_SYSTEM, Conversation, Expert, Habits
from inspan.warmstart.fantasy import fantasy_world
from inspan.warmstart.recipe import PhaseSection, WarmstartRecipe

COPY_LENGTH = 128
LONG_SHARE = 0.12
REAL_WORLDS = 4
MAX_TOKENS = 2600


def copy_example(generator: np.random.Generator, vocabulary: int, *, first: int, small: float) -> Example:
    """Random tokens that come again after random gaps; the loss is on the repetitions.

    This forms the copy circuit with a dense signal. With probability `small` few distinct tokens are used: then what
    follows a token is ambiguous, and more than one token back must be matched (the first three are not asked for).
    """
    length = int(generator.integers(8, 41))
    few = generator.random() < small
    alphabet = generator.integers(first, vocabulary, int(generator.integers(8, 65))) if few else None
    tokens = (
        generator.integers(first, vocabulary, COPY_LENGTH)
        if alphabet is None
        else generator.choice(alphabet, COPY_LENGTH)
    )
    weights = np.zeros(COPY_LENGTH)
    pattern, at = tokens[:length].copy(), length
    while (at := at + int(generator.integers(1, 21))) + length <= COPY_LENGTH:
        tokens[at : at + length] = pattern
        weights[at + (3 if few else 1) : at + length] = 1.0
        at += length
    return Example(tuple(tokens.tolist()), tuple(weights.tolist()))


def render(renderer: ChatML, talk: Conversation, *, reading: float = 0.0) -> Example:
    """A conversation as one row: exactly the tokens that the gateway would have recorded.

    `reading` is the weight of the tokens that the assistant reads (beyond the first message); its own weigh 1.
    """
    tokens = list(renderer.context({**talk.messages[0], "tools": talk.tools}))
    weights = [0.0] * len(tokens)
    after = "context"
    for message in talk.messages[1:]:
        if message["role"] != "assistant":
            delta, said = renderer.context(message, after=after), ()  # type: ignore[arg-type]
            after = "context"
        else:
            delta, said = renderer.opening(after=after), renderer.spoken(message)  # type: ignore[arg-type]
            after = "stopped"
        tokens += [*delta, *said]
        weights += [reading] * len(delta) + [1.0] * len(said)
    return Example(tuple(tokens), tuple(weights))


class Worlds:
    """Experts by world number: `real` first, then made-up ones. Made when first asked for."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._names = atlas.other_names()
        self.real = lru_cache(maxsize=REAL_WORLDS)(self._real)
        self.fantasy = lru_cache(maxsize=count)(self._fantasy)

    def _real(self, number: int) -> Expert:
        world = build(atlas.entities("train"), seed=number, layouts=(INFOBOX, PROSE), long_share=LONG_SHARE)
        return _expert(world)

    def _fantasy(self, number: int) -> Expert:
        return _expert(fantasy_world(random.Random(f"fantasy {number}"), self._names))


def _expert(world: World) -> Expert:
    return Expert(world, random.Random(0), Habits())


def converse(rng: random.Random, worlds: Worlds, phase: PhaseSection, real_share: float) -> Conversation:
    """One demonstration of a phase."""
    role = rng.choices(list(phase.roles), list(phase.roles.values()))[0]
    kind = rng.choices(list(phase.kinds), list(phase.kinds.values()))[0]
    real = rng.random() < real_share
    expert = worlds.real(rng.randrange(REAL_WORLDS)) if real else worlds.fantasy(rng.randrange(worlds.count))
    shares = phase.subagent_habits if role == "subagent" else phase.habits
    expert.rng, expert.habits = rng, Habits(**shares.model_dump())
    if role == "subagent":
        single = {"narrow": "wide", "mixed": "deep"}.get(kind, kind)
        task = questions.make(expert.world, single, rng, id="demo", widths=questions.Widths((1, 1), (1, 1)))
        return expert.alone(task, system=SUBAGENT_SYSTEM, first=rng.randint(1, 10))
    task = questions.make(expert.world, kind, rng, id="demo", widths=questions.Widths(phase.wide, phase.mixed))
    if role == "single":
        return expert.alone(task)
    # Where there is little to share out, the expert delegates less.
    spawn = phase.habits.spawn * (1.0 if kind in ("wide", "mixed") else 0.6)
    return expert.delegate(task) if rng.random() < spawn else expert.alone(task, delegating=True)


def source_of(
    recipe: WarmstartRecipe, phase: PhaseSection, renderer: ChatML, vocabulary: int, first: int
) -> Callable[[np.random.Generator], Example]:
    """The example source of a phase. `first` is the lowest token id that copy rows use."""
    worlds = Worlds(recipe.worlds)

    def copying(generator: np.random.Generator) -> Example:
        return copy_example(generator, vocabulary, first=first, small=phase.small_alphabet)

    def demonstrating(generator: np.random.Generator) -> Example:
        if generator.random() < phase.copy_share:
            return copying(generator)
        rng = random.Random(int(generator.integers(2**62)))
        while True:
            example = render(renderer, converse(rng, worlds, phase, recipe.real_share), reading=recipe.reading_weight)
            if len(example.tokens) <= MAX_TOKENS:
                return example

    return copying if phase.kind == "copy" else demonstrating
