"""A world: entities with attributes, rendered as pages. Contract: pure and seeded; the same seed gives the same pages.

One page holds one attribute of one entity, so the facts of a country are split over pages. A page's *reference*
(`Niger capital 417`) names entity and attribute but never the value, and ends in a number that only a search reveals.
Pages carry distractors: the same attribute of a near-named entity, and "see also" lines. `long` pages put the fact on
a continuation page that no search finds.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Entity:
    """A thing with a unique name. `links` names attributes whose value is itself an entity of the world."""

    name: str
    kind: str
    values: Mapping[str, str]
    links: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """A document of the library. Pages with `listed` False are reached from another page, not by search."""

    ref: str
    text: str
    listed: bool = True


@dataclass(frozen=True, slots=True)
class Layout:
    """How facts are written. `row` is a format string over name, attribute and value; `rename` changes attributes."""

    row: str = "{name} | {attribute} | {value}"
    rename: Mapping[str, str] = field(default_factory=dict)

    def label(self, attribute: str) -> str:
        """The attribute as this layout calls it."""
        return self.rename.get(attribute, attribute)


INFOBOX = Layout()
PROSE = Layout(row="the {attribute} of {name} is {value}.")
UNSEEN = Layout(
    row="{name} ({attribute}): {value}",
    rename={
        "capital": "seat of power",
        "currency": "money code",
        "calling code": "phone prefix",
        "area": "surface",
        "population": "inhabitants",
        "country": "home state",
    },
)


@dataclass(slots=True)
class World:
    """Entities and their pages."""

    entities: dict[str, Entity]
    layout: Layout
    pages: dict[str, Page]
    refs: dict[tuple[str, str], str]  # (name, attribute) → reference of the listed page
    neighbours: dict[str, list[str]]  # near-named entities, best first

    def value(self, name: str, attribute: str) -> str:
        """The truth; KeyError when the entity lacks the attribute."""
        return self.entities[name].values[attribute]

    def label(self, attribute: str) -> str:
        """The attribute's name in questions, pages and answers of this world."""
        return self.layout.label(attribute)


def near_names(names: Sequence[str], count: int = 3) -> dict[str, list[str]]:
    """For each name the others that share a word or a four-letter beginning with it, in order of their overlap."""
    grams = {name: _grams(name) for name in names}
    holders: dict[str, list[str]] = {}
    for name in names:
        for gram in grams[name]:
            holders.setdefault(gram, []).append(name)
    near: dict[str, list[str]] = {}
    for name in names:
        overlap: dict[str, int] = {}
        for gram in grams[name]:
            for other in holders[gram][:50]:
                if other != name:
                    overlap[other] = overlap.get(other, 0) + len(gram)
        near[name] = sorted(overlap, key=lambda other: (-overlap[other], other))[:count]
    return near


def _grams(name: str) -> list[str]:
    words = [word for word in name.lower().replace("-", " ").split() if len(word) > 3]
    return sorted({gram for word in words for gram in (word, word[:4])})


def build(
    entities: Sequence[Entity], *, seed: int, layouts: Sequence[Layout] = (INFOBOX,), long_share: float = 0.0
) -> World:
    """Render the pages of a world. Each page takes one of `layouts`; all layouts must rename alike."""
    rng = random.Random(f"world {seed}")
    by_name = {entity.name: entity for entity in entities}
    near = near_names(list(by_name))
    world = World(by_name, layouts[0], {}, {}, near)
    names = list(by_name)
    for entity in entities:
        for attribute in entity.values:
            _add_pages(world, entity, attribute, rng, rng.choice(list(layouts)), names, rng.random() < long_share)
    return world


def _add_pages(
    world: World, entity: Entity, attribute: str, rng: random.Random, layout: Layout, names: list[str], long: bool
) -> None:
    title = f"{entity.name} {layout.label(attribute)}"
    ref = f"{title} {_number(rng, entity.values[attribute])}"
    rows = [_row(layout, entity, attribute)]
    twins = [world.entities[n] for n in world.neighbours[entity.name] if attribute in world.entities[n].values]
    if twins and rng.random() < 0.4:
        rows.append(_row(layout, rng.choice(twins), attribute))
    see_also = f"see also: {rng.choice(names)}" if rng.random() < 0.3 else ""
    rng.shuffle(rows)
    world.refs[entity.name, attribute] = ref
    if long:
        tail = f"{title} {_number(rng, entity.values[attribute])}"
        if tail != ref:
            start = [see_also] if see_also else []
            world.pages[ref] = Page(ref, "\n".join([*start, f"continued: {tail}"]))
            world.pages[tail] = Page(tail, "\n".join(rows), listed=False)
            return
    world.pages[ref] = Page(ref, "\n".join([*rows, see_also] if see_also else rows))


def _number(rng: random.Random, value: str) -> int:
    """The number of a page: three digits that are not the value itself."""
    number = rng.randint(100, 999)
    return number if str(number) != value else 100 + (number - 99) % 900


def _row(layout: Layout, entity: Entity, attribute: str) -> str:
    return layout.row.format(name=entity.name, attribute=layout.label(attribute), value=entity.values[attribute])
