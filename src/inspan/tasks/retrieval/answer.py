"""Reading a ranked list of chunks. Contract: pure; never raises on what a model may write.

The form is one line a chunk, `chunk-id: why`, the best first. Tolerated: bullets, numbers, brackets and quotes around
the id, an id alone on its line, code fences and prose without an id.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_LINE = re.compile(r"(?:[-*•]\s+|\d+[.)]\s+)?[\[`*\"']*([^\s:\[\]`*\"'|]+)[\]`*\"']*\s*(?:[:|–—]+\s*(.*))?")


class Ranked(NamedTuple):
    """A chunk of the answer, and why it is there."""

    id: str
    why: str


def parse_ranked(text: str) -> list[Ranked]:
    """The chunks of an answer in its order, each once (a chunk that comes again keeps its first place)."""
    found: dict[str, Ranked] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line.strip())
        if match and not line.strip().startswith("```"):
            found.setdefault(match[1], Ranked(match[1], (match[2] or "").strip()))
    return list(found.values())


def format_ranked(rows: list[Ranked]) -> str:
    """The list as `parse_ranked` reads it."""
    return "\n".join(f"{row.id}: {row.why}" for row in rows)
