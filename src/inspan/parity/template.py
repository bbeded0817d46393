"""What several prompts of one agent have in common. Contract: pure; a template fits every text that it was made from.

A template is a text with holes, written "⟨…⟩", that stand for anything. Two texts are compared by lines, and lines that
differ by words. A word that two differing stretches share by chance is no common part: what stands between two holes
is kept only when it is not small beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Final

HOLE: Final = "⟨…⟩"
_WORDS: Final = re.compile(r"⟨[^⟨⟩]*⟩|\w+|\s+|[^\w\s]")
_MOST: Final = 4_000_000  # pairs of words that are worth comparing; beyond, the whole stretch differs
_CHANCE: Final = 4  # a word between two holes must not have more than so many words of difference beside it


def fits(template: str, text: str) -> bool:
    """Whether a text is the template with its holes filled."""
    first, *rest = template.split(HOLE)
    if not rest:
        return template == text
    *inner, last = rest
    at, end = len(first), len(text) - len(last)
    if at > end or not text.startswith(first) or not text.endswith(last):
        return False
    for part in inner:
        found = text.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def widened(template: str, text: str) -> tuple[str, float]:
    """The template with holes where the text differs, and how many of the words that both might share are kept."""
    if fits(template, text):
        return template, 1.0
    runs = _merged(list(_runs(template, text)))
    made = "".join(HOLE if hole else part for part, hole in _without_chance(runs))
    shared = min(_count(template.replace(HOLE, "")), _count(text.replace(HOLE, "")))
    return made, _count(made.replace(HOLE, "")) / shared if shared else 0.0


Run = tuple[str, bool]
"""A stretch of the template, and whether the text differs there. What a hole replaces is counted by its longer side."""


def _runs(template: str, text: str) -> Iterator[Run]:
    for old, new, same in _compared(template.splitlines(keepends=True), text.splitlines(keepends=True)):
        if same:
            yield "".join(old), False
            continue
        olds, news = _WORDS.findall("".join(old)), _WORDS.findall("".join(new))
        if len(olds) * len(news) > _MOST:
            yield max("".join(old), "".join(new), key=len), True
            continue
        for before, after, equal in _compared(olds, news):
            yield ("".join(before), False) if equal else (max("".join(before), "".join(after), key=len), True)


def _compared(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[Sequence[str], Sequence[str], bool]]:
    """Stretches of two sequences: those that are equal, and those that differ."""
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start] != HOLE:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end] != HOLE:
        end += 1
    if start:
        yield old[:start], new[:start], True
    middle, other = old[start : len(old) - end], new[start : len(new) - end]
    for tag, a, b, c, d in SequenceMatcher(None, middle, other, autojunk=False).get_opcodes():
        yield middle[a:b], other[c:d], tag == "equal"
    if end:
        yield old[len(old) - end :], new[len(new) - end :], True


def _merged(runs: Sequence[Run]) -> list[Run]:
    """Neighbours of one kind as one; a hole of the template is a difference."""
    merged: list[Run] = []
    for part, hole in runs:
        hole = hole or HOLE in part
        if merged and merged[-1][1] == hole:
            merged[-1] = (merged[-1][0] + part, hole)
        else:
            merged.append((part, hole))
    return merged


def _without_chance(runs: Sequence[Run]) -> list[Run]:
    """Runs without what two differing stretches share by chance: the space between them, and a few words."""
    last = len(runs) - 1
    runs = _merged([(part, hole or (0 < at < last and part.isspace())) for at, (part, hole) in enumerate(runs)])
    kept: list[Run] = []
    for at, (part, hole) in enumerate(runs):
        if not hole and 0 < at < len(runs) - 1:
            around = max(_count(runs[at - 1][0]), _count(runs[at + 1][0]))
            hole = around > _CHANCE * max(1, _count(part))
        kept.append((part, hole))
    return _merged(kept)


def _count(text: str) -> int:
    return sum(word[0].isalnum() or word[0] in "_⟨" for word in _WORDS.findall(text))
