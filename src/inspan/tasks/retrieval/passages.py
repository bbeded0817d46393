"""The facts of a world as a corpus. Contract: pure and seeded; ids say nothing of what a passage holds.

A document is an entity, its passages are the pages of the entity's attributes, `k17.2` being the third of document
`k17`. Pages carry rows of near-named entities too, so one fact may stand in several passages: `holders` knows them all.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inspan.errors import TaskError
from inspan.tasks.facts.world import Layout, World

LETTERS = "abcdefghijkmnpqrstuvwxyz"
MOST_DOCUMENTS = len(LETTERS) * 100
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document."""

    id: str
    document: str
    text: str


@dataclass(frozen=True, slots=True)
class FactCorpus:
    """A world with its passages. `rows` are the lines of the passages, each with the passages that have it."""

    world: World
    passages: tuple[Passage, ...]
    layouts: tuple[Layout, ...]
    rows: Mapping[str, tuple[str, ...]]
    words: Mapping[str, frozenset[str]]  # word → passages that have it

    def holders(self, name: str, attribute: str) -> list[str]:
        """The passages that hold a fact, in the order of the corpus."""
        value = self.world.value(name, attribute)
        lines = {
            layout.row.format(name=name, attribute=layout.label(attribute), value=value) for layout in self.layouts
        }
        found = {id for line in lines for id in self.rows.get(line, ())}
        return [passage.id for passage in self.passages if passage.id in found] if found else []

    def mentioning(self, text: str) -> set[str]:
        """The passages in which all words of a text stand one after the other."""
        words = _WORD.findall(text)
        if not words:
            return set()
        able = frozenset.intersection(*(self.words.get(word, frozenset()) for word in words))
        if len(words) == 1:
            return set(able)
        phrase = re.compile(r"\b" + r"\W+".join(map(re.escape, words)) + r"\b")
        return {passage.id for passage in self.passages if passage.id in able and phrase.search(passage.text)}


def corpus_of(world: World, layouts: Sequence[Layout], *, seed: int) -> FactCorpus:
    """The passages of a world that was built with these layouts. Raises TaskError when it has too many entities."""
    if len(world.entities) > MOST_DOCUMENTS:
        raise TaskError(f"{len(world.entities)} entities are more than the {MOST_DOCUMENTS} documents that have an id")
    rng = random.Random(f"passages {seed}")
    ids = [f"{letter}{number:02d}" for letter in LETTERS for number in range(100)]
    rng.shuffle(ids)
    passages: list[Passage] = []
    for entity, document in zip(world.entities.values(), ids, strict=False):
        refs = [world.refs[entity.name, attribute] for attribute in entity.values]
        texts = [world.pages[ref].text for ref in rng.sample(refs, len(refs))]
        passages += [Passage(f"{document}.{part}", document, text) for part, text in enumerate(texts)]
    rng.shuffle(passages)
    rows: dict[str, tuple[str, ...]] = {}
    words: dict[str, set[str]] = {}
    for passage in passages:
        for line in dict.fromkeys(passage.text.split("\n")):
            rows[line] = (*rows.get(line, ()), passage.id)
        for word in _WORD.findall(passage.text):
            words.setdefault(word, set()).add(passage.id)
    kept = {word: frozenset(ids) for word, ids in words.items()}
    return FactCorpus(world, tuple(passages), tuple(layouts), rows, kept)
