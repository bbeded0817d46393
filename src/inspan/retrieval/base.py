"""Chunks, and what finds them. Contract: every ranking is deterministic; ties break by the order in the corpus."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a document on paragraph borders. `id` is unique in the corpus, and short: a model has to write it."""

    id: str
    document: str  # the document's id
    text: str
    start: int  # characters from the document's beginning
    tokens: int  # its length, in the tokens that budgets are counted in


@dataclass(frozen=True, slots=True)
class Hit:
    """A chunk that was found. Scores compare within one list of hits only."""

    chunk: Chunk
    score: float


class Retriever(Protocol):
    """What a search agent may ask of a corpus. `exclude` are ids of chunks that are not wanted (seen before)."""

    def search(self, query: str, count: int, *, exclude: Collection[str] = ()) -> list[Hit]:
        """The best `count` chunks, best first."""
        ...

    def grep(self, pattern: str, count: int, *, exclude: Collection[str] = ()) -> list[Hit]:
        """The first `count` chunks that a regular expression matches. Raises InputError for a bad pattern."""
        ...

    def document(self, id: str) -> Sequence[Chunk]:
        """All chunks of a document, in order. Raises InputError when there is no such document."""
        ...

    def chunk(self, id: str) -> Chunk:
        """One chunk. Raises InputError when there is none of that id."""
        ...
