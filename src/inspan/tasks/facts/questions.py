"""Questions over a world. Contract: pure and seeded; every question can be answered from the world's pages.

Kinds: *wide* (one or two attributes of many entities), *deep* (a hop over a link, then an attribute), *mixed* (several
deep ones at once), *long* (the fact is on a continuation page), *narrow* (one look-up). Items are numbered, and the
answer is always a table `(number) entity | attribute | value`, keyed by the first two. No prompt says how to go about
it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inspan.errors import TaskError
from inspan.tasks.base import Task
from inspan.tasks.facts.world import World

COLUMNS = ("item", "attribute", "value")
KEYS = ("item", "attribute")
KINDS = ("wide", "deep", "mixed", "long", "narrow")


@dataclass(frozen=True, slots=True)
class Widths:
    """How many entities a wide and a mixed question asks for, both ends included."""

    wide: tuple[int, int] = (8, 10)
    mixed: tuple[int, int] = (3, 4)


def prompt(
    world: World, names: Sequence[str], attributes: Sequence[str], link: str | None = None, *, first: int = 1
) -> str:
    """The one form of all questions: `Find the capital and currency of the country of (1) Maradi; (2) Zinder.`"""
    wanted = " and ".join(world.label(a) for a in attributes)
    of = f"the {world.label(link)} of " if link else ""
    return f"Find the {wanted} of {of}{'; '.join(item(first + i, name) for i, name in enumerate(names))}."


def item(number: int, name: str) -> str:
    """An entity with its number in the question."""
    return f"({number}) {name}"


def make(world: World, kind: str, rng: random.Random, *, id: str, widths: Widths | None = None) -> Task:
    """One question of a kind. Raises `TaskError` when the world has too few entities for it."""
    widths = widths or Widths()
    if kind in ("deep", "mixed"):
        count = 1 if kind == "deep" else rng.randint(*widths.mixed)
        return _linked(world, kind, rng, id, count)
    count = rng.randint(*widths.wide) if kind == "wide" else 1
    attributes_wanted = rng.choice((1, 2)) if kind == "wide" else 1
    if kind not in KINDS:
        raise TaskError(f"unknown kind {kind!r}", hint=f"known: {', '.join(KINDS)}")
    return _plain(world, kind, rng, id, count, attributes_wanted)


def _plain(world: World, kind: str, rng: random.Random, id: str, count: int, n_attributes: int) -> Task:
    # Entities of one class share their attributes, so a class is drawn first, then members and attributes of it.
    classes = sorted({entity.kind for entity in world.entities.values()})
    order = rng.sample(classes, len(classes))
    for cls in order:
        members = [e for e in world.entities.values() if e.kind == cls]
        attributes = sorted({a for e in members for a in e.values})
        if len(attributes) < n_attributes:
            continue
        chosen = rng.sample(attributes, n_attributes)
        able = [e.name for e in members if all(a in e.values and _long(world, e.name, a, kind) for a in chosen)]
        if len(able) >= count:
            names = _with_near_names(world, able, count, rng)
            rows = _rows(world, names, chosen)
            meta = {"names": names, "attributes": chosen, "hops": 1}
            return _task(world, kind, id, prompt(world, names, chosen), rows, meta)
    what = f"the world has fewer than {count} entities for a {kind} question"
    raise TaskError(what, where=id, hint="lower the numbers in tasks.wide or tasks.mixed")


def _long(world: World, name: str, attribute: str, kind: str) -> bool:
    """Whether a page suits the kind: `long` wants a continued page, the others a plain one."""
    ref = world.refs[name, attribute]
    return ("continued: " in world.pages[ref].text) == (kind == "long")


def _with_near_names(world: World, able: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """Draw names so that some near-named entities (Niger and Nigeria) stand in one question."""
    allowed = set(able)
    names = rng.sample(list(able), count)
    if count > 2:
        for at in range(1, count):
            near = [n for n in world.neighbours[names[at - 1]] if n in allowed and n not in names]
            if near and rng.random() < 0.25:
                names[at] = near[0]
    return names


def _linked(world: World, kind: str, rng: random.Random, id: str, count: int) -> Task:
    starts = [
        (e.name, link)
        for e in world.entities.values()
        for link in e.links
        if e.values[link] in world.entities and _long(world, e.name, link, "deep")
    ]
    rng.shuffle(starts)
    for first, link in starts:
        attributes = sorted(world.entities[world.value(first, link)].values)
        if not attributes:
            continue
        attribute = rng.choice(attributes)
        names: list[str] = []
        targets: list[str] = []
        for name, other in [(first, link), *starts]:
            target = world.value(name, other)
            fits = attribute in world.entities[target].values and _long(world, target, attribute, "deep")
            if other == link and target not in targets and fits and len(names) < count:
                names.append(name)
                targets.append(target)
        if len(names) == count:
            rows = _rows(world, targets, [attribute])
            meta = {"names": names, "attributes": [attribute], "link": link, "targets": targets, "hops": 2}
            return _task(world, kind, id, prompt(world, names, [attribute], link), rows, meta)
    raise TaskError(f"the world has no {count} linked entities for a {kind} question", where=id)


def _rows(world: World, names: Sequence[str], attributes: Sequence[str]) -> list[tuple[str, str, str]]:
    numbered = list(enumerate(names, 1))
    return [(item(i, name), world.label(a), world.value(name, a)) for i, name in numbered for a in attributes]


def _task(world: World, kind: str, id: str, text: str, rows: Sequence[tuple[str, str, str]], meta: dict) -> Task:
    return Task(id=id, prompt=text, answer=tuple(rows), kind=kind, columns=COLUMNS, keys=KEYS, meta=meta)


def make_set(
    world: World, kinds: Mapping[str, float], count: int, *, seed: int, prefix: str, widths: Widths | None = None
) -> list[Task]:
    """`count` questions with the given shares of kinds (rounded by largest remainder), in shuffled order."""
    total = sum(kinds.values())
    if count < 1 or total <= 0:
        raise TaskError(f"an empty task set: {count} tasks of {dict(kinds)}", hint="give kinds a positive share")
    exact = {kind: count * share / total for kind, share in kinds.items()}
    counts = {kind: int(x) for kind, x in exact.items()}
    for kind in sorted(exact, key=lambda k: counts[k] - exact[k])[: count - sum(counts.values())]:
        counts[kind] += 1
    rng = random.Random(f"questions {seed} {prefix}")
    order = [kind for kind, n in counts.items() for _ in range(n)]
    rng.shuffle(order)
    return [make(world, kind, rng, id=f"{prefix}-{i:04d}-{kind}", widths=widths) for i, kind in enumerate(order)]
