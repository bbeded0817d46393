"""Cutting a text into chunks. Contract: pure; the chunks of a text, one after the other, are the text.

A chunk holds whole paragraphs while they fit; one that alone is too long is cut after a sentence, else after a word,
else where the limit is. A token is a run of letters and digits, or any other visible character: an estimate that needs
no model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_TOKEN = re.compile(r"\w+|[^\w\s]")
_PARAGRAPH = re.compile(r"\n[ \t]*\n\s*")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n")
_WORD = re.compile(r"\s+")


def tokens(text: str) -> int:
    """How many tokens a text has."""
    return sum(1 for _ in _TOKEN.finditer(text))


def spans(text: str, most: int) -> Iterator[tuple[int, int]]:
    """Where the chunks of a text begin and end; each has at most `most` tokens (≥ 1). None for an empty text."""
    begin = end = 0
    held = 0
    for piece_begin, piece_end in _pieces(text, 0, len(text), most, (_PARAGRAPH, _SENTENCE, _WORD)):
        count = tokens(text[piece_begin:piece_end])
        if held and held + count > most:
            yield begin, end
            begin, held = piece_begin, 0
        held += count
        end = piece_end
    if end > begin:
        yield begin, end


def _pieces(
    text: str, begin: int, end: int, most: int, borders: tuple[re.Pattern[str], ...]
) -> Iterator[tuple[int, int]]:
    """A stretch cut at the first kind of border; what is still too long at the next kind."""
    at = begin
    for stop in [*(found.end() for found in borders[0].finditer(text, begin, end)), end]:
        if stop <= at:
            continue
        if tokens(text[at:stop]) <= most:
            yield at, stop
        elif len(borders) > 1:
            yield from _pieces(text, at, stop, most, borders[1:])
        else:
            yield from _runs(text, at, stop, most)
        at = stop


def _runs(text: str, begin: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """A stretch without borders, cut after each `most` tokens."""
    at = begin
    for number, found in enumerate(_TOKEN.finditer(text, begin, end), 1):
        if number % most == 0 and found.end() < end:
            yield at, found.end()
            at = found.end()
    if at < end:
        yield at, end
