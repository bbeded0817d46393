"""Reading a ranked list of chunks. Contract: pure; never raises on what a model may write.

The form is one line a chunk, `why [chunk-id]`, the best first: the id stands where it stood when the chunk was shown.
Tolerated: `chunk-id: why`, bullets, numbers and quotes around the id, an id alone on its line, code fences, and prose
without an id.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

_BEHIND = re.compile(r"(.*?)[\s:–—-]*\[([^\[\]]+)\][\s.`*]*")
_BULLET = re.compile(r"(?:[-*•]\s+|\d+[.)]\s+)?[\[`*\"']*")
_LINE = re.compile(r"([^\s:\[\]`*\"'|]+)[\]`*\"']*\s*(?:[:|–—]+\s*(.*))?")
_REST = re.compile(r"[\]`*\"']*\s*(?:[:|–—]+\s*(.*))?")


class Ranked(NamedTuple):
    """A chunk of the answer, and why it is there."""

    id: str
    why: str


def parse_ranked(text: str, known: Collection[str] = ()) -> list[Ranked]:
    """The chunks of an answer in its order, each once (a chunk that comes again keeps its first place).

    `known` are ids that may hold spaces or colons: a line that begins with one of them means it.
    """
    found: dict[str, Ranked] = {}
    for line in map(str.strip, text.splitlines()):
        row = None if line.startswith("```") else _read(line, known)
        if row is not None:
            found.setdefault(row.id, row)
    return list(found.values())


def _read(line: str, known: Collection[str]) -> Ranked | None:
    marked = _BULLET.match(line)
    rest = line[marked.end() if marked else 0 :]
    for id in sorted((id for id in known if rest.startswith(id)), key=len, reverse=True):
        if match := _REST.fullmatch(rest, len(id)):
            return Ranked(id, (match[1] or "").strip())
    if match := _BEHIND.fullmatch(line):
        return Ranked(match[2].strip(), match[1].strip())
    if match := _LINE.fullmatch(rest):
        return Ranked(match[1], (match[2] or "").strip())
    return None


def format_ranked(rows: list[Ranked]) -> str:
    """The list as `parse_ranked` reads it."""
    return "\n".join(f"{row.why} [{row.id}]" for row in rows)
