"""Made-up worlds: names and values drawn afresh for each, so that a model can only copy what it reads.

Attribute words are partly made up too; the words of the unseen layout never occur.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from inspan.tasks.facts.world import INFOBOX, PROSE, Entity, Layout, World, build

LAYOUTS = (
    INFOBOX,
    PROSE,
    Layout("{attribute} of {name}: {value}"),
    Layout("{name}: {attribute} = {value}"),
    Layout("{attribute} ({name}) = {value}"),
    Layout("{name} [{attribute}] {value}"),
    Layout("{name} has {value} as {attribute}."),
    Layout("{value} - {attribute}, {name}"),
)
_NOUNS = """
anthem mayor river crop founder patron motto saint harbour bridge festival dialect export flower bird animal
stone climate airport railway stadium museum drink dish dance sport flag colour league senate judge bishop
guild mill market tower castle garden island valley summit lake coast border region province district quarter
postal tax registry lottery library college theatre newspaper radio channel main old first largest official
national
"""
WORDS = tuple(_NOUNS.split())
REAL = ("capital", "currency", "calling code", "area", "population")


def fantasy_world(rng: random.Random, names: Sequence[str], *, countries: int = 40, cities: int = 60) -> World:
    """A world of made-up countries and cities that borrow real place names in new roles."""
    taken: set[str] = set()

    def fresh() -> str:
        while True:
            name = _name(rng, names)
            if rng.random() < 0.15 and taken:
                name = _twin(rng, rng.choice(sorted(taken)))
            if name not in taken and len(name) < 28:
                taken.add(name)
                return name

    attributes = list(REAL) if rng.random() < 0.5 else _attributes(rng, 5)
    link = "country" if rng.random() < 0.5 else _attributes(rng, 1)[0]
    makers = [rng.choice((_proper, _code, _digits)) for _ in attributes]
    made = [
        Entity(fresh(), "country", {a: m(rng, names) for a, m in zip(attributes, makers, strict=True)})
        for _ in range(countries)
    ]
    for _ in range(cities):
        values = {link: rng.choice(made[:countries]).name, "population": _digits(rng, names)}
        made.append(Entity(fresh(), "city", values, links=(link,)))
    layouts = (INFOBOX, PROSE) if rng.random() < 0.5 else LAYOUTS
    return build(made, seed=rng.getrandbits(60), layouts=layouts, long_share=0.12)


def chained_world(rng: random.Random, names: Sequence[str], *, countries: int = 30, cities: int = 60) -> World:
    """A made-up world whose links make chains: a city leads to its country, and the country to one of its cities."""
    taken: set[str] = set()
    link, seat = ("country", "capital") if rng.random() < 0.5 else _single_words(rng, 2, ())
    own = _single_words(rng, 4, (link, seat))
    real = ["currency", "calling code", "area", "population"]
    of_country = [word if rng.random() < 0.5 else made for word, made in zip(real, own, strict=True)]
    of_city = ["population" if "population" in of_country else own[3], *_single_words(rng, 1, (link, seat, *own))]
    makers = {a: rng.choice((_proper, _code, _digits)) for a in (*of_country, *of_city)}
    homes = [_fresh(rng, names, taken) for _ in range(countries)]
    towns = [(_fresh(rng, names, taken), homes[at % countries]) for at in range(cities)]
    made: list[Entity] = []
    for home in homes:
        values = {a: makers[a](rng, names) for a in of_country}
        values[seat] = rng.choice([town for town, where in towns if where == home])
        made.append(Entity(home, "country", values, links=(seat,)))
    for town, home in towns:
        values = {link: home, **{a: makers[a](rng, names) for a in of_city}}
        made.append(Entity(town, "city", values, links=(link,)))
    layouts = (INFOBOX, PROSE) if rng.random() < 0.5 else LAYOUTS
    return build(made, seed=rng.getrandbits(60), layouts=layouts)


def _single_words(rng: random.Random, count: int, taken: Sequence[str]) -> list[str]:
    """Attributes without "of", which would read as a further hop."""
    made: list[str] = []
    while len(made) < count:
        word = " ".join(rng.sample(WORDS, rng.choice((1, 1, 2))))
        if word not in made and word not in taken and word != "population":
            made.append(word)
    return made


def _fresh(rng: random.Random, names: Sequence[str], taken: set[str]) -> str:
    """A name that is not taken yet, sometimes near to one that is."""
    while True:
        name = _twin(rng, rng.choice(sorted(taken))) if rng.random() < 0.15 and taken else _name(rng, names)
        if name not in taken and len(name) < 28:
            taken.add(name)
            return name


def _attributes(rng: random.Random, count: int) -> list[str]:
    made: list[str] = []
    while len(made) < count:
        word = rng.choice((" ", " ", " of ")).join(rng.sample(WORDS, rng.choice((1, 1, 2))))
        if word not in made and word != "population":
            made.append(word)
    return made


def _name(rng: random.Random, names: Sequence[str]) -> str:
    """A place name, or one glued from the beginnings and ends of two."""
    name = rng.choice(names)
    if rng.random() < 0.6:
        return name
    other = rng.choice(names)
    return (name[: rng.randint(2, 5)] + other[-rng.randint(2, 6) :]).strip(" -'").capitalize()


def _twin(rng: random.Random, name: str) -> str:
    first = name.split()[0]
    return rng.choice(
        (f"New {name}", f"{first}ia", f"{name} City", f"Port {first}", f"{first}-{name[:3]}", f"South {name}")
    )


def _proper(rng: random.Random, names: Sequence[str]) -> str:
    return _name(rng, names)


def _code(rng: random.Random, names: Sequence[str]) -> str:
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(3))


def _digits(rng: random.Random, names: Sequence[str]) -> str:
    return str(rng.randint(1, 10 ** rng.randint(1, 6)))
