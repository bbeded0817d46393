"""Reading and comparing answers. Contract: pure; never raises on what a model may write.

A table answer is lines of `a | b | c`. Tolerated: outer borders, a markdown rule (`|---|:-:|`), a header row (which may
reorder the columns), code fences, prose without bars around it, any spacing, bold and quotes around a cell.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from decimal import Decimal

Row = tuple[str, ...]

_RULE = re.compile(r":?-+:?|=+|")
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|[1-9]\d*|0)(?:\.\d+)?")
_BAR = re.compile(r"(?<!\\)\|")
_QUOTES = "\"'`*_ \u201c\u201d\u2018\u2019\u00ab\u00bb"


def normalise(text: str) -> str:
    """A cell or string answer in the form that is compared: NFKC, case, spaces, outer quotes, one form of numbers."""
    plain = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    plain = " ".join(plain.split()).strip(_QUOTES).rstrip(_QUOTES + ".")
    if _NUMBER.fullmatch(plain) and len(plain) <= 28:  # what Decimal's context holds exactly
        return format(Decimal(plain.replace(",", "")).normalize() + 0, "f")
    return plain


def parse_table(text: str, columns: Sequence[str] = ()) -> list[Row]:
    """The rows of an answer, cells normalised and in the order of `columns`. Rows keep the cells they have.

    With one column every line that is no rule, fence or header is a row; else only lines with a bar.
    """
    single = len(columns) == 1
    lines = [line.strip() for line in text.splitlines()]
    rows = [_cells(line) for line in lines if ((line and single) or "|" in line) and not line.startswith("```")]
    rows = [row for row in rows if not all(_RULE.fullmatch(cell) for cell in row)]
    names = [normalise(column) for column in columns]
    if not rows or not names or sorted(rows[0]) != sorted(names):
        return rows
    order = [rows[0].index(name) for name in names]
    return [tuple(row[i] for i in order) if len(row) == len(order) else row for row in rows[1:]]


def truth_rows(answer: Sequence[Sequence[str]]) -> list[Row]:
    """The rows of a true answer, normalised."""
    return [tuple(normalise(cell) for cell in row) for row in answer]


def _cells(line: str) -> Row:
    cells = _BAR.split(line)
    if len(cells) > 1 and not cells[0].strip():
        cells = cells[1:]
        if len(cells) > 1 and not cells[-1].strip():
            cells = cells[:-1]
    return tuple(normalise(cell.replace("\\|", "|")) for cell in cells)
